"""``harness data``: annotation tables of a user's own data, their split into two, and the datasets of the examples.

Not here: how a run reads these tables (harness/data). Start at command.py; each kind of source is one module.
"""
