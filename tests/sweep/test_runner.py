"""A sweep as a process: what is run, once each, never too much at once, and what is left when something is killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.processes import wait_until
from tests.ranks import wait_for
from tests.sweep.sweeping import begin, starts, states, sweep, table, told, write_base, write_sweep

SPACE = {"optimizer.lr": [0.1, 0.2, 0.3]}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_base(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """A sweep over SPACE that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_base(folder)
    write_sweep(folder, space=SPACE)
    assert sweep(folder) == 0, told(folder)
    return folder


def behave(folder: Path, **how: str) -> None:
    (folder / "behaviour.json").write_text(json.dumps({name.strip("t"): what for name, what in how.items()}))


def has_begun(folder: Path, number: int, epochs: int = 1) -> bool:
    path = folder / "tried" / "trials" / f"{number:04d}" / "metrics.jsonl"
    return path.exists() and path.read_text().count('"eval"') >= epochs


# To the end


def test_a_grid_to_its_end_and_not_again(unbroken):
    folder = unbroken
    assert states(folder) == ["finished"] * 3
    assert [trial["value"] for trial in table(folder)] == [0.975, 0.875, 0.775]
    assert [trial["params"] for trial in table(folder)] == [{"optimizer.lr": lr} for lr in SPACE["optimizer.lr"]]
    said = told(folder)
    assert "best: trial 0000, top1 0.975" in said
    assert "harness launch -c" in said
    assert "-c tried/trials/0000/config.yaml output=. name=tried-0000" in said
    assert sweep(folder) == 0
    assert [starts(folder, number) for number in range(3)] == [1, 1, 1]
    assert "going on with" in told(folder)


def test_a_failure_does_not_stop_the_rest(folder):
    write_sweep(folder, space={"optimizer.lr": [0.1, 0.2, 0.3, 0.4]})
    behave(folder, t0000="fail", t0001="refused", t0002="nan")
    assert sweep(folder) == 70
    assert states(folder) == ["failed", "failed", "failed", "finished"]
    errors = [trial["error"] for trial in table(folder)]
    assert errors == [
        "the loss became nan", "x.yaml: something is wrong -> mend it", "it ended without a finite top1", None,
    ]  # fmt: skip
    assert "3 of 4 trials failed; to try them again: the same command with --retry-failed" in told(folder)
    assert sweep(folder) == 70, "they are not run again by themselves"
    assert starts(folder, 0) == 1
    behave(folder)
    assert sweep(folder, "--retry-failed") == 0
    assert states(folder) == ["finished"] * 4
    assert [trial["number"] for trial in table(folder)] == [0, 1, 2, 3]
    assert "3 failed trials are tried again" in told(folder)


def test_a_trial_that_is_killed_goes_on_from_its_checkpoint(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0001="die")
    assert sweep(folder) == 0
    assert states(folder) == ["finished"] * 3
    assert starts(folder, 1) == 2
    assert "trial 0001 killed by SIGKILL; it will be started again" in told(folder)
    assert "trial 0001 resumes" in told(folder)


def test_a_trial_that_is_killed_each_time_waits_for_the_next_sweep(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0001="die3")
    assert sweep(folder) == 70
    assert states(folder) == ["finished", "failed", "finished"]
    assert table(folder)[1]["error"] == "killed by SIGKILL; the same command goes on with it"
    assert sweep(folder) == 0
    assert states(folder) == ["finished"] * 3
    assert starts(folder, 1) == 4


def test_what_a_killed_trial_leaves_behind_is_ended_before_it_goes_on(folder):
    write_sweep(folder, space={"optimizer.lr": [0.1]})
    behave(folder, t0000="orphan")
    assert sweep(folder) == 0
    orphan = int((folder / "tried" / "trials" / "0000" / "orphan.txt").read_text())
    assert not Path(f"/proc/{orphan}").exists()


# Killed and stopped


def test_killed_and_started_again_is_as_if_never_killed(folder, unbroken):
    """kill -9 of the sweep while a trial runs: that one goes on, those before it are not run again."""
    write_sweep(folder, space=SPACE)
    behave(folder, t0001="slow")
    running = begin(folder)
    wait_until(lambda: has_begun(folder, 1), 30, "the second trial trains")
    os.kill(running[0].pid, signal.SIGKILL)
    assert wait_for([running], 10) == [-signal.SIGKILL]
    assert states(folder) == ["finished", "running", "waiting"]
    behave(folder)
    assert sweep(folder) == 0
    assert [starts(folder, number) for number in range(3)] == [1, 2, 1]
    assert table(folder) == table(unbroken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_stops_its_trials_and_says_how_to_go_on(folder, number):
    write_sweep(folder, space=SPACE, parallel=2)
    behave(folder, t0000="slow", t0001="slow")
    running = begin(folder)
    wait_until(lambda: has_begun(folder, 0) and has_begun(folder, 1), 30, "two trials train")
    events = [line.split()[:2] for line in (folder / "tried" / "who_ran.txt").read_text().splitlines()]
    assert [event for event, _ in events] == ["start", "start"], "at once, where there is room"
    os.kill(running[0].pid, number)
    assert wait_for([running], 10) == [75]
    assert states(folder) == ["waiting"] * 3
    said = told(folder)
    assert "stopping: running trials write a checkpoint" in said
    assert "trial 0000 stopped with a checkpoint" in said
    assert "the same command goes on where it was" in said
    behave(folder)
    assert sweep(folder) == 0
    assert [starts(folder, number) for number in range(3)] == [2, 2, 1]


def test_a_second_sweep_is_refused_while_one_runs(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0000="slow", t0001="slow", t0002="slow")
    first = begin(folder)
    wait_until(lambda: has_begun(folder, 0), 30, "the first trial trains")
    assert sweep(folder) == 2
    assert "another harness sweep works in it" in told(folder)
    os.kill(first[0].pid, signal.SIGTERM)
    assert wait_for([first], 10) == [75]


# Pruning


def test_a_trial_that_lags_is_given_up(folder):
    write_sweep(
        folder, space={"optimizer.lr": [0.1, 0.12, 0.9, 0.11]}, pruner="median", pruner_args={"n_startup_trials": 2}
    )
    behave(folder, t0002="slow")
    assert sweep(folder) == 0
    assert states(folder) == ["finished", "finished", "pruned", "finished"]
    assert table(folder)[2]["value"] == pytest.approx(0.1)
    assert "trial 0002 pruned after epoch 1" in told(folder)
    assert sweep(folder) == 0
    assert starts(folder, 2) == 1


def test_what_is_pruned_does_not_depend_on_who_looked_when(folder):
    """A trial too quick to be stopped is given up by the same evaluation."""
    space = {"optimizer.lr": [0.1, 0.12, 0.9, 0.11]}
    write_sweep(folder, space=space, pruner="median", pruner_args={"n_startup_trials": 2})
    assert sweep(folder) == 0
    assert states(folder) == ["finished", "finished", "pruned", "finished"]
    assert table(folder)[2]["value"] == pytest.approx(0.1)


# Never too much at once


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=6),
    cores=st.integers(3, 5),
    parallel=st.integers(1, 4),
    gpus=st.booleans(),
)
def test_never_more_than_there_is(tmp_path_factory, worlds, cores, parallel, gpus):
    folder = tmp_path_factory.mktemp("sweep")
    write_base(folder, data={"shard": "global"}, batch={"global": 12}, runtime={"device": "auto"})
    space = [{"launch.nproc": world, "seed": seed} for seed, world in enumerate(worlds)]
    write_sweep(folder, space=space, comparable=False)
    names = tuple("abcde"[:cores]) if gpus else ()
    assert sweep(folder, "--parallel", str(parallel), cores=cores, gpus=names) == 0
    taken: Counter[str] = Counter()
    for line in (folder / "tried" / "who_ran.txt").read_text().splitlines():
        event, name, nproc, *rest = line.split(" ")
        if event == "start":
            taken[name] = int(nproc)
            given = set(rest[0].split(",")) if gpus else set()
            assert len(given) == (int(nproc) if gpus else 0)
        else:
            del taken[name]
        assert sum(taken.values()) <= cores
        assert len(taken) <= parallel


def test_a_storage_that_goes_away_ends_the_sweep_and_its_trials(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0000="slow")
    running = begin(folder)
    wait_until(lambda: has_begun(folder, 0), 30, "the first trial trains")
    with sqlite3.connect(folder / "tried" / "study.db") as database:
        database.execute("DROP TABLE trial_values")
        database.execute("DROP TABLE trial_intermediate_values")
    assert wait_for([running], 20) == [70]
    assert "the sweep's state cannot be kept" in told(folder)
    assert "end 0000" in (folder / "tried" / "who_ran.txt").read_text()


def test_a_folder_that_cannot_be_written(folder):
    write_sweep(folder, space=SPACE)
    (folder / "tried").write_text("a file")
    assert sweep(folder) == 2
    assert "cannot be written" in told(folder)
