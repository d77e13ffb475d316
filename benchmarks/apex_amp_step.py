"""Compares amp with torch.amp: one whole training step on the CPU, in one process.

    python benchmarks/apex_amp_step.py [--repeats 40]

O0 is compared with a plain step, O1 with torch.autocast and GradScaler in float16, O2 and O5 with a hand-written loop
that has float16 (bfloat16) weights and float32 masters. Model (convolutions, batch norm, a wide linear layer) and batch
are the same. Prints milliseconds per step, best of the repeats, and the cost of an empty ``scale_loss``.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 64, 256), nn.ReLU(), nn.Linear(256, 10))


X, Y = torch.randn(16, 3, 16, 16), torch.zeros(16, dtype=torch.long)
Step = Callable[[], None]


def plain() -> Step:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def native() -> Step:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(X), Y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_hand(dtype: torch.dtype) -> Step:
    model = network()
    weights = list(model.parameters())
    masters = [copy.deepcopy(p) for p in weights]
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for p in module.parameters(recurse=False):
                p.data = p.data.to(dtype)
    optimizer = torch.optim.SGD(masters, lr=1e-3, momentum=0.9)
    scale = 65536.0 if dtype is torch.float16 else 1.0

    def step() -> None:
        loss = F.cross_entropy(model(X.to(dtype)).float(), Y) * scale
        loss.backward()
        for master, p in zip(masters, weights, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        gradients = [m.grad for m in masters if m.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_(gradients, 1 / scale)
            if not all(bool(torch.isfinite(g).all()) for g in gradients):
                return
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()
        for p in weights:
            p.grad = None

    return step


def ours(level: str) -> Step:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        with amp.scale_loss(F.cross_entropy(model(X), Y), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(make: Callable[[], Step], steps: int = 3) -> float:
    step = make()
    for _ in range(4):  # the first steps after 2**16 may overflow and be skipped
        step()
    best = float("inf")
    for _ in range(steps):
        start = time.process_time()
        step()
        best = min(best, time.process_time() - start)
    amp.reset()
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    pairs: list[tuple[str, Callable[[], Step], Callable[[], Step]]] = [
        ("O0 / plain", lambda: ours("O0"), plain),
        ("O1 / autocast + GradScaler", lambda: ours("O1"), native),
        ("O2 / by hand", lambda: ours("O2"), lambda: by_hand(torch.float16)),
        ("O5 / by hand", lambda: ours("O5"), lambda: by_hand(torch.bfloat16)),
    ]
    for name, mine, other in pairs:
        best = [float("inf")] * 2
        for _ in range(repeats // 4):
            best = [min(best[0], measure(mine)), min(best[1], measure(other))]
        print(f"{name:28} {best[0] * 1e3:8.2f} ms  {best[1] * 1e3:8.2f} ms  x{best[0] / best[1]:.3f}")

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    loss = torch.ones(())
    times = []
    for _ in range(2000):
        start = time.process_time()
        with amp.scale_loss(loss, optimizer):
            pass
        times.append(time.process_time() - start)
    print(f"empty scale_loss at O0: {sorted(times)[len(times) // 2] * 1e6:.1f} us")


if __name__ == "__main__":
    main()
