"""Ranks: identity, collectives, stopping, and supervision of the processes that run them.

Not here: gradients (training/strategies), or where ranks are started (engines).
Start at launch_env.py, then runtime.py (what all ranks do in step) and watchdog.py (lost peers).
"""
