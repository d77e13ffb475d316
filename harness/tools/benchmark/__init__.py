"""``harness bench``: time and memory of the parallel strategies on this machine, each case in its own processes.

Benchmarks of the project itself are scripts in the top-level folder benchmarks/. Start at strategies.py.
"""
