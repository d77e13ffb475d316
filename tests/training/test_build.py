"""Parts of the assembly of a run: the sizes of batches, and what is collective."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.apex import amp
from harness.data.loader import Loader
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import ConfigError
from harness.trackers.metrics_log import MetricsLog
from harness.training import build, description
from harness.training.checkpoints.checkpoint_writer import CheckpointWriter
from harness.training.reproducibility.logical_ranks import LogicalRanks
from harness.training.rows import division, opening
from harness.training.run_start import run_folder
from tests.fixtures import make_config, write_rows
from tests.ranks import run_ranks


def _warned(without_labels: tuple[int, ...], logical_ranks: int | None = None) -> list[str]:
    """The warnings about sorted labels, of which there are none on the processes ``without_labels``."""
    warnings: list[str] = []
    with open_runtime(detect(os.environ), "cpu", 10.0) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(division.log, "warning", lambda text, *args: warnings.append(text % args))

        def counts(start: int, stop: int) -> np.ndarray | None:
            labels = np.arange(start, stop) // 4
            return None if runtime.rank in without_labels else np.bincount(labels, minlength=2)

        task: Any = SimpleNamespace(train=range(8), label_counts=counts)
        config: Any = SimpleNamespace(data=SimpleNamespace(shard="contiguous"))
        division.warn_of_skew(config, task, LogicalRanks(runtime, logical_ranks))
        runtime.barrier()  # fails if the ranks are not at the same place
    return warnings


@pytest.mark.parametrize(("without_labels", "expected"), [((), 1), ((1,), 0), ((0, 1), 0)])
def test_skew_is_reported_if_every_rank_counts_labels(without_labels, expected):
    assert [len(found) for found in run_ranks(2, _warned, without_labels, group=False, timeout_s=40)] == [expected] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_skew_of_logical_ranks_is_reported(world):
    assert [len(found) for found in run_ranks(world, _warned, (), 4, group=False, timeout_s=40)] == [1] * world


def test_batch_is_stated_as_global_or_per_rank(tmp_path):
    """Both numbers are printed, and steps and learning rate follow from the global one."""
    write_rows(tmp_path, "train", 64)
    write_rows(tmp_path, "eval", 4)
    sizes = {
        key: [division.sizes_of(make_config(tmp_path, batch=batch), 64, world) for world in (1, 2, 4)]
        for key, batch in {"global": {"global": 16}, "per_rank": {"global": None, "per_rank": 16}}.items()
    }
    assert [(size.global_batch, size.per_rank) for size in sizes["global"]] == [(16, 16), (16, 8), (16, 4)]
    assert len({(size.steps_per_epoch, size.lr) for size in sizes["global"]}) == 1
    assert [size.global_batch for size in sizes["per_rank"]] == [16, 32, 64]
    with pytest.raises(ConfigError, match="exactly one of"):
        make_config(tmp_path, batch={"global": None})
    config = make_config(tmp_path, batch={"global": 16})
    facts = description.describe(
        config, opening.open_task(config, Runtime()), sizes["global"][1], 2, torch.device("cpu"), "harness"
    )
    assert facts["batch"] == "8 per rank, 16 in total"


def _slow_data(folder: Path) -> tuple[str, bool]:
    """Rank 1, on a machine with a cold cache, converts the tables for longer than a rank may be silent."""
    with open_runtime(detect(os.environ), "cpu", 1.0, 60.0) as runtime, pytest.MonkeyPatch.context() as patch:
        config, converted = make_config(folder / str(runtime.rank)), opening.open_on_rank
        late_s = 3.0 * runtime.rank
        patch.setattr(opening, "open_on_rank", lambda *given: time.sleep(late_s) or converted(*given))
        opened = opening.open_task(config, runtime)
        return opened.fingerprint, runtime.gather(len(opened.train)) == [6, 6]


def test_rank_that_converts_its_tables_for_long_is_waited_for(tmp_path):
    for rank in range(2):
        write_rows(tmp_path / str(rank), "train", 6)
        write_rows(tmp_path / str(rank), "eval", 4)
    (first, both), (second, _) = run_ranks(2, _slow_data, tmp_path, group=False, timeout_s=60)
    assert both
    assert first == second


@pytest.mark.parametrize("key", ["cost", "rows", "split", "unreadable"])
def test_metrics_that_would_overwrite_the_log_are_refused(tmp_path, key):
    config = make_config(tmp_path, task={"metrics": ["top1", {"name": "mine.metric", "better": "min", "key": key}]})
    with pytest.raises(ConfigError, match=f"metric {key} would overwrite"):
        opening.open_on_rank(config)


def test_a_build_that_fails_closes_what_it_opened(tmp_path, monkeypatch):
    """The trackers above all, which would show a run that goes on for ever."""
    for name in ("train", "eval"):
        write_rows(tmp_path, name, 4)
    closed: list[str] = []
    for kind in (MetricsLog, Loader, CheckpointWriter):
        monkeypatch.setattr(kind, "close", lambda self: closed.append(type(self).__name__))

    def fails(_):
        raise ConfigError("planned")

    monkeypatch.setattr(build.resuming, "resume", fails)
    config, runtime = make_config(tmp_path, train={"deterministic": False}), Runtime()
    folder = run_folder(config)
    folder.claim(config)
    with pytest.raises(ConfigError, match="planned"):
        build.build(config, runtime, folder, Stop(runtime))
    amp.reset()
    assert closed == ["CheckpointWriter", "Loader", "Loader", "MetricsLog"]
