"""Parallel strategies: one file for each, with a class ``Strategy``.

Not here: the exchange of gradients itself (apex/parallel).
Start at base.py, which says when the methods are called. sharding.py shards models and converts sharded tensors.
"""
