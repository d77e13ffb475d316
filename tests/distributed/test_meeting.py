"""Ranks that do not all arrive, or were started differently, end soon, all with the same message."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.distributed import meeting, process_group, store
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch
from harness.distributed.meeting import meet, telling_peers
from harness.distributed.store import PeersMissing
from harness.errors import EXIT_FAILURE, EXIT_USAGE, DataError, HarnessError, LaunchError
from tests.end_to_end.processes import wait_until
from tests.ranks import free_port, start

HOST = socket.gethostname()
LIMIT_S = 60.0  # a rank that ends within it has not waited for its limit: the error, or the news of it, has ended it


def launch(rank: int, world_size: int, port: int) -> Launch:
    return Launch(rank, rank, world_size, world_size, "127.0.0.1", port)


def _outcome(work) -> tuple[str, int, float]:
    """("met" or the error, its exit code, seconds it took)."""
    begin = time.monotonic()
    try:
        work()
    except HarnessError as error:
        return str(error), error.exit_code, time.monotonic() - begin
    return "met", 0, time.monotonic() - begin


def _meet(rank: int, world_size: int, port: int, timeout_s: float):
    store._ANSWER_S, meeting._ANSWER_S, meeting._GRACE_S = 2.0, 2.0, 1.5
    return _outcome(lambda: meet(launch(rank, world_size, port), "cpu", timeout_s))


def _open(rank: int, world_size: int, port: int, values: dict):
    def work():
        with process_group.open_runtime(
            launch(rank, world_size, port), "cpu", LIMIT_S, facts=lambda device: [Facts("copy it", values)]
        ):
            pass

    return _outcome(work)


def outcomes(function, calls: list[tuple], timeout_s: float = 2 * LIMIT_S) -> list[tuple[str, int, float]]:
    """The results of ``function(*call)``, each in a process of its own."""
    processes = [start(function, call) for call in calls]
    found = []
    try:
        for _, receiver in processes:
            assert receiver.poll(timeout_s), "a rank still waits"
            kind, value = receiver.recv()
            assert kind == "value", value
            found.append(value)
    finally:
        for process, receiver in processes:
            receiver.close()
            process.join(5)
            if process.is_alive():
                process.kill()
    return found


def assert_same_error(found: list[tuple[str, int, float]], exit_code: int) -> str:
    """The message that all ranks end with, long before the limit."""
    (message,) = {message for message, _, _ in found}
    assert {code for _, code, _ in found} == {exit_code}, message
    assert max(seconds for _, _, seconds in found) < LIMIT_S
    return message


def test_three_values_on_three_ranks():
    port = free_port()
    found = outcomes(_open, [(rank, 3, port, {"lr": rank, "seed": rank // 2, "same": 1}) for rank in range(3)])
    assert assert_same_error(found, EXIT_USAGE) == (
        "the ranks were started differently: 2 values differ\n"
        f"  lr: 0 on rank 0 ({HOST}); 1 on rank 1 ({HOST}); 2 on rank 2 ({HOST})\n"
        f"  seed: 0 on ranks 0-1 ({HOST}); 1 on rank 2 ({HOST})\n"
        "  -> copy it"
    )


def test_different_world_sizes():
    """Also where rank 0 waits for a rank that nobody starts, and where a rank expects fewer than there are."""
    for sizes in ([3, 2], [2, 3]):
        port = free_port()
        found = outcomes(_meet, [(rank, size, port, LIMIT_S) for rank, size in enumerate(sizes)])
        message = assert_same_error(found, EXIT_USAGE)
        assert f"WORLD_SIZE): {sizes[0]} on rank 0 ({HOST}); {sizes[1]} on rank 1 ({HOST})\n" in message


def _meet_and_stay(rank: int, world_size: int, port: int, done: Path):
    """Rank 2 comes when the others have agreed, and rank 0 keeps the store until then, as while it trains."""
    if rank == 2:
        wait_until(lambda: len(list(done.iterdir())) == 2, LIMIT_S, "the others agree")
    kept = []
    found = _outcome(lambda: kept.append(meet(launch(rank, world_size, port), "cpu", LIMIT_S)))
    (done / str(rank)).touch()
    if rank == 0:
        wait_until((done / "2").exists, LIMIT_S, "the late rank ends")
    return found


def test_rank_that_comes_after_the_others_have_agreed(tmp_path):
    port = free_port()
    *first, (message, code, seconds) = outcomes(
        _meet_and_stay, [(rank, size, port, tmp_path) for rank, size in enumerate((2, 2, 3))]
    )
    assert [found for found, *_ in first] == ["met", "met"]
    assert f"WORLD_SIZE): 2 on rank 0 ({HOST}); 3 on rank 2 ({HOST})\n" in message
    assert code == EXIT_USAGE
    assert seconds < LIMIT_S


def test_two_processes_with_one_rank():
    port = free_port()
    found = outcomes(_meet, [(rank, 3, port, LIMIT_S) for rank in (0, 1, 1)])
    message = assert_same_error(found, EXIT_USAGE)
    assert re.match(rf"two processes have RANK=1: process \d+ on {HOST} and process \d+ on {HOST}\n", message)


def test_ranks_that_do_not_arrive_are_named():
    """Each rank waits as long as its own configuration says, counted once."""
    port = free_port()
    found = outcomes(_meet, [(0, 5, port, 3.0), (2, 5, port, LIMIT_S)])
    message = assert_same_error(found, EXIT_FAILURE)
    assert message.startswith(
        f"ranks 1, 3-4 of 5 did not connect at 127.0.0.1:{port} within 3 s\n  -> check that the ranks"
    )
    ((message, code, _),) = outcomes(_meet, [(1, 2, free_port(), 1.0)])
    assert re.match(r"rank 1 of 2 could not reach rank 0 at 127.0.0.1:\d+ within 1 s: Connection refused\n", message)
    assert code == EXIT_FAILURE


def test_a_rank_gives_up_by_its_own_limit():
    """Also while rank 0 would wait longer: it does not take that for an agreement."""
    port = free_port()
    found = outcomes(_meet, [(0, 3, port, LIMIT_S), (1, 3, port, 3.0)])
    message = assert_same_error(found, EXIT_FAILURE)
    assert message.startswith(f"rank 2 of 3 did not connect at 127.0.0.1:{port} within 3 s\n")


def _fail(rank: int, port: int):
    def work():
        if rank == 1:
            with telling_peers(launch(rank, 2, port)):
                raise DataError("no such column", where="a.csv", hint="name it")
        meet(launch(rank, 2, port), "cpu", LIMIT_S)

    return _outcome(work)


def test_a_rank_that_cannot_start_tells_the_others():
    port = free_port()
    (theirs, code, seconds), (mine, own_code, _) = outcomes(_fail, [(0, port), (1, port)])
    assert mine == "a.csv: no such column\n  -> name it"
    assert theirs == f"rank 1 on {HOST} cannot start: {mine}"
    assert (code, own_code) == (65, 65)
    assert seconds < LIMIT_S


class _Unusual(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


def _end(rank: int, port: int, error: type[BaseException]):
    def work():
        if rank == 1:
            with suppress(error), telling_peers(launch(rank, 2, port)):
                raise error
            return
        meet(launch(rank, 2, port), "cpu", LIMIT_S)

    return _outcome(work)


@pytest.mark.parametrize("error", [SystemExit, _Unusual])
def test_a_rank_that_ends_with_no_exception_tells_the_others(error):
    port = free_port()
    (theirs, code, seconds), _ = outcomes(_end, [(0, port, error), (1, port, error)])
    assert theirs.startswith(f"rank 1 on {HOST} cannot start: {error.__name__}")
    assert code == EXIT_FAILURE
    assert seconds < LIMIT_S


def _differ(rank: int, port: int):
    meeting.torch.__version__ = f"2.{rank}.0"
    return _outcome(lambda: meet(launch(rank, 2, port), ("cuda", "cpu")[rank], LIMIT_S))


def test_ranks_whose_groups_of_torch_could_not_connect():
    port = free_port()
    message = assert_same_error(outcomes(_differ, [(rank, port) for rank in range(2)]), EXIT_USAGE)
    assert f'  device: "cuda" on rank 0 ({HOST}); "cpu" on rank 1 ({HOST})\n' in message
    assert f'  version of torch: "2.0.0" on rank 0 ({HOST}); "2.1.0" on rank 1 ({HOST})\n' in message


def test_ranks_end_with_their_launcher():
    """Also before it has opened the store."""
    port = free_port()
    for rank in range(2):
        alone = replace(launch(rank, 2, port), supervised=True, parent=os.getppid() + 1)
        with pytest.raises(PeersMissing, match="the launcher exited before all ranks had connected"):
            meet(alone, "cpu", LIMIT_S)


def test_rank_0_names_a_master_address_that_does_not_exist():
    for rank in range(2):
        there = Launch(rank, rank, 2, 2, "no.such.host.invalid", free_port())
        with pytest.raises(LaunchError, match="no.such.host.invalid"):
            meet(there, "cpu", 1.0)


def test_port_of_another_program():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()  # and never answers
        port = other.getsockname()[1]
        (first, code, first_s), (second, second_code, second_s) = outcomes(
            _meet, [(rank, 2, port, LIMIT_S) for rank in range(2)]
        )
    assert first.startswith(f"rank 0 cannot open port {port}, where the ranks meet: it is in use")
    assert second.startswith(
        f"127.0.0.1:{port} accepts connections, but rank 0 does not answer there\n  -> if rank 0 has"
    )
    assert (code, second_code) == (EXIT_USAGE, EXIT_FAILURE)
    assert max(first_s, second_s) < LIMIT_S


def _die_after_the_meeting(rank: int, port: int):
    def work():
        if rank == 1:
            process_group._connect = lambda *_: os._exit(0)
        with process_group.open_runtime(launch(rank, 3, port), "cpu", 5.0):
            pass

    return _outcome(work)


def test_rank_that_dies_between_the_meeting_and_the_first_collective():
    port = free_port()
    dying, _ = start(_die_after_the_meeting, (1, port))
    found = outcomes(_die_after_the_meeting, [(0, port), (2, port)])
    dying.join(LIMIT_S)
    for message, code, seconds in found:
        assert message.startswith(f"the ranks met at 127.0.0.1:{port}, but could not all connect to each other: ")
        assert (code, seconds < LIMIT_S) == (EXIT_FAILURE, True)
