"""``harness compare``: the differences between two runs, or two groups of runs that differ by seed.

It only reads run folders (``harness.runs.reader``). Start at comparison.py; text.py prints what it finds.
"""
