"""DistributedDataParallel on two gloo ranks, against what one process with all the data computes (contract 5.1)."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.apex import amp
from harness.apex.parallel import DistributedDataParallel
from tests.ranks import run_ranks

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _train(level: str, rank: int | None, delay: bool, accumulate: str, loss_scale=None) -> tuple[list, dict]:
    """Three steps of two micro-batches; ``rank`` None trains on both ranks' data, without a group."""
    amp.reset()
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=loss_scale)
    net = model if rank is None else DistributedDataParallel(model, delay_allreduce=delay)
    torch.manual_seed(5)
    for _ in range(3):
        for micro in range(2):
            batch = torch.randn(2, 6, 8)
            x = batch.flatten(0, 1) if rank is None else batch[rank]
            first = micro == 0
            with net.no_sync() if first and accumulate != "every" and rank is not None else contextlib.nullcontext():
                loss = net(x).float().pow(2).mean()
                with amp.scale_loss(loss, optimizer, delay_unscale=first and accumulate == "delayed") as scaled:
                    scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().float().tolist() for p in amp.master_params(optimizer)], amp.state_dict()


def _compare_with_one_process(delay: bool) -> None:
    for level in LEVELS:
        for scale in (None, "dynamic"):
            for accumulate in ("every", "local", "delayed"):
                expected, scalers = _train(level, None, delay, accumulate, scale)
                found, found_scalers = _train(level, dist.get_rank(), delay, accumulate, scale)
                assert found_scalers == scalers, (level, accumulate)
                tolerance = 1e-6 if level == "O0" else 2e-2 if level in ("O4", "O5") else 3e-3
                for a, b in zip(expected, found, strict=True):
                    torch.testing.assert_close(torch.tensor(b), torch.tensor(a), rtol=tolerance, atol=tolerance)
                gathered = [None, None]
                dist.all_gather_object(gathered, found)
                assert gathered[0] == gathered[1], (level, scale, accumulate)
    amp.reset()


@pytest.mark.parametrize("delay", [True, False])
def test_two_ranks_train_like_one_process_with_all_the_data(delay):
    run_ranks(2, _compare_with_one_process, delay)
