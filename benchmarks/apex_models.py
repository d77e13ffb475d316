"""Compares amp with torch.amp on large models: samples per second of ResNet-50 and a vision transformer at O1, O2, O5.

    python -m benchmarks.apex_models --device cuda [--steps 50]     # writes benchmarks/results/apex_models.md
    python -m benchmarks.apex_models --device cpu --tiny      # only checks that it runs

A case is one training step on a batch that stays on the device: forward, backward, and update (SGD with momentum; AdamW
for the transformer). The cases alternate for three rounds, and the best round counts. Memory is the peak of torch's
allocator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from benchmarks.machine import describe, table, write
from harness.apex import amp

Step = Callable[[], Tensor]
NATIVE = "torch.autocast + GradScaler"
CASES = ("float32", NATIVE, "O1", "O2", "O5")


def workloads(tiny: bool) -> dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]]:
    """{name: (makes the model, makes its usual optimizer)}."""
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True)
    adamw = partial(torch.optim.AdamW, lr=1e-5, foreach=True)
    if tiny:
        vit = partial(models.VisionTransformer, 64, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)
        return {"ResNet-18": (models.resnet18, sgd), "ViT": (vit, adamw)}
    return {"ResNet-50": (models.resnet50, sgd), "ViT-B/16": (models.vit_b_16, adamw)}


def made(name: str, case: str, device: str, tiny: bool) -> tuple[Step, int]:
    """A training step of a workload, and its number of samples."""
    model_of, optimizer_of = workloads(tiny)[name]
    samples, size = (2, 64) if tiny else (128, 224)
    model = model_of().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(model.parameters())
    x = torch.randn(samples, 3, size, size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (samples,), device=device)
    by_amp = case.startswith("O")
    if by_amp:
        amp.initialize(model, optimizer, opt_level=case, verbosity=0)
    scaler = torch.amp.GradScaler(device, enabled=case == NATIVE)

    def step() -> Tensor:
        with torch.autocast(device, torch.float16) if case == NATIVE else nullcontext():
            loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) if by_amp else nullcontext(scaler.scale(loss)) as scaled_loss:
            scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step, samples


def measure(step: Step, device: str, steps: int) -> tuple[float, float]:
    """(seconds per step, peak GiB of the device's allocator, 0 on the CPU)."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        loss = step()
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    wait()
    seconds = (time.perf_counter() - start) / steps
    assert torch.isfinite(loss), "the run diverged, so its speed is meaningless"
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
    for name in workloads(args.tiny):
        best, samples = dict.fromkeys(CASES, (float("inf"), 0.0)), 0
        for case in CASES * args.rounds:
            torch.manual_seed(0)
            step, samples = made(name, case, args.device, args.tiny)
            best[case] = min(best[case], measure(step, args.device, args.steps))
            amp.reset()
            del step  # and its model, before the next one is made
        reference = best[NATIVE][0]
        for case, (seconds, peak) in best.items():
            rows.append([name, case, f"{samples / seconds:.1f}", f"{reference / seconds:.3f}", f"{peak:.2f}"])
    text = table(["model", "run", "samples/s", "ratio to torch.amp", "peak GiB"], rows)
    if args.device == "cuda" and not args.tiny:
        write("apex_models", "amp on large models", f"One device, best of {args.rounds} rounds.\n\n{text}")
    else:
        print(f"{describe()}\n\n{text}")


if __name__ == "__main__":
    main()
