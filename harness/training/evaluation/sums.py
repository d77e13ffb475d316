"""Metrics as sums and counts, never means, so that reducing over batches and ranks of any size is exact.

A metric that is no ratio of sums, such as an area under a curve, needs all rows: ``Rows`` keeps and gathers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from harness.distributed.runtime import Runtime
from harness.errors import OwnCodeError
from harness.training.reproducibility.logical_ranks import LogicalRanks

Pairs = dict[str, tuple[Tensor, Tensor | float]]  # {name: (sum, count)}, of any shape
Report = Mapping[str, object]  # the numbers of the metrics, and details as JSON
Shapes = dict[str, tuple[torch.Size, torch.Size]]  # {name: those of the sum and the count}
_ADD_UP = "add up the sum over the rows: (errors.sum(), len(errors))"


class Rows(NamedTuple):
    """Outputs and targets to keep, in place of (sum, count). On each rank they take the memory of all rows."""

    outputs: Tensor
    targets: Tensor


@dataclass
class Sums:
    """Running (sum, count) pairs in float64, on the device of the tensors that are added."""

    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: dict[str, list[Rows]] = field(default_factory=dict)

    def add(self, pairs: Pairs) -> None:
        for name, pair in pairs.items():
            if isinstance(pair, Rows):
                self.rows.setdefault(name, []).append(Rows(pair.outputs.detach(), pair.targets.detach()))
                continue
            total, count = pair
            total = total.detach().double()
            count = count.detach().double() if isinstance(count, Tensor) else total.new_full((), float(count))
            if name in self.pairs:
                self.pairs[name][0].add_(total)
                self.pairs[name][1].add_(count)
            else:
                self.pairs[name] = (total.clone(), count.clone())

    def all_rows(self, name: str) -> Rows:
        """Return the rows that were kept under ``name``, as one."""
        return Rows(*(torch.cat(parts) for parts in zip(*self.rows[name], strict=True)))

    def on_cpu(self) -> Sums:
        rows = {name: [Rows(*(t.cpu() for t in each)) for each in batches] for name, batches in self.rows.items()}
        return Sums({name: (total.cpu(), count.cpu()) for name, (total, count) in self.pairs.items()}, rows)

    def over(self, runtime: Runtime) -> Sums:
        """Return the sums over all ranks of ``runtime``, on the CPU. Collective."""
        return reduced([self], LogicalRanks(runtime))

    def ratio(self, name: str) -> float:
        """Return sum / count; NaN if nothing was counted. Raises OwnCodeError if that is not one number."""
        total, count = self.pairs[name]
        if total.numel() != 1 or count.numel() != 1:
            problem = f"a sum of shape {tuple(total.shape)} and a count of shape {tuple(count.shape)} for {name!r}"
            raise OwnCodeError(problem, hint=_ADD_UP)
        return (total / count).item()


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float)


def reduced(parts: Sequence[Sums], ranks: LogicalRanks) -> Sums:
    """Sum the pairs of ``parts``, one for each rank of this process, over all ranks; a rank that added nothing counts
    as zero. The result is on the CPU: the host waits for the device here, once. Collective; raises OwnCodeError on all
    ranks if a sum is longer on one than on another."""
    own_shapes = [{name: (total.shape, count.shape) for name, (total, count) in part.pairs.items()} for part in parts]
    shapes = _common_shapes(chain(*ranks.runtime.gather(own_shapes)))
    gathered_rows = _gathered(parts, ranks.runtime)
    sizes = [shape for name in sorted(shapes) for shape in shapes[name]]
    if not sizes:
        return Sums({}, gathered_rows)
    flat = ranks.sum([_flat(part, shapes, ranks.runtime.device) for part in parts]).cpu()
    split = flat.split([shape.numel() for shape in sizes])
    values = iter([value.view(shape) for value, shape in zip(split, sizes, strict=True)])
    return Sums({name: (next(values), next(values)) for name in sorted(shapes)}, gathered_rows)


def _common_shapes(of_ranks: Iterable[Shapes]) -> Shapes:
    common: Shapes = {}
    for shapes in of_ranks:
        for name, pair in shapes.items():
            for shape, expected in zip(pair, common.setdefault(name, pair), strict=True):
                if shape.numel() != expected.numel():
                    message = f"sums of shape {tuple(shape)} and {tuple(expected)} for {name!r} on different ranks"
                    raise OwnCodeError(message, hint=_ADD_UP)
    return common


def _flat(part: Sums, shapes: Shapes, device: torch.device) -> Tensor:
    """Return the pairs of ``part`` in the order of their names, in float64; zeros for those that it lacks."""
    tensors: list[Tensor] = []
    for name in sorted(shapes):
        zeros = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes[name])
        tensors += part.pairs.get(name) or zeros
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _gathered(parts: Sequence[Sums], runtime: Runtime) -> dict[str, list[Rows]]:
    """Return the kept rows of all ranks, in their order, on the CPU. Collective."""
    own_rows = [
        {
            name: tuple(torch.cat(tensors).cpu().numpy() for tensors in zip(*rows, strict=True))
            for name, rows in part.rows.items()
        }
        for part in parts
    ]
    all_rows: dict[str, list[Rows]] = {}
    for rank_rows in (rank_rows for process_rows in runtime.gather(own_rows) for rank_rows in process_rows):
        for name, arrays in rank_rows.items():
            all_rows.setdefault(name, []).append(Rows(*map(torch.from_numpy, arrays)))
    return all_rows
