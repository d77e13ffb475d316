"""tests/ranks.py: results by rank, failures with tracebacks, and the time limit."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks


def _sum_of_ranks():
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fail_on_one():
    dist.barrier()  # a rank that leaves at once breaks the connection of one that is still connecting
    if dist.get_rank() == 1:
        raise ValueError("only here")
    return


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep():
    time.sleep(60)


def test_values_are_returned_by_rank():
    assert run_ranks(3, _sum_of_ranks) == [(0, 3.0), (1, 3.0), (2, 3.0)]


@pytest.mark.parametrize(
    ("function", "message", "timeout_s"),
    [(_fail_on_one, "only here", 60), (_die, "died, exit code -9", 60), (_sleep, "still running", 0.5)],
)
def test_failure_names_its_cause(function, message, timeout_s):
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, function, timeout_s=timeout_s)
