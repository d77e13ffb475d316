"""Imported once by the fork server of tests.ranks, instead of by every rank: whatever a verb of the harness needs."""

import importlib
import pkgutil
from contextlib import suppress

import numpy  # noqa: F401
import pandas  # noqa: F401

import harness

for module in pkgutil.walk_packages(harness.__path__, "harness."):
    # What these import is slow or starts threads.
    if not module.name.startswith(("harness.engines.", "harness.trackers.", "harness.sweep.", "harness.__main__")):
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module.name)

with suppress(ImportError):
    import harness.sweep.main
    import harness.sweep.runner  # noqa: F401
