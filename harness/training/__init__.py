"""One rank's training: build the run, the loop, evaluation, metrics, optimizers, precision and parallel strategies.

Not here: tasks and datasets, or the Apex contract (harness/apex), which optimizer/precision.py uses.
Start at loop.py, then build.py (assembly in order) and main.py (from process start to exit code).
"""
