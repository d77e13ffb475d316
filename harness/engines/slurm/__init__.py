"""Ranks in a Slurm batch job. Start at engine.py."""
