"""The run folder, local or at a URL: file names, atomic writes, checkpoints, how a run ended, and reading it all back.

Not here: what goes into a checkpoint (training/run.py) or what the numbers mean (report).
Start at run_dir.py, then checkpoint.py and reader.py.
"""
