"""What a checkpoint contains: saving a run, and restoring one.

Not here: the files of a checkpoint and which are kept (runs/checkpoint.py, runs/checkpoints.py, runs/formats).
Start at checkpointing.py; resuming.py restores what it saves.
"""
