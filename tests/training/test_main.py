"""What a rank does beside training: its last words for torch's launcher, and when it leaves. Whole runs: end_to_end."""

from __future__ import annotations

import json
import threading
import time

import pytest

from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.runs import rank_exit
from harness.training import main

TWO_MACHINES = {"world_size": 2, "local_world_size": 1, "elastic": True}


def seconds_to_let_go(stop: Stop, **launch) -> float:
    begun = time.monotonic()
    main.let_go(Launch(**launch), stop)
    return time.monotonic() - begun


def test_a_rank_that_was_not_signalled_waits_for_its_own_launcher(monkeypatch):
    monkeypatch.setattr(main, "_LET_GO_S", 5.0)
    stop = Stop(Runtime())
    threading.Timer(0.3, stop.request, ["SIGTERM"]).start()
    assert 0.2 < seconds_to_let_go(stop, **TWO_MACHINES) < 3
    assert seconds_to_let_go(stop, **TWO_MACHINES) < 0.1


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(main, "_LET_GO_S", 0.3)
    assert 0.2 < seconds_to_let_go(Stop(Runtime()), **TWO_MACHINES) < 3


@pytest.mark.parametrize("difference", [{"elastic": False}, {"local_world_size": 2}])
def test_where_no_machine_can_join_nobody_waits(difference):
    assert seconds_to_let_go(Stop(Runtime()), **{**TWO_MACHINES, **difference}) < 0.1


def test_last_words_for_torch_s_launcher(tmp_path):
    file = tmp_path / "error.json"
    main.tell_launcher(Launch(rank=1, world_size=2, error_file=str(file)), 65, "bad row\n  -> mend it", 12.0)
    content = json.loads(file.read_text())
    assert content["message"]["message"] == "bad row"
    assert (content["rank"], content["world_size"], content["exit_code"]) == (1, 2, 65)
    main.tell_launcher(Launch(), 0, "nobody asked")
    main.tell_launcher(Launch(error_file=str(tmp_path / "gone" / "error.json")), 70, "nobody to tell")


def test_what_a_lost_peer_is_told_by():
    """By these words whoever concludes on a run knows a consequence from a cause."""
    told = main._explained(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4000"))
    assert str(told).startswith(f"{rank_exit.LOST_CONTACT}: [gloo/")


def test_a_consequence_is_later_than_its_cause_in_whole_seconds(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 100.25)
    assert int(main._since(ArithmeticError("a layer went wrong"))) == 100
    assert int(main._since(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))) == 101
