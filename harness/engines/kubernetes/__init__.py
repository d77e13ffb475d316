"""Ranks in the pods of a PyTorchJob. Start at engine.py; pytorchjob.py writes the manifest."""
