"""The engine that runs ranks on the workers of a Dask cluster.

Not here: how ranks train, and how a run's outcome is decided (harness.runs.outcome).
Start at engine.py, then cluster_run.py and run_files.py (the client's side) and worker.py (the
workers' side).
"""
