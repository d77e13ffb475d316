"""Small models, and their training with FP16_Optimizer and by hand."""

from __future__ import annotations

import torch
from torch import nn

from harness.apex.fp16_utils import FP16_Optimizer, convert_network

HALF, INF = torch.float16, float("inf")
HIGH = {"init_scale": 2.0**32, "max_loss_scale": 2.0**32}  # a scale at which the first steps overflow

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def make_model(dtype=HALF) -> nn.Module:
    torch.manual_seed(3)
    return convert_network(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), dtype)


def build(maker="sgd", dtype=HALF, **arguments) -> tuple[nn.Module, FP16_Optimizer]:
    model = make_model(dtype)
    inner = MAKERS[maker](model.parameters()) if isinstance(maker, str) else maker(model.parameters())
    return model, FP16_Optimizer(inner, **arguments)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    return nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), target)


def masters_of(optimizer: FP16_Optimizer) -> list[torch.Tensor]:
    return optimizer.param_groups[0]["params"]


def train(model, optimizer, steps, clip=None) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        optimizer.backward(loss)
        if clip is not None:
            optimizer.clip_master_grads(clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_hand(model, make_optimizer, steps, scale, clip=None) -> tuple[list[float], list[torch.Tensor]]:
    """The recipe of the mixed precision papers, spelled out parameter by parameter."""
    params = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    optimizer = make_optimizer(masters)
    losses = []
    for step in steps:
        for p in params:
            p.grad = None
        loss = loss_of(model, step)
        (loss.float() * scale).backward()
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float() / scale
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return losses, masters
