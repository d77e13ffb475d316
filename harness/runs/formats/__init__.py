"""Checkpoint formats: how the content of a checkpoint becomes files. One module for each.

Start at base.py; whole.py is the shortest one.
"""
