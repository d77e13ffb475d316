"""Compares amp with torch.amp on large models: samples per second of ResNet-50 and a BERT-size encoder at O1 and O2.

    python -m benchmarks.apex_models --device cuda [--steps 50]     # writes benchmarks/results/apex_models.md
    python -m benchmarks.apex_models --device cpu --tiny      # only checks that it runs

A case is one training step on a batch that stays on the device: forward, backward, SGD with momentum (AdamW for the
encoder). The cases alternate for three rounds, and the best round counts. Memory is the peak of torch's allocator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.machine import describe, table, write
from harness.apex import amp

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with a batch and its usual optimizer."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


class Encoder(nn.Module):
    """BERT's encoder and a classifier over its first position; token ids (batch, length) -> (batch, classes)."""

    def __init__(self, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True, dropout=0.0)
        self.embedding = nn.Embedding(30522, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.classifier(self.encoder(self.embedding(tokens))[:, 0])
        return output


def workloads(device: str, tiny: bool) -> list[Workload]:
    images, size = (2, 64) if tiny else (128, 224)
    sentences, length = (2, 16) if tiny else (64, 128)
    width, layers, heads = (64, 2, 4) if tiny else (768, 12, 12)
    resnet = torchvision.models.resnet18 if tiny else torchvision.models.resnet50

    def pictures() -> tuple[Tensor, Tensor]:
        x = torch.randn(images, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return x, torch.randint(1000, (images,), device=device)

    def tokens() -> tuple[Tensor, Tensor]:
        shape = (sentences, length)
        return torch.randint(30522, shape, device=device), torch.randint(10, (sentences,), device=device)

    return [
        Workload(
            "ResNet-18" if tiny else "ResNet-50",
            lambda: resnet().to(device, memory_format=torch.channels_last),
            pictures,
            lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True),
        ),
        Workload(
            f"encoder {layers} x {width}",
            lambda: Encoder(width, layers, heads, 10).to(device),
            tokens,
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True),
        ),
    ]


def ours(work: Workload, level: str) -> Step:
    model = work.model()
    optimizer = work.optimizer(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = work.batch()

    def step() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def native(work: Workload, device: str) -> Step:
    model = work.model()
    optimizer = work.optimizer(model)
    scaler = torch.amp.GradScaler(device)
    x, y = work.batch()

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def plain(work: Workload) -> Step:
    model = work.model()
    optimizer = work.optimizer(model)
    x, y = work.batch()

    def step() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def measure(make: Callable[[], Step], device: str, steps: int) -> tuple[float, float]:
    """(seconds per step, peak GiB of the device's allocator, 0 on the CPU)."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = make()
    for _ in range(5):
        loss = step()
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    wait()
    seconds = (time.perf_counter() - start) / steps
    assert torch.isfinite(loss), "the run diverged, so its speed is meaningless"
    amp.reset()
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device. Type --device cpu --tiny to try the benchmark.")
    rows = []
    for work in workloads(args.device, args.tiny):
        samples = len(work.batch()[1])
        cases: dict[str, Callable[[], Step]] = {
            "float32": lambda work=work: plain(work),
            "torch.autocast + GradScaler": lambda work=work: native(work, args.device),
            **{level: lambda work=work, level=level: ours(work, level) for level in ("O1", "O2", "O5")},
        }
        best = dict.fromkeys(cases, (float("inf"), 0.0))
        for _ in range(args.rounds):
            for name, make in cases.items():
                best[name] = min(best[name], measure(make, args.device, args.steps))
        reference = best["torch.autocast + GradScaler"][0]
        for name, (seconds, peak) in best.items():
            rows.append([work.name, name, f"{samples / seconds:.1f}", f"{reference / seconds:.3f}", f"{peak:.2f}"])
    text = table(["model", "run", "samples/s", "ratio to torch.amp", "peak GiB"], rows)
    if args.device == "cuda" and not args.tiny:
        write("apex_models", "amp on large models", f"One device, best of {args.rounds} rounds.\n\n{text}")
    else:
        print(f"{describe()}\n\n{text}")


if __name__ == "__main__":
    main()
