"""One rank's training: build the run, the loop, evaluation, metrics, optimizers, precision and parallel strategies.

Not here: tasks and datasets, or the Apex contract (harness/apex), which optimizer/precision.py uses.
Start at loop.py; docs/architecture.md goes on. run_start.py starts and ends a run on one rank, build.py assembles it.
"""
