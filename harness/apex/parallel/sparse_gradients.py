"""Reduction of sparse gradients: rows are gathered, not summed in a flat buffer of mostly zeros."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of ``module`` whose gradients will be sparse."""
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    return [table.weight for table in tables]


def sum_over_ranks(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return the coalesced sum of every rank's sparse ``gradient``; None contributes nothing. All ranks call it.

    Returns None when no rank has any row.
    """
    if gradient is None:
        gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
    gradient = gradient.coalesce()
    rows, values = gradient.indices(), gradient.values()
    counts = _gather(torch.tensor([rows.shape[1]], device=rows.device))
    most = max(int(count) for count in counts)
    if most == 0:
        return None
    all_rows = _gather(_pad(rows.t(), most))
    all_values = _gather(_pad(values, most))
    kept = [slice(int(count)) for count in counts]
    return torch.sparse_coo_tensor(
        torch.cat([r[k] for r, k in zip(all_rows, kept, strict=True)]).t(),
        torch.cat([v[k] for v, k in zip(all_values, kept, strict=True)]),
        gradient.shape,
    ).coalesce()


def _pad(tensor: Tensor, length: int) -> Tensor:
    padded = tensor.new_zeros((length, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _gather(tensor: Tensor) -> list[Tensor]:
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return pieces
