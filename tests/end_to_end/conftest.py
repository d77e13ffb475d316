"""Data that the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.experiment import write_images
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A small image dataset with its converted table. Read-only: tests that change data copy it or write their own."""
    run_ranks(1, int, group=False, timeout_s=240)  # starts the server of the ranks, whose imports no test should time
    return write_images(tmp_path_factory.mktemp("data") / "stripes")
