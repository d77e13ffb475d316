"""The facts of runs: trained ones, whose cause is planted by sleeping, and records written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli import main
from harness.tools.explain import facts
from tests.end_to_end.experiment import write_config, write_images
from tests.ranks import free_port, launch_environment, start, wait_for
from tests.tools.explain import plants as planted


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def _is_training_image(path: str) -> bool:
    return path.startswith("images/train")


def _train(config: str, plant: str, arguments: tuple[Any, ...]) -> None:
    getattr(planted, plant)(*arguments)
    raise SystemExit(main(["train", "-c", config]))


SLOW_DISK = ("slow_read", (0.1, _is_training_image))


@pytest.mark.parametrize(
    ("plants", "expected", "text"),
    [
        pytest.param([SLOW_DISK], "reading", "waits for data: reading files takes", marks=pytest.mark.slow),
        pytest.param(
            [("nothing", ()), SLOW_DISK],
            "slow rank",
            "waits for rank 1, which waits for its data, from the start",
            marks=pytest.mark.slow,
        ),
        ([("slow_link", (5e4,))] * 2, "slow link", "MB/s, expected"),
        pytest.param(
            [("slow_store", (0.5,))], "slow checkpoints", "Set checkpoint.async_save=true", marks=pytest.mark.slow
        ),
    ],
)
def test_a_planted_cause_is_found(tmp_path, data, capsys, plants, expected, text):
    world_size, port = len(plants), free_port()
    config = write_config(
        tmp_path, data, train={"max_steps": 7, "log_every": 1}, batch={"global": 8},
        checkpoint={"every": 1 if expected == "slow checkpoints" else 100},
    )  # fmt: skip
    ranks = [
        start(_train, (str(config), *plant), launch_environment(rank, world_size, port) if world_size > 1 else {})
        for rank, plant in enumerate(plants)
    ]
    assert wait_for(ranks, 60) == [0] * world_size
    folder = str(tmp_path / "runs" / "run")
    assert main(["explain", "--json", folder]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = next(each for each in (answer, *answer["then"]) if each["cause"] != "other load")  # from other tests
    assert found["cause"] == expected, answer
    assert text in found["text"]
    assert main(["explain", folder]) == 0
    assert capsys.readouterr().out.strip() == answer["text"]


def write_record(folder: Path, delays: list[tuple[int, float]]) -> Path:
    """A run of two ranks with a line of 10 s for each (slowest rank, seconds that the other waited)."""
    folder.mkdir()
    entries = [
        {"split": "train", "step": 10 * line, "epoch": 0, "samples": 640 * line, "samples_per_s": 64.0,
         "wall_s": 10.0 * line, "time_forward": 0.9 - wait / 20, "time_reduce": wait / 20, "time_host": 0.1,
         "cost": {"slowest": rank, "wait": wait, "slowest_data": 0.0, "log": 1.0}}
        for line, (rank, wait) in enumerate(delays, 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "run", "data": {"num_workers": 0}}))
    start = {"world_size": 2, "ranks": [{"host": host} for host in ("here: a", "here: b")], "threads": 1, "cores": 4}
    (folder / "provenance.json").write_text(json.dumps([start]))
    return folder


@pytest.mark.parametrize(
    ("delays", "rank", "share", "step"),
    [
        ([(1, 5.0)] * 10, 1, 0.5, None),
        ([(0, 0.1), (1, 0.2)] * 4 + [(1, 5.0)] * 6, 1, 0.5, 80),
        ([(1, 0.2), (0, 0.1)] * 4 + [(0, 8.0), (0, 7.0), (0, 9.0)] * 2, 0, 0.8, 80),
        ([(0, 1.0), (1, 1.0)] * 5 + [(0, 9.0)], 0, 0.1, None),  # noise, with a hiccup at the end
    ],
)
def test_since_when_a_rank_is_slow(tmp_path, delays, rank, share, step):
    found = facts.read(write_record(tmp_path / "run", delays))
    assert found.slow_rank.rank == rank
    if step is not None:
        assert found.slow_rank.step == step
    assert found.slow_rank.share <= share + 1e-9
    assert share < 0.2 or found.slow_rank.share == pytest.approx(share)


def test_the_time_of_a_run_is_divided_without_its_first_line(tmp_path):
    found = facts.read(write_record(tmp_path / "run", [(1, 4.0)] * 5))
    assert (found.total_s, found.train_s, found.steps, found.rows) == (40.0, 40.0, 40, 2560)
    assert found.local_ranks == 1
    assert found.share("forward", "reduce") == pytest.approx(0.9)
    assert (found.spent["log"], found.spent["host"]) == (2.0, 2.0)  # of both ranks, on average
    assert found.exchange_s == pytest.approx(0.0)  # all of it is waiting for rank 1


@pytest.mark.parametrize("kept", ["nothing", "a run without costs"])
def test_what_cannot_be_explained(tmp_path, kept, capsys):
    folder = tmp_path / "run"
    if kept == "nothing":
        folder.mkdir()
    else:
        text = (write_record(folder, [(0, 0.0)]) / "metrics.jsonl").read_text()
        entry = {key: value for key, value in json.loads(text).items() if key != "cost"}
        (folder / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    assert main(["explain", str(folder)]) == 2
    expected = "not a run folder" if kept == "nothing" else "no training line with the time of each phase"
    assert expected in capsys.readouterr().err
