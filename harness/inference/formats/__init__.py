"""The formats of ``harness export``: how a trained model becomes a file. One module for each.

Start at base.py; safetensors.py is the shortest one.
"""
