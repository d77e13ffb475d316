"""What the cells share: their registry, networks and data, the training loop, and the record of its outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = ("O0", "O1", "O2", "O3")
Result = dict[str, Any]


@dataclass
class Cell:
    """``kernels``: the original runs with kernels instead of its Python fallback, see ``original.install``."""

    name: str
    family: str
    run: Callable[[], Result]
    kernels: bool = False


CELLS: dict[str, Cell] = {}


def cells(family: str, *, kernels: bool = False, **choices: Sequence[Any]) -> Callable[..., Any]:
    """Decorator: one cell for each combination of ``choices``, which the function takes as keywords."""

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        for values in itertools.product(*choices.values()):
            arguments = dict(zip(choices, values, strict=True))
            name = " ".join([family, *(_word(key, value) for key, value in arguments.items())])
            if name in CELLS:
                raise ValueError(f"two cells are called {name}")
            CELLS[name] = Cell(name, family, lambda arguments=arguments: function(**arguments), kernels)
        return function

    return register


def _word(key: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{key}={value}"


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(72, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10)),
    )


def mlp(inputs: int = 16, outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, outputs))


def images(number: int, seed: int = 1, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    for _ in range(number):
        x = torch.randn(size, 3, 8, 8, generator=generator)
        yield x, torch.randint(0, 10, (size,), generator=generator)


def vectors(number: int, seed: int = 1, width: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    for _ in range(number):
        yield torch.randn(8, width, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def sgd(parameters: Iterable[Any], lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)


def adam(parameters: Iterable[Any], lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, eps=1e-4)  # torch's eps is 0 in float16: O3 would divide by zero


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def fit(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    overflow: Sequence[int] = (),
    accumulate: int = 1,
    delay_unscale: bool = False,
    steps: Any = None,
    before_step: Callable[[int], Any] = lambda step: None,
    after_step: Callable[[int], Any] = lambda step: None,
) -> Result:
    """Train, and return the outcome.

    ``overflow``: batches whose loss is so large that its gradients are infinite at every level. ``steps``: a wrapper of
    the optimizer, whose ``step`` is called. The gradients of the last step are kept, for the outcome.
    """
    from apex import amp

    losses, batches = [], list(batches)
    for number, (x, y) in enumerate(batches):
        value = loss(model(x), y)
        losses.append(value.detach().float())
        if number in overflow:
            value = value * 1e38
        last = number % accumulate == accumulate - 1
        with amp.scale_loss(value, optimizer, delay_unscale=delay_unscale and not last) as scaled:
            scaled.backward()
        if last:
            before_step(number)
            (steps or optimizer).step()
            after_step(number)
            if number < len(batches) - 1:
                optimizer.zero_grad()
    return {"losses": losses, **outcome(model, optimizer)}


def outcome(models: Any, optimizers: Any) -> Result:
    """Everything a script can see after training: weights, masters, gradients, optimizer state, amp state."""
    from apex import amp

    models = models if isinstance(models, list) else [models]
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    masters = [parameter for optimizer in optimizers for parameter in amp.master_params(optimizer)]
    return {
        "weights": [copy(parameter) for model in models for parameter in model.parameters()],
        "saved model": [copy(value) for model in models for value in model.state_dict().values()],
        "masters": [copy(parameter) for parameter in masters],
        "master gradients": [copy(parameter.grad) for parameter in masters],
        "model gradients": [copy(p.grad) for model in models for p in model.parameters()],
        "optimizer state": [_state(opt, p) for opt in optimizers for p in amp.master_params(opt)],
        "amp state": {name: dict(value) for name, value in amp.state_dict().items()},
    }


def _state(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    return {name: copy(value) for name, value in sorted(optimizer.state.get(parameter, {}).items())}


def copy(value: Any) -> Any:
    """A detached copy of a tensor, anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value
