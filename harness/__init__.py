"""apex-harness: the NVIDIA Apex training recipe, alive on today's PyTorch."""
