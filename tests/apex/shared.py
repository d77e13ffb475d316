"""Models and comparisons that several tests of harness.apex use."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from harness.apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Numbers(nn.Module):
    """``forward([a, b, ...])``: the sum of ``parameter * number``, so each gradient is its number.

    None leaves a parameter out of the graph.
    """

    def __init__(self, sizes=(3, 2, 4), dtypes=(torch.float32,) * 3):
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.ones(n, dtype=d)) for n, d in zip(sizes, dtypes, strict=True)])

    def forward(self, numbers):
        return sum((p * x).sum().double() for p, x in zip(self.list, numbers, strict=True) if x is not None)


def distinct(values: Iterable[Tensor | None]) -> list[list[float] | None]:
    """The distinct elements of each tensor."""
    return [None if value is None else value.detach().float().unique().tolist() for value in values]


def gradients(module: nn.Module) -> list[list[float] | None]:
    """The distinct elements of each parameter's gradient; None where there is none."""
    return distinct(p.grad for p in module.parameters())


def backward(loss: Tensor, optimizers: Any, **options: Any) -> None:
    """The backward pass of ``loss`` in a ``scale_loss`` context."""
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def train_step(loss: Tensor, optimizer: Any) -> None:
    """Backward pass, step, and gradients cleared."""
    backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def through_a_file(value: Any) -> Any:
    """``value`` saved and loaded again, as plain data."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def same(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """True if two sequences of tensors are equal in every dtype and bit."""
    pairs = zip(ones, others, strict=True)
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in pairs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)


def floating_dtypes(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}
