"""The images that the tests of all engines train on."""

from __future__ import annotations

import pytest

from tests.end_to_end.experiment import write_images


@pytest.fixture(scope="session")
def stripes(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("stripes"))
