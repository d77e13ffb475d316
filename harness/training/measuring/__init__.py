"""What a run measures while it trains: times of a step's phases, other costs of time, and memory.

Not here: the explanation of a slow run (tools/explain), which reads these measurements from the log.
Start at meter.py.
"""
