"""Metrics as sums and counts, never means: what is reduced over batches and ranks is exact, whatever their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.distributed.runtime import Runtime

Pairs = dict[str, tuple[Tensor, Tensor]]  # name: (sum, count), any shape
Report = dict[str, Any]

MAX_CONFUSION = 1000  # classes; the matrix of more would not be read by anybody, nor fit
MAX_SCORES = 100  # classes; a table with a column for each of more would be larger than the data


@dataclass
class Sums:
    """Running (sum, count) pairs in float64, on the device of what is added."""

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
        """The pairs summed over ranks, also of ranks that have added nothing. Collective."""
        shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        for told in runtime.gather({name: (total.shape, count.shape) for name, (total, count) in self.pairs.items()}):
            shapes |= told
        empty = {
            name: tuple(torch.zeros(s, dtype=torch.float64, device=runtime.device) for s in shapes[name])
            for name in shapes
        }
        mine = [part for name in sorted(shapes) for part in self.pairs.get(name, empty[name])]
        if not mine:
            return Sums()
        flat = runtime.sum(torch.cat([part.reshape(-1) for part in mine]))
        parts = iter(
            [part.view(like.shape) for part, like in zip(flat.split([m.numel() for m in mine]), mine, strict=True)]
        )
        return Sums({name: (next(parts), next(parts)) for name in sorted(shapes)})

    def ratio(self, name: str) -> float:
        """sum / count; nan where nothing was counted."""
        total, count = self.pairs[name]
        return (total / count).item()


def classification(outputs: Tensor, targets: Tensor, num_classes: int) -> Pairs:
    """loss, top1, top5, accuracy by class and the confusion matrix (label, prediction) of logits (batch, classes)."""
    outputs = outputs.float()
    rows = torch.tensor(float(len(targets)), device=outputs.device)
    predicted = outputs.topk(min(5, num_classes), dim=1).indices
    hits = predicted == targets[:, None]
    per_class = torch.bincount(targets, minlength=num_classes)
    pairs = {
        "loss": (functional.cross_entropy(outputs, targets, reduction="sum"), rows),
        "top1": (hits[:, 0].sum(), rows),
        "top5": (hits.sum(), rows),
        "class_accuracy": (torch.bincount(targets[hits[:, 0]], minlength=num_classes), per_class),
    }
    if num_classes <= MAX_CONFUSION:
        cells = torch.bincount(targets * num_classes + predicted[:, 0], minlength=num_classes**2)
        pairs["confusion"] = (cells.view(num_classes, num_classes), rows)
    return pairs


def classification_table(outputs: Tensor, classes: Sequence[str | int]) -> dict[str, Any]:
    """The prediction for each of some logits (batch, classes), and the probability of each class: a column each.

    Of more than MAX_SCORES classes the five best predicted, each with its probability.
    """
    scores = outputs.float().softmax(dim=1).cpu()
    if len(classes) <= MAX_SCORES:
        predicted = [classes[index] for index in scores.argmax(dim=1).tolist()]
        columns = {f"score_{label}": column for label, column in zip(classes, scores.T, strict=True)}
        return {"prediction": predicted, **columns}
    best = scores.topk(5, dim=1)
    table: dict[str, Any] = {}
    for place, (values, indices) in enumerate(zip(best.values.T, best.indices.T, strict=True)):
        suffix = f"_{place + 1}" if place else ""
        table |= {f"prediction{suffix}": [classes[index] for index in indices.tolist()], f"score{suffix}": values}
    return table


def classification_report(sums: Sums, classes: Sequence[str | int]) -> Report:
    """{metric: value} of reduced ``classification`` pairs; accuracy by label; the confusion matrix as counts."""
    report: Report = {name: sums.ratio(name) for name in ("top1", "top5", "loss")}
    correct, count = sums.pairs["class_accuracy"]
    seen = count > 0
    report["mean_class_accuracy"] = (correct[seen] / count[seen]).mean().item()
    report["class_accuracy"] = {
        str(label): (hit / num if num else None)
        for label, hit, num in zip(classes, correct.tolist(), count.tolist(), strict=True)
    }
    if "confusion" in sums.pairs:
        report["confusion"] = [[int(cell) for cell in row] for row in sums.pairs["confusion"][0].tolist()]
    return report
