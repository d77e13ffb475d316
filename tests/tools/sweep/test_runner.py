"""Whole sweeps as processes: each trial runs once, within the machine's limits, whatever is stopped or killed."""

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

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'apex-harness[sweep]'")

from tests.end_to_end.processes import wait_until
from tests.ranks import wait_for
from tests.tools.sweep.sweeping import (
    output,
    start_sweep,
    starts,
    states,
    sweep,
    table,
    trial_folder,
    write_base,
    write_sweep,
)

SPACE = {"optimizer.lr": [0.1, 0.2, 0.3]}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_base(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """A sweep over SPACE that ran without interruption."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_base(folder)
    write_sweep(folder, space=SPACE)
    assert sweep(folder) == 0, output(folder)
    return folder


def behave(folder: Path, **how: str) -> None:
    """Script the trials: behave(folder, t0001="fail")."""
    (folder / "behaviour.json").write_text(json.dumps({name.strip("t"): behaviour for name, behaviour in how.items()}))


def has_evaluated(folder: Path, number: int, epochs: int = 1) -> bool:
    path = trial_folder(folder, number) / "metrics.jsonl"
    return path.exists() and path.read_text().count('"eval"') >= epochs


# Trials that end by themselves


@pytest.mark.slow
def test_finished_sweep_runs_nothing_again(unbroken):
    folder = unbroken
    assert states(folder) == ["finished"] * 3
    assert [trial["value"] for trial in table(folder)] == [0.975, 0.875, 0.775]
    assert [trial["params"] for trial in table(folder)] == [{"optimizer.lr": lr} for lr in SPACE["optimizer.lr"]]
    terminal = output(folder)
    assert "best: trial 0000, top1 0.975" in terminal
    assert "harness launch -c" in terminal
    assert "-c tried/trials/0000/config.yaml output=. name=tried-0000" in terminal
    assert sweep(folder) == 0
    assert [starts(folder, number) for number in range(3)] == [1, 1, 1]
    assert "resuming" in output(folder)


@pytest.mark.slow
def test_failed_trials_do_not_stop_others_and_can_be_retried(folder):
    write_sweep(folder, space={"optimizer.lr": [0.1, 0.2, 0.3, 0.4]})
    behave(folder, t0000="fail", t0001="refused", t0002="nan")
    assert sweep(folder) == 70
    assert states(folder) == ["failed", "failed", "failed", "finished"]
    errors = [trial["error"] for trial in table(folder)]
    assert errors == [
        "the loss became nan", "x.yaml: something is wrong -> fix it", "it ended without a finite top1", None,
    ]  # fmt: skip
    assert "3 of 4 trials failed; to retry them, add --retry-failed to the same command" in output(folder)
    assert sweep(folder) == 70, "failed trials are not run again"
    assert starts(folder, 0) == 1
    behave(folder)
    assert sweep(folder, "--retry-failed") == 0
    assert states(folder) == ["finished"] * 4
    assert [trial["number"] for trial in table(folder)] == [0, 1, 2, 3]
    assert "retrying failed trials: 3" in output(folder)


@pytest.mark.slow
def test_killed_trial_resumes_from_its_checkpoint(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0001="die")
    assert sweep(folder) == 0
    assert states(folder) == ["finished"] * 3
    assert starts(folder, 1) == 2
    assert "trial 0001 interrupted, will be restarted: killed by SIGKILL" in output(folder)
    assert "trial 0001 resumes" in output(folder)


@pytest.mark.slow
def test_trial_killed_three_times_waits_for_the_next_start_of_the_sweep(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0001="die3")
    assert sweep(folder) == 70
    assert states(folder) == ["finished", "failed", "finished"]
    assert table(folder)[1]["error"] == "killed by SIGKILL; run the same command to resume it"
    assert sweep(folder) == 0
    assert states(folder) == ["finished"] * 3
    assert starts(folder, 1) == 4


@pytest.mark.slow
def test_orphans_of_a_killed_trial_are_ended_before_it_resumes(folder):
    write_sweep(folder, space={"optimizer.lr": [0.1]})
    behave(folder, t0000="orphan")
    assert sweep(folder) == 0
    orphan = int((trial_folder(folder, 0) / "orphan.txt").read_text())
    assert not Path(f"/proc/{orphan}").exists()


# Sweeps that are killed or stopped


def test_killed_sweep_ends_like_an_unbroken_one(folder, unbroken):
    """After kill -9 of the sweep, the running trial resumes and finished trials are not run again."""
    write_sweep(folder, space=SPACE)
    behave(folder, t0001="slow")
    running = start_sweep(folder)
    wait_until(lambda: has_evaluated(folder, 1), 30, "the second trial trains")
    os.kill(running[0].pid, signal.SIGKILL)
    assert wait_for([running], 10) == [-signal.SIGKILL]
    assert states(folder) == ["finished", "running", "waiting"]
    behave(folder)
    assert sweep(folder) == 0
    assert [starts(folder, number) for number in range(3)] == [1, 2, 1]
    assert table(folder) == table(unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_sweep_stops_its_trials_and_explains_how_to_resume(folder, number):
    write_sweep(folder, space=SPACE, parallel=2)
    behave(folder, t0000="slow", t0001="slow")
    running = start_sweep(folder)
    wait_until(lambda: has_evaluated(folder, 0) and has_evaluated(folder, 1), 30, "two trials train")
    events = [line.split()[:2] for line in (folder / "tried" / "who_ran.txt").read_text().splitlines()]
    assert [event for event, _ in events] == ["start", "start"], "both start at once"
    os.kill(running[0].pid, number)
    assert wait_for([running], 10) == [75]
    assert states(folder) == ["waiting"] * 3
    terminal = output(folder)
    assert f"stopping ({number.name}): running trials will write a checkpoint" in terminal
    assert "trial 0000 interrupted: stopped with a checkpoint" in terminal
    assert "run the same command to resume" in terminal
    behave(folder)
    assert sweep(folder) == 0
    assert [starts(folder, number) for number in range(3)] == [2, 2, 1]


@pytest.mark.slow
def test_second_sweep_in_the_same_folder_is_refused(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0000="slow", t0001="slow", t0002="slow")
    first = start_sweep(folder)
    wait_until(lambda: has_evaluated(folder, 0), 30, "the first trial trains")
    assert sweep(folder) == 2
    assert "another harness sweep is running in this folder" in output(folder)
    os.kill(first[0].pid, signal.SIGTERM)
    assert wait_for([first], 10) == [75]


# Pruning


@pytest.mark.slow
@pytest.mark.parametrize("speed", ["slow", ""])
def test_pruned_trial_is_stopped_and_not_run_again(folder, speed):
    """A trial that ends before it can be stopped is pruned by the same evaluation."""
    write_sweep(
        folder, space={"optimizer.lr": [0.1, 0.12, 0.9, 0.11]}, pruner="median", pruner_args={"n_startup_trials": 2}
    )
    behave(folder, t0002=speed)
    assert sweep(folder) == 0
    assert states(folder) == ["finished", "finished", "pruned", "finished"]
    assert table(folder)[2]["value"] == pytest.approx(0.1)
    assert "trial 0002 pruned after epoch 1" in output(folder)
    assert sweep(folder) == 0
    assert starts(folder, 2) == 1


# Limits and errors of the machine


@pytest.mark.slow
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    worlds=st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True),
    cores=st.integers(3, 5),
    parallel=st.integers(1, 4),
    gpus=st.booleans(),
)
def test_trials_never_exceed_the_resources(tmp_path_factory, worlds, cores, parallel, gpus):
    folder = tmp_path_factory.mktemp("sweep")
    write_base(folder, data={"shard": "global"}, batch={"global": 12}, runtime={"device": "auto"})
    write_sweep(folder, space={"launch.nproc": worlds, "optimizer.lr": [0.1, 0.2]}, comparable=False)
    names = tuple("abcde"[:cores]) if gpus else ()
    assert sweep(folder, f"parallel={parallel}", cores=cores, gpus=names) == 0
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


@pytest.mark.slow
def test_broken_storage_ends_the_sweep_and_its_trials(folder):
    write_sweep(folder, space=SPACE)
    behave(folder, t0000="slow")
    running = start_sweep(folder)
    wait_until(lambda: has_evaluated(folder, 0), 30, "the first trial trains")
    with sqlite3.connect(folder / "tried" / "study.db") as database:
        database.execute("DROP TABLE trial_values")
        database.execute("DROP TABLE trial_intermediate_values")
    assert wait_for([running], 20) == [70]
    assert "the state of the sweep cannot be stored" in output(folder)
    assert "end 0000" in (folder / "tried" / "who_ran.txt").read_text()


def test_unwritable_folder_is_refused(folder):
    write_sweep(folder, space=SPACE)
    (folder / "tried").write_text("a file")
    assert sweep(folder) == 2
    assert "cannot write to the run folder" in output(folder)
