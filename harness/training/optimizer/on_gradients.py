"""The user's own function on the gradients of each step, such as noise (``train.on_gradients``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.config import plugins
from harness.config.schema import Config
from harness.data.seeds import Purpose, derive
from harness.errors import ConfigError, OwnCodeError

KEY = "train.on_gradients"
Function = Callable[[list[tuple[str, Tensor]], torch.Generator, int], None]


class OnGradients:
    """Calls ``function`` with the gradients of the parameters ``names``, which it changes in place.

    Its random numbers follow from (seed, step): they are the same on every rank and after any resume, and an overflow
    does not shift them.
    """

    def __init__(self, function: Function, names: Sequence[str], device: torch.device, seed: int) -> None:
        self._function, self._names, self._seed = function, names, seed
        self._generator = torch.Generator(device)

    @torch.no_grad()
    def __call__(self, params: Iterable[Tensor], step: int) -> None:
        """Call the function for step ``step``, whose gradients, averaged over ranks and unscaled, are in ``params``:
        what the optimizer updates, in the order of the names."""
        named = zip(self._names, params, strict=True)
        self._generator.manual_seed(derive(Purpose.GRADIENTS, self._seed, step))
        gradients = [(name, param.grad) for name, param in named if param.grad is not None]
        returned: Any = self._function(gradients, self._generator, step)
        if returned is not None:
            raise OwnCodeError(
                f"the function returned a value of type {type(returned).__name__}, which would not be used",
                where=KEY,
                hint="change the gradients in place, for example with gradient.add_(noise), and return nothing",
            )


def build(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> OnGradients | None:
    """Return the function that ``config`` names, for the parameters of ``optimizer``; None if it names none. Call it
    before amp, which gives the optimizer other tensors. Raises ConfigError."""
    if config.train.on_gradients is None:
        return None
    names = {id(param): name for name, param in model.named_parameters()}
    trained = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    return OnGradients(find(config.train.on_gradients), trained, device, config.seed)


def find(name: str) -> Function:
    """Return the function ``name``, package.module.function. Raises ConfigError if it is not one of three arguments."""
    found: Function = plugins.import_own("function", name, KEY)
    try:
        inspect.signature(found).bind([], None, 0)
    except (TypeError, ValueError) as error:  # also for what cannot be called, or has no signature
        raise ConfigError(
            f"{name} cannot be called with the gradients of a step: {error}",
            where=KEY,
            hint="name a function: def noise(gradients, generator, step), as docs/add_a_task.md describes",
        ) from None
    return found
