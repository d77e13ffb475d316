"""``harness sweep``: one experiment trained many times over a space of settings.

Not here: training itself. Each trial is a process with its own run folder, and only that folder is read.
Start at spec.py (the sweep file), then plan.py (what would run) and runner.py (running it); study.py keeps the state.
"""
