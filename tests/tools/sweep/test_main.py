"""``harness sweep`` before its first trial: a dry run, and errors of Optuna and its storage."""

from __future__ import annotations

import errno
import os
import sys

import pytest

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'apex-harness[sweep]'")

from harness import cli
from tests.tools.sweep.sweeping import write_base, write_sweep


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"sampler_args": {"n_startup": 3}}, "sampler_args: Optuna's TPESampler rejects its arguments"),
        (
            {"pruner": "median", "pruner_args": {"warmup": 3}},
            "pruner_args: Optuna's MedianPruner rejects its arguments",
        ),
    ],
)
def test_errors_of_optuna_are_reported(tmp_path, content, problem, capsys):
    write_base(tmp_path)
    space = {"optimizer.lr": {"low": 0.1, "high": 0.2}}
    write_sweep(tmp_path, space=space, sampler="tpe", trials=2, **content)
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    assert problem in capsys.readouterr().err


def test_damaged_study_is_reported_with_its_place(tmp_path, capsys):
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    (tmp_path / "tried").mkdir()
    (tmp_path / "tried" / "study.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 84)
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    message = capsys.readouterr().err
    assert "study.db: cannot open Optuna's storage" in message
    assert "if the file is damaged, move it elsewhere" in message


def test_missing_optuna_is_reported_with_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    assert "pip install 'apex-harness[sweep]'" in capsys.readouterr().err


def test_a_trial_that_cannot_be_started_is_no_fault_of_the_folder(tmp_path, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("harness.tools.sweep.runner.TrialProcess", refuse)
    monkeypatch.setattr("harness.distributed.processes.adopt_orphans", set)
    monkeypatch.setattr("harness.distributed.processes.end_orphans", lambda *_: None)  # of the tests
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 70
    message = capsys.readouterr().err
    assert f"{tmp_path}/tried: the sweep cannot go on: Resource temporarily unavailable\n  -> fix the cause" in message


def test_dry_run_prints_commands_and_starts_nothing(tmp_path, capsys):
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml"), "train.epochs=2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"harness launch -c {tmp_path}/base.yaml train.epochs=2 optimizer.lr=0.1 output=")
    assert len(lines) == 3
    assert not (tmp_path / "tried").exists()
