"""The state of the user's own parts in a checkpoint: plain data, since checkpoints are loaded without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import OwnCodeError

_PLAIN = frozenset(
    [type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, Tensor, nn.Parameter]
)


def require_plain(state: Any, path: str, where: str) -> None:
    """Raise OwnCodeError if ``state`` holds anything that a checkpoint could not restore."""
    if type(state) in _PLAIN:
        return
    if type(state) in (dict, OrderedDict, Counter) and all(type(key) in _PLAIN for key in state):
        for key, value in state.items():
            require_plain(value, f"{path}[{key!r}]", where)
    elif type(state) in (list, tuple, set):
        for index, value in enumerate(state):
            require_plain(value, f"{path}[{index}]", where)
    else:
        kind = f"{type(state).__module__}.{type(state).__qualname__}".removeprefix("builtins.")
        raise OwnCodeError(
            f"{path} is a {kind}, which a checkpoint cannot hold",
            where=where,
            hint="return tensors, numbers, texts, lists, tuples, sets and dicts, for example int(value) or list(names)",
        )
