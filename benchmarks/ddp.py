"""Compares harness.apex's DistributedDataParallel, delayed and overlapped, with torch's on two gloo ranks.

    python -m benchmarks.ddp [--rounds 20] [--steps 20]

The three wrappers alternate on the same model and batch. The result is the median over rounds of the slower rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks import machine
from benchmarks.ranks import run_ranks

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 4 layers of 1024, batch 32": (lambda: _mlp(1024, 4), (32, 1024)),
    "MLP, 50 layers of 64, batch 32": (lambda: _mlp(64, 50), (32, 64)),
    "MLP, 3 layers of 2048, batch 8": (lambda: _mlp(2048, 3), (8, 2048)),
    "small CNN, batch 32": (lambda: _cnn(), (32, 1, 8, 8)),
}


def _mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _cnn() -> nn.Module:
    from harness.training.models.small_cnn import Model as SmallCNN

    return SmallCNN(10, batch_norm=True)


def measure(name: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """{wrapper: milliseconds per step, one value per round}."""
    from harness.apex.parallel import DistributedDataParallel

    make, shape = MODELS[name]
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch DDP": nn.parallel.DistributedDataParallel,
        "ours, overlapped": lambda model: DistributedDataParallel(model, delay_allreduce=False),
        "ours, delayed": lambda model: DistributedDataParallel(model, delay_allreduce=True),
    }
    models = {}
    for wrapper, wrap in wrappers.items():
        torch.manual_seed(0)
        model = wrap(make())
        models[wrapper] = (model, torch.optim.SGD(model.parameters(), lr=0.01))
    inputs, targets = torch.randn(shape), torch.randint(10, shape[:1])
    times: dict[str, list[float]] = {wrapper: [] for wrapper in wrappers}
    for index in range(rounds + 1):  # the first is a warm-up
        order = list(wrappers)
        for wrapper in order[index % 3 :] + order[: index % 3]:
            model, optimizer = models[wrapper]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if index:
                times[wrapper].append((time.perf_counter() - start) / steps * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    rows = []
    for name in MODELS:
        ranks = run_ranks(2, measure, name, arguments.rounds, arguments.steps)
        slower = {
            wrapper: [max(pair) for pair in zip(*(rank[wrapper] for rank in ranks), strict=True)]
            for wrapper in ranks[0]
        }
        for wrapper, times in slower.items():
            ratio = statistics.median(ours / theirs for ours, theirs in zip(times, slower["torch DDP"], strict=True))
            rows.append([name, wrapper, f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{ratio:.3f}"])
    text = machine.table(
        ["model", "wrapper", "ms per step, median", "fastest", "ratio to torch DDP (median of pairs)"], rows
    )
    text += (
        f"\n\nTwo gloo ranks, one thread each, SGD; {arguments.rounds} alternating rounds of {arguments.steps} steps. "
    )
    text += "Goal: not slower. Delayed reduction cannot overlap with the backward pass. "
    text += "This costs time if gradients are large."
    machine.write("ddp", "DistributedDataParallel compared with torch's", text)


if __name__ == "__main__":
    main()
