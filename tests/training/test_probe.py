"""Kills at planned places: each really happens there, and the run resumes from it bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from harness.runs.probe_plan import PROBE, Kill, ProbePlan
from tests.end_to_end.experiment import (
    assert_same_run,
    newest_checkpoint,
    run_folder,
    train,
    write_config,
    write_images,
)
from tests.end_to_end.processes import driver
from tests.ranks import free_port, launch_environment, wait_for

SETTINGS = {
    "train": {"epochs": 3, "log_every": 1},
    "model": {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}},
    "checkpoint": {"every": 3, "keep": 50},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "data")


def start(config: Path, world_size: int, kill: Kill | None = None) -> list[int]:
    """Exit codes of one start on ``world_size`` ranks, with ``kill`` planned."""
    plan = ProbePlan(str(config.parent / "mark.json"), kill).write(config.parent / "plan.json")
    (config.parent / "mark.json").unlink(missing_ok=True)
    port = free_port()
    ranks = [
        driver(
            ["-c", str(config)],
            {PROBE: str(plan), **(launch_environment(rank, world_size, port) if world_size > 1 else {})},
            config.parent / "terminal.txt",
        )
        for rank in range(world_size)
    ]
    return wait_for(ranks, 90)


def mark(config: Path) -> dict:
    return json.loads((config.parent / "mark.json").read_text())


@pytest.mark.slow
def test_kill_in_the_write_of_a_checkpoint(tmp_path, data):
    """The files that are left show how far the write had come."""
    unbroken = train(tmp_path / "unbroken", data, **SETTINGS)
    config = write_config(tmp_path / "broken", data, **SETTINGS)
    saved = run_folder(config) / "checkpoints"

    assert start(config, 1, Kill("checkpoint", 5, number=0, fraction=0.3)) == [-signal.SIGKILL]
    assert mark(config)["step"] == 6
    partial, whole = saved / "step-6.tmp" / "state.pt", unbroken / "checkpoints" / "step-6" / "state.pt"
    assert 0 < partial.stat().st_size < whole.stat().st_size / 2
    assert partial.read_bytes()[:4] == whole.read_bytes()[:4]  # the beginning of the data
    assert not (partial.parent / "manifest.json").exists()
    assert newest_checkpoint(saved.parent).name == "step-3"

    assert start(config, 1, Kill("checkpoint", 9, number=6)) == [-signal.SIGKILL]
    assert mark(config)["detail"] == "before step-9.tmp was renamed to step-9"
    assert {path.name for path in (saved / "step-9.tmp").iterdir()} == {"state.pt", "manifest.json"}
    assert not (saved / "step-9").exists()

    assert start(config, 1, Kill("checkpoint", 12, number=9)) == [-signal.SIGKILL]
    assert mark(config)["detail"] == "before latest.tmp was renamed to latest"
    assert (saved / "step-12" / "manifest.json").exists()
    assert newest_checkpoint(saved.parent).name == "step-9"

    assert start(config, 1) == [0]
    assert_same_run(unbroken, saved.parent)


@pytest.mark.slow
def test_kill_in_every_other_place(tmp_path, data):
    unbroken = train(tmp_path / "unbroken", data, 2, **SETTINGS)
    config = write_config(tmp_path / "broken", data, **SETTINGS)
    folder = run_folder(config)
    kills = [
        Kill("start", after_s=0.0),
        Kill("step", 4, rank=1, everyone=False),
        Kill("best weights", 8, number=0),
        Kill("best weights", 8, number=5),
        Kill("evaluation", 16, rank=1),
        Kill("predictions", 24, everyone=False),
    ]
    for kill in kills:
        codes = start(config, 2, kill)
        assert mark(config)["where"] == kill.where
        assert mark(config)["rank"] == kill.rank
        assert codes[kill.rank] == -signal.SIGKILL, kill
        others = [code for rank, code in enumerate(codes) if rank != kill.rank]
        assert all(code == -signal.SIGKILL if kill.everyone else code > 0 for code in others), (kill, codes)
        if kill.where == "best weights":
            assert not (folder / "weights.safetensors").exists() or kill.number
        if kill.where == "predictions":
            assert not (folder / "predictions.csv").exists()
            assert json.loads((folder / "summary.json").read_text())["finished"] is True
    assert start(config, 2) == [0, 0]
    assert_same_run(unbroken, folder)
