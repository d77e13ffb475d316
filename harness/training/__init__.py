"""One rank's training, from its start to its exit code. The files here are the loop and the run that it trains.

In folders: the rows of a run, its model, its optimizer, parallel strategies, evaluation, checkpoints, measuring,
reproducibility, and ``harness check``. Not here: tasks and datasets, or the Apex contract (harness/apex), which
optimizer/precision.py uses.
Start at loop.py; docs/architecture.md goes on. run_start.py starts and ends a run on one rank, build.py assembles it.
"""
