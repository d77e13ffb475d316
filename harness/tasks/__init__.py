"""The tasks: the folder ``name/`` of a task has settings.py (its section of the YAML), config.py (which opens its data)
and task.py (the data, the model and the metrics).

Not here: the interface that all tasks implement (training/task.py) or the reading of data (harness/data).
Start at mnist/task.py; a launcher does not import it, so config.py and settings.py must not import torch.
"""
