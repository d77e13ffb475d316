"""Parts of the assembly of a run that are collective."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.distributed.launch_env import detect
from harness.distributed.runtime import open_runtime
from harness.training import build
from tests.ranks import run_ranks


def _warned(without_labels: tuple[int, ...]) -> list[str]:
    """The warnings about shards with one label each, and none on the ranks ``without_labels``."""
    warnings: list[str] = []
    with open_runtime(detect(os.environ), "cpu", 10.0) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.log, "warning", lambda text, *args: warnings.append(text % args))
        counts = None if runtime.rank in without_labels else np.eye(2, dtype=int)[runtime.rank] * 4
        task: Any = SimpleNamespace(train=range(8), label_counts=lambda start, stop: counts)
        config: Any = SimpleNamespace(data=SimpleNamespace(shard="contiguous"))
        build.warn_of_skew(config, task, runtime)
        runtime.barrier()  # fails if the ranks are not at the same place
    return warnings


@pytest.mark.parametrize(("without_labels", "expected"), [((), 1), ((1,), 0), ((0, 1), 0)])
def test_skew_is_reported_if_every_rank_counts_labels(without_labels, expected):
    assert [len(found) for found in run_ranks(2, _warned, without_labels, group=False, timeout_s=40)] == [expected] * 2
