"""``--modernize``: what Python, numpy, torch and other libraries removed since 2018, put back for an old script.

``table`` lists it all: names that moved, and calls that are refused today. Each does what it did; what cannot be
restored is not in the table, and docs/apex.md gives the reasons and the two exceptions. ``hook`` applies the table to a
library once the script has imported it, so nothing is imported here first. The other modules hold what replaces the
removed functions. ``suggestion`` finds out whether an error that stopped a script is one that ``--modernize`` prevents.
"""

from __future__ import annotations

from harness.apex.modernize.hook import modernize

__all__ = ["modernize"]
