"""Porting scripts of the Apex era: ``harness port`` reads the syntax tree of a script, reports what has changed since,
and writes a patch. It executes nothing and does not import torch.

Start at ``command.py``, then ``porting.py``, which lists the passes in order.
"""
