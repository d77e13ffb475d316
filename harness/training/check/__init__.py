"""``harness check``: build the run that a configuration describes and take one step, before anything is started.

Not here: errors of single settings and contradictions between them (harness/config).
Start at preflight.py; trial.py takes the step.
"""
