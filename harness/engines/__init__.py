"""Engines: where ranks are started. Each starts ``driver.py`` somewhere and reports how its ranks ended.

Not here: the supervision of local processes (distributed/worker_group.py), or the judgement of a run (runs/outcome.py).
Start at base.py (the protocol) and flyte/engine.py (a small engine); launch.py runs any of them.
"""
