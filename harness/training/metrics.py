"""Metrics as sums and counts, never means, so that reducing over batches and ranks of any size is exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.distributed.runtime import Runtime

Pairs = dict[str, tuple[Tensor, Tensor]]  # {name: (sum, count)}, of any shape
Report = dict[str, Any]


@dataclass
class Sums:
    """Running (sum, count) pairs in float64, on the device of the tensors that are added."""

    pairs: Pairs = field(default_factory=dict)

    def add(self, pairs: Pairs) -> None:
        for name, (total, count) in pairs.items():
            total, count = total.detach().double(), count.detach().double()
            if name in self.pairs:
                self.pairs[name][0].add_(total)
                self.pairs[name][1].add_(count)
            else:
                self.pairs[name] = (total.clone(), count.clone())

    def reduce(self, runtime: Runtime) -> Sums:
        """Sum the pairs over all ranks; a rank that added nothing counts as zero. Collective."""
        shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        for of_rank in runtime.gather(
            {name: (total.shape, count.shape) for name, (total, count) in self.pairs.items()}
        ):
            shapes |= of_rank
        parts: list[Tensor] = []
        for name in sorted(shapes):
            zeros = (torch.zeros(shape, dtype=torch.float64, device=runtime.device) for shape in shapes[name])
            parts += self.pairs.get(name) or zeros
        if not parts:
            return Sums()
        flat = runtime.sum(torch.cat([part.reshape(-1) for part in parts]))
        split = flat.split([part.numel() for part in parts])
        reduced = iter([values.view(part.shape) for values, part in zip(split, parts, strict=True)])
        return Sums({name: (next(reduced), next(reduced)) for name in sorted(shapes)})

    def ratio(self, name: str) -> float:
        """Return sum / count; NaN if nothing was counted."""
        total, count = self.pairs[name]
        return (total / count).item()
