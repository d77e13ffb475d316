"""Linear layers with an activation after each, including the last (contract 5.6), on ``F.linear``.

O1 and autocast cast them like any linear layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.apex.fused_dense.fused_dense import init_linear

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}  # in the order of Apex's numbers for them


def mlp_function(bias: bool | int, activation: str | int, *tensors: Tensor) -> Tensor:
    """Apply the layers to ``tensors[0]``, of shape (..., sizes[0]).

    ``tensors``: the input, then all weights of shape (out, in), then, if ``bias`` is true, all biases.
    ``activation``: "none", "relu", "sigmoid", or Apex's numbers for them: 0, 1, 2.
    """
    x, *parameters = tensors
    num_layers, rest = divmod(len(parameters), 2 if bias else 1)
    if rest or not num_layers:
        raise ValueError(
            f"mlp_function was given {len(parameters)} parameter{'s' * (len(parameters) != 1)} with bias={bool(bias)}; "
            "it takes the input, all weights and, if bias is true, as many biases"
        )
    act = _activation(activation)
    biases: Sequence[Tensor | None] = parameters[num_layers:] or [None] * num_layers
    for weight, shift in zip(parameters[:num_layers], biases, strict=True):
        x = act(F.linear(x, weight, shift))
    return x


def _activation(which: str | int) -> Callable[[Tensor], Tensor]:
    names = list(_ACTIVATIONS)
    if which in range(len(names)):
        which = names[int(which)]
    if which not in _ACTIVATIONS:
        raise ValueError(
            f"activation={which!r} is unknown; choose one of {', '.join(map(repr, names))}, or their numbers 0, 1, 2"
        )
    return _ACTIVATIONS[str(which)]


class MLP(nn.Module):
    """``len(mlp_sizes) - 1`` linear layers, with ``activation`` after each, including the last.

    ``mlp_sizes``: number of features of the input, of each hidden layer, and of the output. ``activation``: "relu",
    "sigmoid" or "none". The parameters are ``weight_0`` of shape (mlp_sizes[1], mlp_sizes[0]), ``bias_0``, and so on.
    They are initialized like those of ``nn.Linear`` (Apex used normal distributions).
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(
                f"activation={activation!r} is unknown; choose one of {', '.join(map(repr, _ACTIVATIONS))}."
            )
        if len(mlp_sizes) < 2:
            raise ValueError(
                f"mlp_sizes={list(mlp_sizes)} needs at least two sizes: those of the input and the output."
            )
        self.mlp_sizes, self.num_layers = list(mlp_sizes), len(mlp_sizes) - 1
        self.bias, self.activation = bool(bias), activation
        for i, (num_in, num_out) in enumerate(itertools.pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(num_out, num_in)))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(num_out)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights, first layer first."""
        return [self.get_parameter(f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases, first layer first; empty without ``bias``."""
        return [self.get_parameter(f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Initialize all parameters like those of ``nn.Linear``."""
        for weight, bias in itertools.zip_longest(self.weights, self.biases):
            init_linear(weight, bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., mlp_sizes[0]) to (..., mlp_sizes[-1])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        return f"mlp_sizes={self.mlp_sizes}, bias={self.bias}, activation={self.activation}"
