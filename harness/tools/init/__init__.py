"""``harness init``: a first configuration for annotations, with the reason for each value.

Start at ``first_config``.
"""
