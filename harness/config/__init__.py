"""The configuration: every setting, how YAML files and overrides become one, and the look-up of parts by name.

Not here: anything that touches data, devices or ranks. The settings of a task are in harness/tasks.
Start at schema.py (every setting), then loader.py (the layers of checks) and plugins.py (parts by name).
"""
