"""``harness doctor``: what this machine offers for training, its problems, and the commands that fix them.

Start at checks.py: a check is a function that yields findings; CHECKS lists them in their order.
"""
