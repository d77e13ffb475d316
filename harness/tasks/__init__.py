"""The tasks: a task ``name`` is the folder ``name/``, with config.py (its section of the YAML) and task.py (the rest).

Not here: the interface that all tasks implement (training/task.py) or the reading of data (harness/data).
Start at mnist/task.py; a launcher reads config.py only, which therefore must not import torch.
"""
