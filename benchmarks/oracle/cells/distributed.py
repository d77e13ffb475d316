"""``apex.parallel`` on two ranks over gloo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.oracle.cells.kit import LEVELS, Result, cells, convnet, fit, images, mlp, sgd, vectors


def _on_two_ranks(work: Callable[[int], Result]) -> Result:
    """Run ``work`` in two forked processes of a process group; return the results of both."""
    with tempfile.TemporaryDirectory() as folder:
        children = [os.fork() or _rank(rank, folder, work) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        files = [Path(folder, f"result{rank}") for rank in range(2)]
        if not all(file.exists() for file in files):
            raise RuntimeError(f"the ranks ended with {codes}")
        return {f"rank {rank}": torch.load(file, weights_only=False) for rank, file in enumerate(files)}


def _rank(rank: int, folder: str, work: Callable[[int], Result]) -> int:
    import signal
    import traceback

    code = 1
    try:
        signal.alarm(60)
        torch.manual_seed(rank)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        torch.save(work(rank), Path(folder, f"result{rank}"))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


DDP = {
    "delayed": {"delay_allreduce": True},
    "overlapped": {},
    "small buckets": {"message_size": 100},
    "without average": {"gradient_average": False, "delay_allreduce": True},
    "predivide 2": {"gradient_predivide_factor": 2.0},
    "always float32": {"allreduce_always_fp32": True, "delay_allreduce": True},
    "retained buffers": {"retain_allreduce_buffers": True, "delay_allreduce": True},
}


def _ddp(level: str, options: dict[str, Any], net: nn.Module, batches: Any, **fit_options: Any) -> Result:
    from apex import amp
    from apex.parallel import DistributedDataParallel

    net, optimizer = amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0)
    return fit(DistributedDataParallel(net, **options), optimizer, batches, **fit_options)


@cells("DistributedDataParallel", level=LEVELS, options=DDP)
def ddp(level: str, options: str) -> Result:
    return _on_two_ranks(lambda rank: _ddp(level, DDP[options], mlp(), vectors(5, seed=rank)))


@cells("DistributedDataParallel, overflow on one rank", level=("O1", "O2"), options=("delayed", "overlapped"))
def ddp_overflow(level: str, options: str) -> Result:
    return _on_two_ranks(
        lambda rank: _ddp(level, DDP[options], mlp(), vectors(5, seed=rank), overflow=(2,) if rank else ())
    )


@cells("DistributedDataParallel, accumulating", level=("O0", "O1", "O2"), options=("delayed", "overlapped"))
def ddp_accumulate(level: str, options: str) -> Result:
    """With a reduction in every micro-batch."""
    return _on_two_ranks(lambda rank: _ddp(level, DDP[options], mlp(), vectors(6, seed=rank), accumulate=2))


@cells("Reducer")
def reducer() -> Result:
    def work(rank: int) -> Result:
        from apex.parallel import Reducer

        net = mlp()
        averager = Reducer(net)
        optimizer = sgd(net.parameters())
        for x, y in vectors(4, seed=rank):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            averager.reduce()
            optimizer.step()
        return {"weights": [p.detach() for p in net.parameters()]}

    return _on_two_ranks(work)


@cells("SyncBatchNorm", level=LEVELS, ranks=(1, 2))
def sync_batchnorm(level: str, ranks: int) -> Result:
    """The Python path of the original, the only one without CUDA."""

    def work(rank: int) -> Result:
        from apex import amp
        from apex.parallel import DistributedDataParallel, convert_syncbn_model

        torch.manual_seed(0)
        net = convert_syncbn_model(convnet())
        net, optimizer = amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0)
        net = DistributedDataParallel(net, delay_allreduce=True) if ranks == 2 else net
        result = fit(net, optimizer, images(5, seed=rank))
        net.eval()
        return {**result, "evaluated": net(next(images(1, seed=7))[0]).detach()}

    return _on_two_ranks(work) if ranks == 2 else work(0)


@cells("create_syncbn_process_group")
def syncbn_group() -> Result:
    def work(rank: int) -> Result:
        from apex.parallel import SyncBatchNorm, create_syncbn_process_group

        layer = SyncBatchNorm(3, process_group=create_syncbn_process_group(1))
        return {"value": layer(next(images(1, seed=rank))[0]).detach(), "mean": layer.running_mean.clone()}

    return _on_two_ranks(work)
