"""The run folder, local or at a URL: file names, atomic writes, checkpoints, stores, exit records, and reading it all.

Not here: what goes into a checkpoint (training/checkpoints/checkpointing.py) or what the numbers mean (report).
Start at layout.py and run_dir.py, then checkpoint.py; remote.py and url_store.py are for runs at URLs.
"""
