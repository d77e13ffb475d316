"""Ranks on the workers of a Dask cluster. Start at engine.py."""
