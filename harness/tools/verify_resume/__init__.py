"""``harness verify-resume``: kill and resume a training, and compare it with an undisturbed one.

The audit of any command is harness/audit. Start at verification.py, which makes an audit of a configuration.
"""
