"""Metrics as sums and counts, never means, so that reducing over batches and ranks of any size is exact.

A metric that is no ratio of sums, such as an area under a curve, needs all rows: ``Rows`` keeps and gathers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.distributed.runtime import Runtime

Pairs = dict[str, tuple[Tensor, Tensor]]  # {name: (sum, count)}, of any shape
Report = dict[str, Any]


class Rows(NamedTuple):
    """Outputs and targets to keep, in place of (sum, count). On each rank they take the memory of all rows."""

    outputs: Tensor
    targets: Tensor


@dataclass
class Sums:
    """Running (sum, count) pairs in float64, on the device of the tensors that are added."""

    pairs: Pairs = field(default_factory=dict)
    rows: dict[str, list[Rows]] = field(default_factory=dict)

    def add(self, pairs: Pairs) -> None:
        for name, pair in pairs.items():
            if isinstance(pair, Rows):
                self.rows.setdefault(name, []).append(Rows(pair.outputs.detach(), pair.targets.detach()))
                continue
            total, count = pair
            total, count = total.detach().double(), count.detach().double()
            if name in self.pairs:
                self.pairs[name][0].add_(total)
                self.pairs[name][1].add_(count)
            else:
                self.pairs[name] = (total.clone(), count.clone())

    def reduce(self, runtime: Runtime) -> Sums:
        """Sum the pairs over all ranks; a rank that added nothing counts as zero. The result is on the CPU: the host
        waits for the device here, once. Collective."""
        shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        for of_rank in runtime.gather(
            {name: (total.shape, count.shape) for name, (total, count) in self.pairs.items()}
        ):
            shapes |= of_rank
        kept = self._gathered(runtime)
        parts: list[Tensor] = []
        for name in sorted(shapes):
            zeros = (torch.zeros(shape, dtype=torch.float64, device=runtime.device) for shape in shapes[name])
            parts += self.pairs.get(name) or zeros
        if not parts:
            return Sums({}, kept)
        flat = runtime.sum(torch.cat([part.reshape(-1) for part in parts])).cpu()
        split = flat.split([part.numel() for part in parts])
        reduced = iter([values.view(part.shape) for values, part in zip(split, parts, strict=True)])
        return Sums({name: (next(reduced), next(reduced)) for name in sorted(shapes)}, kept)

    def _gathered(self, runtime: Runtime) -> dict[str, list[Rows]]:
        """The kept rows of all ranks, on the CPU. Collective."""
        mine = {
            name: tuple(torch.cat(parts).cpu().numpy() for parts in zip(*rows, strict=True))
            for name, rows in self.rows.items()
        }
        kept: dict[str, list[Rows]] = {}
        for of_rank in runtime.gather(mine):
            for name, arrays in of_rank.items():
                kept.setdefault(name, []).append(Rows(*map(torch.from_numpy, arrays)))
        return kept

    def all_rows(self, name: str) -> Rows:
        """The rows that were kept under ``name``, as one."""
        return Rows(*(torch.cat(parts) for parts in zip(*self.rows[name], strict=True)))

    def ratio(self, name: str) -> float:
        """Return sum / count; NaN if nothing was counted."""
        total, count = self.pairs[name]
        return (total / count).item()
