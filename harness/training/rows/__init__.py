"""The rows of a run: opening its data, dividing them among ranks and steps, and counting those that were used.

Not here: how rows are read and batched (harness/data), and the shard rules (data/shards.py).
Start at division.py.
"""
