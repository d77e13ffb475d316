"""What a run that is killed and resumed shows of its state, for ``harness verify-resume``.

Not here: the comparison of two runs (tools/compare).
Start at probe.py.
"""
