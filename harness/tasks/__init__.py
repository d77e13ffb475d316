"""The tasks: the folder ``name/`` of a task has config.py (its section of the YAML) and task.py (data, model and
metrics).

Not here: the interface that all tasks implement (training/task.py) or the reading of data (harness/data).
Start at mnist/task.py; a launcher does not import it, so config.py must not import torch.
"""
