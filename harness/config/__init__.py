"""The configuration: the models that a YAML file is validated against, and how files become one of them.

Not here: anything that touches data, devices or ranks. A task's own settings are in harness/tasks.
Start at schema.py (every setting), then loader.py (merge, override, validate).
"""
