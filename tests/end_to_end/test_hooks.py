"""Hooks on real processes: what they decide is agreed, and a run that is killed ends as an unbroken one."""

from __future__ import annotations

import json
import re

import pytest

from harness.runs import reader
from tests.end_to_end import hooks
from tests.end_to_end.experiment import (
    Kill,
    assert_same_run,
    last_checkpoint,
    of_split,
    record,
    run,
    run_folder,
    train,
    write_config,
)
from tests.end_to_end.planted import write_planted
from tests.end_to_end.processes import python

HERE = hooks.__name__


def test_layers_are_unfrozen_after_an_epoch(tmp_path, data):
    """And histograms of gradients are in the log, which every command reads."""
    settings = {
        "hooks": [f"{HERE}.Unfreeze", {"name": f"{HERE}.Gradients", "args": {"every": 4, "bins": 5}}],
        "optimizer": {"groups": [{"match": "c*", "lr_scale": 0.0}]}, "schedule": {"name": "constant"},
        "train": {"epochs": 2, "log_every": 1}, "checkpoint": {"every": 1, "keep": 50},
    }  # fmt: skip
    folder = train(tmp_path, data, **settings)
    rates = [line["lr_group_1"] for line in of_split(folder, "train") if "lr_group_1" in line]
    assert rates == [0.0] * 8, "in the second epoch, the group is trained as the others are"
    steps = {path.name: path for path in (folder / "checkpoints").glob("step-*")}
    assert {"step-1", "step-8", "step-9"} <= set(steps)
    found = [line for line in record(folder) if line["split"] == "gradients"]
    assert [line["step"] for line in found] == [4, 8, 12, 16]
    layer = next(value for value in found[0].values() if isinstance(value, dict))
    assert len(layer["counts"]) == 5
    assert layer["from"] < layer["to"]
    assert reader.read(folder).problems == []


def test_a_hook_ends_training_on_all_ranks(tmp_path, data):
    """By a reason on one rank only: the others end at the same step."""
    folder = train(tmp_path, data, 2, hooks=[f"{HERE}.OnOneRank"], train={"epochs": 3, "log_every": 3})
    text = (tmp_path / "terminal-0.txt").read_text()
    assert "training ends at step 5: only here" in text
    assert last_checkpoint(folder)["state"]["step"] == 5
    assert of_split(folder, "eval")[-1]["step"] == 5
    assert (folder / "predictions.csv").exists()
    assert run(tmp_path / "config.yaml", 2) == [0, 0]
    assert (
        "nothing left to do: step 5 was the last; it ended early: only here"
        in (tmp_path / "terminal-0.txt").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "opt_level"), [(1, "O2"), (2, "O1")])
def test_state_of_a_hook_is_resumed_exactly(tmp_path, data, world_size, opt_level):
    """And layers that it freezes until the step before the second kill."""
    thaw = {"name": f"{HERE}.Thaw", "args": {"prefix": "features.0", "step": 7}}
    settings = {
        "hooks": [{"name": f"{HERE}.SavedDrift", "args": {"end": 14}}, thaw], "precision": {"opt_level": opt_level},
        "train": {"epochs": 3, "log_every": 3}, "checkpoint": {"every": 3},
    }  # fmt: skip
    unbroken = train(tmp_path / "unbroken", data, world_size, **settings)
    assert last_checkpoint(unbroken)["state"]["ended"] == "enough"
    assert last_checkpoint(unbroken)["hooks"][0] == {"name": f"{HERE}.SavedDrift", "state": {"calls": 14}}
    broken = write_config(tmp_path / "broken", data, **settings)
    for kill in (Kill(0, 5), Kill(0, 8, "evaluation"), Kill(0, 12, "save"), Kill(0, 14, "evaluation")):
        run(broken, world_size, kill=kill)
    assert run(broken, world_size) == [0] * world_size
    assert_same_run(unbroken, run_folder(broken))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_hook_that_forgets_is_found(tmp_path):
    config = write_planted(tmp_path, "", hooks=[f"{HERE}.Drift"])
    terminal = tmp_path / "terminal.txt"
    words = ["--kills", "1", "--steps", "6"]
    assert python(["-m", "harness", "verify-resume", "-c", config, *words], terminal) == 1
    what = r"Drift\.calls \(tests\.end_to_end\.hooks\.Drift\) is (\d) instead of (\d): no checkpoint restores it"
    text = terminal.read_text()
    assert re.search(what, text), text
    assert "unsaved-state: state that training changes is in no checkpoint" in text


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"hooks": [f"{HERE}.StartsOver"]}, "hooks[0].state.waited"),
        ({"schedule": {"name": f"{HERE}.SchedulerStartsOver"}}, "schedule.scheduler.waited"),
    ],
)
def test_state_that_is_not_restored_is_found_before_it_decides_anything(tmp_path, settings, name):
    config, terminal = write_planted(tmp_path, "", batch={"global": 4}, **settings), tmp_path / "terminal.txt"
    words = ["-c", config, "--kills", "1", "--steps", "10", "checkpoint.every=4", "train.evaluate_every=4 steps"]
    assert python(["-m", "harness", "verify-resume", *words], terminal) == 1, terminal.read_text()
    text = terminal.read_text()
    assert re.search(rf"before step (5|9), .*: {re.escape(name)} is \d instead of \d$", text, re.M), text
    assert "not exact: state beside the model is not restored" in text


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_hook_that_remembers_is_exact(tmp_path):
    config = write_planted(tmp_path, "", hooks=[f"{HERE}.SavedDrift"])
    terminal = tmp_path / "terminal.txt"
    assert python(["-m", "harness", "verify-resume", "-c", config, "--kills", "2", "--steps", "6"], terminal) == 0
    assert "exact: killed 2 times" in terminal.read_text()


@pytest.mark.slow
def test_an_error_on_one_rank_names_the_line(tmp_path, data):
    config = write_config(tmp_path, data, hooks=[f"{HERE}.FailsOnOneRank"])
    assert run(config, 2) == [1, 1]
    failure = json.loads((run_folder(config) / "failure.json").read_text())
    assert failure["rank"] == 1
    assert re.match(r"tests/end_to_end/hooks.py:\d+: the hook .*FailsOnOneRank fails in after_step", failure["message"])
