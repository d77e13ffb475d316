"""Imported once by the fork server of tests.ranks, instead of by every rank."""

import contextlib

import numpy  # noqa: F401

import harness.training.main  # noqa: F401

with contextlib.suppress(ImportError):
    import torchvision  # noqa: F401

with contextlib.suppress(ImportError):
    import harness.sweep.main
    import harness.sweep.runner  # noqa: F401
