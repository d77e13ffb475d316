"""Ranks in a task of Flyte. Start at engine.py; task.py runs inside the workflow."""
