"""Our DistributedDataParallel against torch's, two gloo ranks on one machine.

    python benchmarks/apex_ddp.py [--steps 30]

Milliseconds of forward and backward of a convolutional network (1.1 M parameters, 26 tensors) and of a wide one
(12.6 M parameters, 6 tensors), median over the steps of rank 0; the ways take turns step by step. torch's runs with
its defaults (25 MB buckets, no unused parameters).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from harness.apex.parallel import DistributedDataParallel


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [
            nn.Conv2d(128 if i else 3, 128, 3, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.MaxPool2d(1 + i % 2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10)), torch.randn(4, 3, 16, 16)


def wide() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [nn.Linear(2048, 2048) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(8, 2048)


def run(rank: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29653", rank=rank, world_size=2)
    for make in (convolutional, wide):
        ways = {}
        for name in ("torch", "delayed", "overlapped", "alone"):
            torch.manual_seed(0)
            model, x = make()
            if name == "torch":
                model = nn.parallel.DistributedDataParallel(model)
            elif name != "alone":
                model = DistributedDataParallel(model, delay_allreduce=name == "delayed", message_size=1_000_000)
            ways[name] = model
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(steps):
            for name, model in ways.items():
                dist.barrier()
                start = time.perf_counter()
                model(x).sum().backward()
                times[name].append(time.perf_counter() - start)
                model.zero_grad()
        if rank == 0:
            base = statistics.median(times["torch"])
            for name, seconds in times.items():
                middle = statistics.median(seconds)
                print(f"{make.__name__:14} {name:11} {middle * 1e3:8.2f} ms  x{middle / base:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    mp.spawn(run, args=(parser.parse_args().steps,), nprocs=2)
