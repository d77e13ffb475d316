"""One rank's training: build the run, the loop, evaluation, metrics, optimizers, precision and parallel strategies.

Not here: tasks and datasets, or the Apex contract (harness/apex), which optimizer/precision.py uses.
Start at loop.py; docs/architecture.md goes on. build.py assembles a run, main.py goes from start to exit.
"""
