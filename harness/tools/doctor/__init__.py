"""``harness doctor``: what this machine offers for training, its problems, and the commands that fix them.

A check is a function that yields findings (findings.py). Start at examine.py, which lists the checks in their order.
"""
