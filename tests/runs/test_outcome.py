"""The outcome of a run: the rules that find the cause among the ranks' exits, and the files around them."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict

import pytest

from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import Cause, RankExit
from harness.runs import exit_files, layout
from harness.runs.outcome import ExitCollector, judge
from harness.runs.url_store import UrlStore


def own(rank, cause, code=70, step=7, **more):
    """The record that a rank wrote itself."""
    values = {"error": "ValueError", "message": f"m{rank}"} if cause is Cause.ERROR else {"message": f"m{rank}"}
    return RankExit(rank, cause, code, host=f"n{rank}", step=step, **{**values, **more})


def error(rank, **more):
    return own(rank, Cause.ERROR, **more)


def peer_lost(rank, **more):
    return own(rank, Cause.PEER_LOST, **{"error": "TrainingError", **more})


def seen(*codes):
    """The exits that an engine saw: pairs of rank and exit code, in the order in which they ended."""
    return [RankExit.from_code(rank, code) for rank, code in codes]


def early(rank, code):
    """An error before the run folder was claimed."""
    return own(rank, Cause.ERROR, code, step=None)


def hung(rank):
    """What a waiting rank has published about another one."""
    return own(rank, Cause.HUNG, error="Hung")


# Of a rank whose process has ended, as another rank has published it.
GONE_1 = RankExit(1, Cause.NODE_LOST, 70, step=6, error="Lost", message="its process 9 ended")
LATE_1 = RankExit(1, Cause.PEER_LOST, -signal.SIGKILL, message="killed by its launcher: ...")
LOST, LOST_1 = RankExit.lost("the node is gone"), RankExit.lost("the node is gone", 1)
LAUNCHER_LOST = own(0, Cause.LAUNCHER_LOST)
KILL = -signal.SIGKILL
TERM = -signal.SIGTERM

# Exits, the first to end first; whether a user stopped the run; the failing rank; its cause; a part of the message.
FAILURES = {
    "own error": ([error(1), peer_lost(0)], False, 1, "error", "m1"),
    "own error noticed later than the loss of the peer": ([peer_lost(0), error(1)], False, 1, "error", "m1"),
    "first of two own errors": ([error(1), error(0)], False, 1, "error", "m1"),
    "own error before a killed rank": ([error(0), *seen((1, KILL))], False, 0, "error", "m0"),
    "own error before a lost node": ([LOST_1, error(0)], False, 0, "error", "m0"),
    "own error while the user stops": ([error(0), own(1, Cause.STOPPED, 75)], True, 0, "error", "m0"),
    "killed rank": (
        [peer_lost(0), *seen((0, 70), (1, KILL))],
        False,
        1,
        "signal",
        "received SIGKILL (sent by the OOM killer",
    ),
    "killed by another signal": (seen((1, -signal.SIGSEGV)), False, 1, "signal", "received SIGSEGV (see its log)"),
    "first of two killed ranks": (seen((1, KILL), (0, TERM)), False, 1, "signal", "SIGKILL"),
    "all ranks killed": (seen((0, KILL), (1, KILL)), False, 0, "signal", "SIGKILL"),
    "killed rank while the user stops": ([peer_lost(0), *seen((1, KILL))], True, 1, "signal", "SIGKILL"),
    "killed rank before a lost node": ([*seen((0, KILL)), LOST_1], False, 0, "signal", "SIGKILL"),
    "hung rank": ([hung(1), peer_lost(0), *seen((0, 70), (1, KILL))], False, 1, "hung", "m1"),
    "hung rank that then fails": ([hung(1), peer_lost(0), error(1)], False, 1, "hung", "m1"),
    "rank killed by the launcher after a failure": ([peer_lost(0), LATE_1], False, 0, "peer_lost", "m0"),
    "process that is gone": ([GONE_1, peer_lost(0), *seen((0, 70), (1, 0))], False, 1, "node_lost", "process 9 ended"),
    "process that was killed": ([GONE_1, peer_lost(0), *seen((0, 70), (1, KILL))], False, 1, "signal", "SIGKILL"),
    "lost node of a known rank": ([peer_lost(0), LOST_1], False, 1, "node_lost", "the node is gone"),
    "lost node, rank without a record": ([peer_lost(0), LOST], False, 1, "node_lost", "the node is gone"),
    "lost node of a rank that stopped by itself": ([LOST_1, own(1, Cause.STOPPED, 75)], False, 1, "node_lost", "gone"),
    "lost node after an unexplained exit": ([*seen((0, 70)), LOST], False, 0, "node_lost", "the node is gone"),
    "everything lost": ([LOST], False, 0, "node_lost", "the node is gone"),
    "lost peer without a trace": ([peer_lost(0)], False, 0, "peer_lost", "m0"),
    "lost launcher": ([LAUNCHER_LOST], False, 0, "launcher_lost", "m0"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_cause_of_a_failure(case):
    exits, stopped, rank, cause, message = FAILURES[case]
    outcome = judge(exits, stopped, world_size=2)
    assert (outcome.failure["rank"], outcome.failure["cause"]) == (rank, cause)
    assert message in outcome.failure["message"]
    assert outcome.exit_code == outcome.failure["exit_code"] == 70


DONE, STOPPED = own(0, Cause.DONE, 0), own(0, Cause.STOPPED, 75)

# Exits; whether a user stopped the run; the exit code; the first words of the report.
WITHOUT_FAILURE = {
    "done": ([DONE, *seen((0, 0), (1, 0))], False, 0, "done: runs/x"),
    "done, by the engine alone": (seen((0, 0), (1, 0)), False, 0, "done: "),
    "aborted after the end of training": ([DONE, *seen((0, -signal.SIGABRT))], False, 0, "done: "),
    "killed after its checkpoint": ([STOPPED, *seen((0, TERM))], True, 75, "stopped early with a checkpoint: runs/x"),
    "stopped": ([STOPPED, *seen((0, 75), (1, 75))], True, 75, "stopped early with a checkpoint"),
    "stopped by a scheduler": (seen((0, 75), (1, 75)), False, 75, "stopped early with a checkpoint"),
    "one done, one stopped": (seen((0, 0), (1, 75)), False, 75, "stopped early with a checkpoint"),
    "stopped before the handlers": (seen((0, TERM), (1, TERM)), True, 143, "stopped before the run began"),
    "stopped before the run began": (seen((0, 143), (1, TERM)), True, 143, "stopped before the run began"),
    "the same, by a scheduler": (seen((0, 130), (1, 130)), False, 130, "stopped before the run began"),
    "stopped before there was a rank": ([], True, 143, "stopped before the run began"),
    "killed on request": (seen((0, KILL), (1, KILL)), True, 143, "ended on request, without a new checkpoint"),
    "wrong configuration": (seen((0, 2), (1, 2)), False, 2, "ended with exit code 2 before the run began"),
    "wrong configuration, peer ended": (seen((0, 2), (1, TERM)), False, 2, "ended with exit code 2 before"),
    "wrong configuration, own record": ([early(0, 2), *seen((0, 2))], False, 2, "ended with exit code 2 before"),
    "bad data": (seen((0, 65), (1, 70)), False, 65, "ended with exit code 65 before the run began"),
    "own code": (seen((0, 1), (1, TERM)), False, 1, "ended with exit code 1 before the run began"),
    "unknown exit code": (seen((0, 3)), False, 70, "ended with exit code 70 before the run began"),
    "nothing known": ([], False, 70, "ended with exit code 70 before the run began"),
}


@pytest.mark.parametrize("case", WITHOUT_FAILURE)
def test_outcome_without_a_failure(case):
    exits, stopped, code, text = WITHOUT_FAILURE[case]
    outcome = judge(exits, stopped, world_size=2, folder="runs/x")
    assert (outcome.exit_code, outcome.failure) == (code, None)
    assert outcome.text.startswith(text)


def test_report_names_the_failing_rank_and_what_the_others_did():
    others = [
        peer_lost(0, step=6, doing="step (harness/x.py:9) calling all_reduce", time=2.0),
        *seen((2, KILL), (3, 1), (4, 1), (5, 1)),
    ]
    outcome = judge([error(1, message="bad", hint="fix", traceback=["Traceback\n"], code=65), *others], folder="runs/x")
    assert outcome.text.splitlines() == [
        "failed: rank 1 on n1 at step 7: ValueError: bad",
        "  rank 0: lost contact on n0 at step 6; exit code 70 (m0)",
        "  rank 2: killed by SIGKILL, left no record",
        "  ranks 3-5: exit code 1, left no record",
        "logs: runs/x/logs; report: runs/x/failure.json",
    ]
    assert outcome.exit_code == 65
    ranks = outcome.failure.pop("ranks")
    assert list(ranks) == ["0", "1", "2", "3", "4", "5"]
    assert ranks["1"] == "failed on n1 at step 7; exit code 65 (bad)"
    assert outcome.failure == {
        "rank": 1, "host": "n1", "step": 7, "error": "ValueError", "message": "bad", "hint": "fix", "exit_code": 65,
        "cause": "error", "traceback": ["Traceback\n"], "doing": "",
    }  # fmt: skip


def test_killed_rank_is_reported_at_its_peers_step():
    outcome = judge([peer_lost(0, step=12), *seen((1, KILL))])
    assert outcome.text.startswith("failed: rank 1 at step 12: Killed: the process received SIGKILL")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / layout.LOGS).mkdir()
    return tmp_path


def write_failure(folder, exit):
    (folder / layout.FAILURE).write_text(exit.to_json())


def failure_of(folder):
    return json.loads((folder / layout.FAILURE).read_text())


def test_a_killed_rank_is_told_how_to_resume(folder):
    """In the text and the report, which leaves out what is unknown."""
    (folder / layout.CHECKPOINTS).mkdir()
    (folder / layout.CHECKPOINTS / layout.LATEST).write_text("step-12\n")
    outcome = ExitCollector(folder, 2).conclude(EngineReport(seen((1, KILL))))
    assert outcome.text.endswith("\n-> the same command resumes from step-12")
    found = failure_of(folder)
    assert found["hint"] == "the same command resumes from step-12"
    assert not {"host", "time"} & found.keys()


def test_records_of_the_ranks_are_collected(folder):
    collector = ExitCollector(folder, 2)
    for exit in (peer_lost(0, time=2.0), error(1, time=1.0)):
        exit_files.write(folder / layout.LOGS, exit)
    outcome = collector.conclude(EngineReport(seen((0, 70), (1, 70))))
    assert outcome.text.startswith("failed: rank 1 on n1 at step 7: ValueError: m1")
    assert failure_of(folder) == outcome.failure


def test_first_failure_by_the_ranks_own_agreement_counts(folder):
    """Clocks of two hosts may differ; the ranks agreed in failure.json on which of two errors was first."""
    collector = ExitCollector(folder, 2)
    for exit in (error(0, time=1.0), error(1, time=2.0)):
        exit_files.write(folder / layout.LOGS, exit)
    write_failure(folder, error(1))
    assert collector.conclude(EngineReport()).failure["rank"] == 1


def test_records_of_an_earlier_start_are_ignored(folder):
    exit_files.write(folder / layout.LOGS, error(1))
    write_failure(folder, error(1))
    collector = ExitCollector(folder)
    for rank in range(2):
        exit_files.write(folder / layout.LOGS, own(rank, Cause.STOPPED, 75))
    assert collector.conclude(EngineReport()).exit_code == 75
    assert failure_of(folder) == asdict(error(1))


@pytest.mark.parametrize(
    "text", ["", '{"rank": 0, "cau', "[]", '{"rank": 0, "cause": "error", "exit_code": 70, "time": null}']
)
def test_damaged_records_and_those_of_another_version_are_ignored(folder, text):
    collector = ExitCollector(folder, 2)
    (folder / layout.LOGS / layout.rank_exit(0)).write_text(text)
    (folder / layout.FAILURE).write_text(text)
    exit_files.write(folder / layout.LOGS, error(1))
    assert collector.conclude(EngineReport(seen((0, 70), (1, 70)))).failure["rank"] == 1


def test_record_that_vanishes_from_the_url_is_ignored(tmp_path, monkeypatch):
    """A rank may replace or remove a file between the listing and its download."""
    kept = UrlStore(f"file://{tmp_path}/kept")
    collector = ExitCollector(tmp_path / "scratch", 2, kept.where)
    kept.write(layout.START, "new")
    kept.write(f"{layout.LOGS}/{layout.rank_exit(1)}", error(1).to_json())
    names = {f"{layout.LOGS}/{layout.rank_exit(0)}": "", **kept.files()}
    monkeypatch.setattr(UrlStore, "files", lambda self: names)
    assert collector.conclude(EngineReport(seen((0, 70), (1, 70)))).failure["rank"] == 1
    assert json.loads(kept.read(layout.FAILURE))["message"] == "m1"


def test_missing_folder_is_not_created(tmp_path):
    outcome = ExitCollector(tmp_path / "runs" / "x").conclude(EngineReport(seen((0, KILL))))
    assert "received SIGKILL" in outcome.text
    assert not (tmp_path / "runs").exists()


def test_failure_is_not_written_into_the_run_of_a_later_start(tmp_path):
    url, scratch = f"file://{tmp_path}/at-url", tmp_path / "scratch"
    collector = ExitCollector(scratch, 1, url)
    scratch.mkdir()
    (scratch / layout.START).write_text("this start")
    UrlStore(url).write(layout.START, "a later start")
    assert collector.conclude(EngineReport(seen((0, KILL)))).failure
    assert UrlStore(url).read(layout.FAILURE) == ""
