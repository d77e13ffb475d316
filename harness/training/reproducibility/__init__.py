"""Equal bits: random streams, deterministic operations, and sums that do not depend on the number of processes.

Not here: the order of rows (data/shards.py) and the seeds of rows (data/seeds.py).
Start at rng.py; logical_ranks.py has parallel.logical_ranks.
"""
