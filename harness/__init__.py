"""apex-harness: the NVIDIA Apex training recipe on current PyTorch."""
