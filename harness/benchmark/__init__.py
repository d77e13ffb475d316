"""``harness bench``: time and memory of the parallel strategies on this machine, each case in processes of its own.

Not here: benchmarks of the project itself, which are scripts in the top-level folder benchmarks/.
Start at strategies.py; case.py measures one case, report.py writes the tables.
"""
