"""Estimates training on 8 and 64 GPUs from measured parts, for machines without GPUs.

    python -m benchmarks.on_paper

``benchmarks/gpu_check.py`` measures a GPU where there is one. Everything here that was not measured is an assumption,
which the page lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks import machine
from benchmarks.images import SOURCE

BATCH = 256  # images per GPU
WEIGHTS = 25_557_032  # of ResNet-50; gradients are float32 at O1 and O4
RATE, RATE_OF_8 = 2470, 16621  # images/s on one A100 and on eight, mixed precision, as published
BUCKET = 10_000_000  # message_size of DistributedDataParallel: what is left to send when the backward pass ends
MEMORY = 1.5e12  # bytes/s that one A100 copies at
LATENCY_S = 20e-6  # of an all-reduce, for each doubling of the number of GPUs


@dataclass(frozen=True)
class Cluster:
    """``bus``: bytes/s of an all-reduce as nccl-tests reports it, so that S bytes take 2 (n - 1) / n * S / bus."""

    name: str
    gpus: int
    bus: float


CLUSTERS = (
    Cluster("1 GPU", 1, math.inf),
    Cluster("8 GPUs, NVLink", 8, 200e9),
    Cluster("64 GPUs, 8 x 200 Gbit/s InfiniBand per node", 64, 150e9),
    Cluster("64 GPUs, 100 Gbit/s Ethernet per node", 64, 10e9),
)


def all_reduce_s(cluster: Cluster, size: float) -> float:
    """Seconds to average ``size`` bytes over the GPUs of ``cluster``."""
    if cluster.gpus == 1:
        return 0.0
    return 2 * (cluster.gpus - 1) / cluster.gpus * size / cluster.bus + LATENCY_S * math.log2(cluster.gpus)


def step_s(cluster: Cluster, overhead_s: float, delayed: bool) -> float:
    """Seconds of a training step. The backward pass takes two thirds of the computation."""
    compute, size = BATCH / RATE, 4 * WEIGHTS
    step = compute + overhead_s
    if cluster.gpus == 1:
        return step
    copies = 6 * size / MEMORY  # into the flat buffer, its average, and back, each read and written
    if delayed:
        return step + copies + all_reduce_s(cluster, size)
    last = 4 * BUCKET  # cannot overlap with the backward pass; the rest also waits for a network that is slower than it
    hidden = compute * 2 / 3
    return step + copies + all_reduce_s(cluster, last) + max(0.0, all_reduce_s(cluster, size - last) - hidden)


def main() -> None:
    overhead = next(
        float(row["overhead, us"])
        for row in machine.rows("peers")
        if (row.get("measured"), row.get("contender")) == ("mlp, bfloat16", "harness")
    )
    per_core = next(
        float(row["images/s/core"])
        for row in machine.rows("images")
        if row["images"].startswith("ImageNet, train: harness") and "uint8" in row["images"]
    )
    table = []
    alone = BATCH / step_s(CLUSTERS[0], overhead * 1e-6, delayed=True)
    for cluster in CLUSTERS:
        for name, delayed in (("delay_allreduce", True), ("overlapped", False)):
            if cluster.gpus == 1 and not delayed:
                continue
            seconds = step_s(cluster, overhead * 1e-6, delayed)
            rate = cluster.gpus * BATCH / seconds
            cores = math.ceil(rate / cluster.gpus / per_core)
            table.append([
                cluster.name, name if cluster.gpus > 1 else "", f"{1e3 * seconds:.1f}", f"{rate:,.0f}",
                f"{100 * rate / cluster.gpus / alone:.1f} %", str(cores),
            ])  # fmt: skip
    header = ["machine", "reduction", "ms per step", "images/s", "scaling efficiency", "cores per GPU"]
    bandwidths = ", ".join(f"{cluster.bus / 1e9:.0f} GB/s ({cluster.name})" for cluster in CLUSTERS[1:])
    lost_ms = 1e3 * (8 * BATCH / RATE_OF_8 - BATCH / RATE)
    sent_ms = 1e3 * all_reduce_s(CLUSTERS[1], 4 * WEIGHTS)
    text = f"""**Nothing on this page was measured on a GPU.** It combines parts that were measured with assumptions,
for ResNet-50 at O4 or O1, {BATCH} images per A100.

{machine.table(header, table)}

Measured: {overhead:.0f} us per step that the harness adds to a loop written by hand ([peers](peers.md), in bfloat16,
added in full although the host usually runs ahead of the GPU), and {per_core:.0f} images per second and core from JPEGs
of ImageNet's sizes ([images](images.md), as uint8, which the GPU normalizes).

Published: {RATE:,} images/s on one A100 ({SOURCE}).

Assumed: an all-reduce of S bytes on n GPUs takes 2 (n - 1) / n S / B plus {1e6 * LATENCY_S:.0f} us for each doubling
of n, with B of {bandwidths}. Gradients are float32 and copied three times at {MEMORY / 1e12:.1f} TB/s. The backward
pass is two thirds of the computation; overlapped reduction hides behind it all but the last {BUCKET / 1e6:.0f} million
elements. All ranks take the same time, and images are always there.

The last sentence is the weakest. The source of the figure for one A100 also has one for eight, {RATE_OF_8:,} images/s:
{lost_ms:.0f} ms more per step than one GPU takes, of which communication explains {sent_ms:.1f} ms. The rest is waiting
for data and for the slowest rank, which `harness explain` measures in a real run. With that loss, the efficiency on
8 GPUs is {100 * RATE_OF_8 / 8 / RATE:.0f} %."""
    machine.write("on_paper", "Eight and 64 GPUs, on paper", text)


if __name__ == "__main__":
    main()
