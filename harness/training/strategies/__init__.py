"""Parallel strategies: one file for each, with a class ``Strategy``.

Not here: the conversion of sharded tensors (training/fsdp.py) or the exchange of gradients itself (apex/parallel).
Start at base.py, which says when the methods are called.
"""
