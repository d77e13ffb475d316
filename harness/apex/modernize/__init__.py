"""``--modernize``: what Python, numpy, torch and other libraries removed since 2018, put back for an old script.

``table`` lists it all: names that moved, and calls that are refused today. Each does what it did, with the exceptions
that docs/apex.md names. ``hook`` applies the table to a library once the script has imported it, so nothing is imported
here first. ``torch_bridges`` and ``other_bridges`` hold what replaces the removed functions.
"""

from __future__ import annotations

from harness.apex.modernize.hook import modernize

__all__ = ["modernize"]
