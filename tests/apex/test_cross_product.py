"""Every level with every loss scale and batch-norm setting trains, on one and on two ranks (contract 6.3)."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp
from harness.apex.parallel import DistributedDataParallel
from tests.apex.shared import LEVELS, backward
from tests.ranks import run_ranks

SCALES = (None, 1.0, "128.0", "dynamic")
BATCH_NORM = (None, "True", "False")
CASES = [
    (level, scale, norm)
    for level, scale, norm in itertools.product(LEVELS, SCALES, BATCH_NORM)
    if norm is None or level not in ("O1", "O4")
]
ON_RANKS = [case for case in CASES if case[2] is None and case[1] in (None, "128.0")]  # all kinds of scales


def losses(level, scale, norm, wrap=None, steps=8):
    """Return the loss of each step on one batch, as main_amp.py would train with these options."""
    amp.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, keep_batchnorm_fp32=norm, loss_scale=scale, verbosity=0
    )
    if wrap is not None:
        model = wrap(model)
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
        found.append(loss.item())
    return found


@functools.cache
def alone(level, scale, norm):
    return losses(level, scale, norm)


@pytest.mark.contract("6.3", "8")
@pytest.mark.parametrize(("level", "scale", "norm"), CASES)
def test_every_combination_learns_and_is_deterministic(level, scale, norm):
    first = alone(level, scale, norm)
    assert all(map(math.isfinite, first))
    assert first[-1] < 0.75 * first[0]
    assert losses(level, scale, norm, steps=4) == first[:4]


def _on_a_rank():
    """Every other case with reductions at the end of the backward pass, the rest with overlapped ones."""
    found = []
    for i, case in enumerate(ON_RANKS):
        wrap = functools.partial(DistributedDataParallel, delay_allreduce=i % 2 == 0)
        found.append(losses(*case, wrap=wrap, steps=3))
    amp.reset()
    return found


@pytest.mark.host
@pytest.mark.contract("6.3")
def test_two_ranks_with_the_same_data_equal_one():
    expected = [losses(*case, steps=3) for case in ON_RANKS]
    assert run_ranks(2, _on_a_rank, timeout_s=120) == [expected] * 2
