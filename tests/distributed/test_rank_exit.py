"""The exit record in transport: JSON, torch's error file, and exit codes."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest

from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import Cause, RankExit
from harness.runs import exit_files

EXIT = RankExit(1, Cause.ERROR, 65, "n1", 7, "DataError", "bad row", "fix it", "read (x.py:3)", ["Traceback\n"], 12.5)


def test_record_survives_json_and_unknown_keys():
    assert RankExit.from_dict(json.loads(EXIT.to_json()) | {"ranks": {}}) == EXIT


@pytest.mark.parametrize(
    "content",
    [{}, [], None, *(asdict(EXIT) | wrong for wrong in ({"cause": "tired"}, {"rank": "one"}, {"time": None},
     {"step": []}, {"traceback": None}, {"message": 3}))],
)  # fmt: skip
def test_other_content_is_refused(content):
    with pytest.raises(ValueError, match="validation error"):
        RankExit.from_dict(content)


@pytest.mark.parametrize(
    ("code", "cause"), [(0, Cause.DONE), (75, Cause.STOPPED), (2, Cause.ERROR), (70, Cause.ERROR), (-9, Cause.SIGNAL)]
)
def test_cause_of_an_exit_code(code, cause):
    assert RankExit.from_code(3, code) == RankExit(3, cause, code)
    assert not RankExit.from_code(3, code).made_by_rank


def test_error_file_for_torch(tmp_path):
    file = tmp_path / "error.json"
    exit_files.write_for_torch(Launch(rank=1, world_size=2, error_file=str(file)), EXIT)
    message = json.loads(file.read_text())["message"]
    assert message == {"message": "bad row", "extraInfo": {"py_callstack": "Traceback\n", "timestamp": "12"}}
    assert exit_files.from_torch_error_file(file.read_text()) == (EXIT, 2)
    exit_files.write_for_torch(Launch(), EXIT)  # not started by torch's launcher: nothing to write
    exit_files.write_for_torch(Launch(error_file=str(tmp_path / "gone" / "error.json")), EXIT)  # never raises


def test_first_failure_is_kept(tmp_path):
    other = replace(EXIT, rank=0)
    assert [exit_files.write_first(tmp_path, exit) for exit in (EXIT, other)] == [EXIT] * 2
    assert json.loads((tmp_path / "failure.json").read_text()) == asdict(EXIT)


def test_an_early_failure_replaces_that_of_an_earlier_start(tmp_path, monkeypatch):
    """A consequence hides no cause."""
    path = tmp_path / "early.json"
    monkeypatch.setenv(exit_files.EARLY, str(path))
    later, lost = replace(EXIT, exit_code=2, message="bad word"), replace(EXIT, cause=Cause.PEER_LOST)
    for record in (EXIT, later, lost):
        exit_files.write_early(record)
    assert exit_files.read_record(path) == later


def test_a_failure_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # as on a full disk
    try:
        assert exit_files.write_first(tmp_path, EXIT) == EXIT
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))  # a file system without hard links
    assert [exit_files.write_first(tmp_path, exit) for exit in (EXIT, replace(EXIT, rank=0))] == [EXIT] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_a_failure_that_cannot_be_read_is_left_alone(tmp_path):
    (tmp_path / "failure.json").write_text('{"rank": ')
    assert exit_files.write_first(tmp_path, EXIT) == EXIT
    assert (tmp_path / "failure.json").read_text() == '{"rank": '
    assert exit_files.write_first(tmp_path / "none", EXIT) == EXIT  # where nothing can be written


@pytest.mark.parametrize("cause", list(Cause))
def test_torch_never_takes_a_consequence_for_the_cause(cause):
    """torch's launcher picks the earliest timestamp, in whole seconds."""
    later = RankExit(**asdict(EXIT) | {"cause": cause})
    timestamp = json.loads(exit_files.to_torch_error_file(later, 2))["message"]["extraInfo"]["timestamp"]
    assert timestamp == ("13" if cause in (Cause.PEER_LOST, Cause.LAUNCHER_LOST) else "12")
