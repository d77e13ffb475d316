"""``harness sweep``: one experiment trained many times over a space of settings.

Not here: training itself. Each trial is a process with a run folder of its own, which is all that is read of it.
Start at spec.py (the sweep file), then plan.py (what would run) and runner.py (running it); study.py keeps the state.
"""
