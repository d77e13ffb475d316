"""Runs that are built in the process of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from harness.apex import amp
from harness.config.schema import Config
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.training import build
from harness.training.run import Run
from harness.training.run_start import run_folder


@pytest.fixture
def built() -> Iterator[Callable[..., Run]]:
    """Builds a run on one rank; all are closed at the end."""
    runs: list[Run] = []

    def built(config: Config, runtime: Runtime | None = None) -> Run:
        runtime, folder = runtime or Runtime(), run_folder(config)
        folder.claim(config)
        amp.reset()
        runs.append(build.build(config, runtime, folder, Stop(runtime)))
        return runs[-1]

    yield built
    for run in runs:
        run.close()
    amp.reset()  # O1 would cast in later tests of this process
