"""One report and one exit code from what ranks leave and engines see, whichever of it is there."""

from __future__ import annotations

import json

import pytest

from harness.distributed.monitor import Outcome
from harness.runs import rank_exit
from harness.runs.outcome import Aftermath
from harness.runs.rank_exit import LOST_CONTACT

TOLD = {"rank": 1, "host": "n1", "step": 7, "error": "ValueError", "message": "bad", "exit_code": 70,
        "traceback": ["Traceback\n"]}  # fmt: skip
SAID_LOST = {**TOLD, "rank": 0, "error": "TrainingError", "message": f"{LOST_CONTACT}: Connection closed by peer"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def leave(folder, rank, code, how, **more):
    rank_exit.leave(folder / "logs", rank, more.pop("step", 7), code, how, **more)


def tell(folder, report):
    (folder / "failure.json").write_text(json.dumps(report))


def test_done(folder):
    aftermath = Aftermath(folder)
    (folder / "summary.json").write_text(json.dumps({"step": 9, "best": {"top1": 0.5, "step": 6}}))
    for rank in range(2):
        leave(folder, rank, 0, "done")
    ended = aftermath.conclude(Outcome({0: 0, 1: 0}))
    assert ended.exit_code == 0
    assert ended.text == f"done: {folder}, 9 steps; best top1 0.5000 at step 6"
    assert not (folder / "failure.json").exists()


@pytest.mark.parametrize("exits", [{0: 75, 1: 75}, {}])  # an engine may know nothing of single ranks
def test_stopped(folder, exits):
    aftermath = Aftermath(folder)
    for rank in range(2):
        leave(folder, rank, 75, "stopped", reason="SIGTERM")
    ended = aftermath.conclude(Outcome(exits, stopped=True))
    assert ended.exit_code == 75
    assert "the same command goes on" in ended.text


def test_the_failing_rank_and_what_the_others_did(folder):
    aftermath = Aftermath(folder)
    tell(folder, TOLD)
    leave(folder, 1, 70, "failed", doing="forward (model.py:3)", reason="bad")
    leave(
        folder,
        0,
        70,
        "blocked",
        step=6,
        doing="step (harness/training/loop.py:97), in all_reduce",
        reason="rank 1 failed",
    )
    ended = aftermath.conclude(Outcome({0: 70, 1: 70}))
    assert ended.exit_code == 70
    first, other, last = ended.text.splitlines()
    assert first == "failed: rank 1 on n1 at step 7: ValueError: bad"
    assert "rank 0: blocked" in other
    assert "at step 6 at step (harness/training/loop.py:97), in all_reduce; exit code 70 (rank 1 failed)" in other
    assert str(folder / "logs") in last
    written = json.loads((folder / "failure.json").read_text())
    assert written["traceback"] == TOLD["traceback"]
    assert set(written["ranks"]) == {"0", "1"}


def test_a_killed_rank_is_the_cause_not_the_peer_that_noticed(folder):
    aftermath = Aftermath(folder)
    tell(folder, SAID_LOST)
    leave(folder, 0, 70, "failed", step=12, reason=SAID_LOST["message"])
    ended = aftermath.conclude(Outcome({0: 70, 1: -9}))
    assert ended.exit_code == 70
    assert ended.text.startswith("failed: rank 1 at step 12: Killed: it died of SIGKILL")
    assert "rank 0: failed on" in ended.text
    assert json.loads((folder / "failure.json").read_text())["rank"] == 1


def test_a_lost_worker(folder):
    aftermath = Aftermath(folder, 2)
    tell(folder, SAID_LOST)
    leave(folder, 0, 70, "failed", step=12)
    ended = aftermath.conclude(Outcome(lost="worker tcp://10.0.0.2:4000 died"))
    assert ended.text.startswith("failed: rank 1 at step 12: Lost: worker tcp://10.0.0.2:4000 died")
    assert ended.exit_code == 70


def test_a_rank_that_ended_by_itself_once_its_worker_was_lost(folder):
    aftermath = Aftermath(folder, 2)
    tell(folder, SAID_LOST)
    leave(folder, 0, 70, "failed", step=12)
    leave(folder, 1, 75, "stopped", step=12)
    ended = aftermath.conclude(Outcome(lost="worker tcp://10.0.0.2:4000 died", lost_rank=1))
    assert ended.text.startswith("failed: rank 1 on ")
    assert "at step 12: Lost: worker tcp://10.0.0.2:4000 died" in ended.text
    assert ended.exit_code == 70


def test_everything_lost(folder):
    ended = Aftermath(folder).conclude(Outcome(lost="the scheduler is gone"))
    assert (ended.exit_code, ended.text.splitlines()[0]) == (
        70, "failed: rank 0 at step 0: Lost: the scheduler is gone",
    )  # fmt: skip


def test_all_killed_at_once(folder):
    ended = Aftermath(folder).conclude(Outcome({0: -9, 1: -9}))
    assert ended.exit_code == 70
    assert "rank 1: died of SIGKILL, without a word" in ended.text


def test_a_rank_that_was_ended_for_another_s_sake_is_not_the_cause(folder):
    ended = Aftermath(folder).conclude(Outcome({1: -9, 0: -15}))
    assert ended.text.startswith("failed: rank 1 at step 0: Killed: it died of SIGKILL")
    assert "rank 0: died of SIGTERM, without a word" in ended.text


def test_a_peer_gone_without_a_trace(folder):
    """Nobody saw the other die: what the survivor says is all there is."""
    aftermath = Aftermath(folder)
    tell(folder, SAID_LOST)
    leave(folder, 0, 70, "failed")
    assert LOST_CONTACT in aftermath.conclude(Outcome({0: 70})).text


@pytest.mark.parametrize(
    ("exits", "code"), [({0: 2, 1: 2}, 2), ({0: 2, 1: -15}, 2), ({0: 65, 1: 70}, 65), ({0: 1}, 70), ({}, 70)]
)
def test_wrong_before_it_began(folder, exits, code):
    ended = Aftermath(folder).conclude(Outcome(exits))
    assert ended.exit_code == code
    assert f"exit code {code} before the run began" in ended.text


def test_what_an_earlier_start_left_is_not_taken_for_this_one(folder):
    tell(folder, TOLD)
    leave(folder, 1, 70, "failed")
    aftermath = Aftermath(folder)
    for rank in range(2):
        leave(folder, rank, 75, "stopped")
    assert aftermath.conclude(Outcome({0: 75, 1: 75})).exit_code == 75
    assert json.loads((folder / "failure.json").read_text()) == TOLD


def test_ended_at_once_on_request(folder):
    ended = Aftermath(folder).conclude(Outcome({0: -9, 1: -9}, stopped=True))
    assert ended.exit_code == 70
    assert "ended as asked" in ended.text


@pytest.mark.parametrize(("code", "how", "text"), [(0, "done", "done: "), (75, "stopped", "stopped early with a ch")])
def test_what_a_rank_dies_of_after_its_end_does_not_count(folder, code, how, text):
    aftermath = Aftermath(folder)
    leave(folder, 0, code, how)
    ended = aftermath.conclude(Outcome({0: -15}, stopped=True))
    assert ended.exit_code == code
    assert ended.text.startswith(text)


def test_a_failure_that_is_told_of_on_another_machine_s_disk(folder):
    aftermath = Aftermath(folder)
    leave(folder, 1, 65, "failed", reason="a.csv:3: bad")
    leave(folder, 0, 70, "blocked", reason="rank 1 failed")
    ended = aftermath.conclude(Outcome({0: 70, 1: 65}))
    assert ended.exit_code == 65
    assert "Failed: a.csv:3: bad" in ended.text


def test_stopped_before_it_had_begun(folder):
    ended = Aftermath(folder).conclude(Outcome({0: -15, 1: -15}, stopped=True))
    assert ended.exit_code == 75
    assert "before it had begun" in ended.text


def test_a_folder_that_is_not_there(tmp_path):
    ended = Aftermath(tmp_path / "runs" / "x").conclude(Outcome({0: -9}))
    assert "died of SIGKILL" in ended.text
    assert not (tmp_path / "runs").exists()
