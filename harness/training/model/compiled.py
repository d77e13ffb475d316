"""Compiled models (``model.compile``), with the same code for the same shapes at every start.

torch.compile remembers: by default, the second size of a batch makes it compile code for any size, which then also runs
for the first size, and after eight sizes it compiles no more. A run that resumes meets the sizes in another order, so
that its results would differ in their last bits. Here each size gets code of its own, which depends on nothing else.
torch's caches on disk change nothing: an entry belongs to one graph with one set of options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harness.errors import TrainingError

MAX_SHAPES = 64  # of the inputs of a part; training, evaluation and their last batches have about ten


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Context of a run with a compiled model: without what earlier runs of this process have compiled, and with torch's
    settings restored at the end."""
    import torch._dynamo as dynamo  # takes seconds

    dynamo.reset()
    # At the limit, torch would leave shapes uncompiled.
    with dynamo.config.patch(
        recompile_limit=MAX_SHAPES, accumulated_recompile_limit=1 << 20, fail_on_recompile_limit_hit=True
    ):
        yield


def compile_whole(model: nn.Module, **options: Any) -> None:
    """Do as ``model.compile()`` with ``options``, but with its hooks in the same graph. torch leaves the hooks of the
    module outside: it compiles each of them, such as amp's casts, by itself, and checks it in every pass."""
    call = model._call_impl

    def whole(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    model._compiled_call_impl = _compiled(whole, **options)


def compile_units(model: nn.Module) -> None:
    """Compile the forward pass of each unit of the sharded ``model`` that contains no other unit. The hooks that gather
    its weights stay outside."""
    from torch.distributed.fsdp import FSDPModule

    units = [
        module for module in model.modules()
        if isinstance(module, FSDPModule) and not any(isinstance(part, FSDPModule) for part in [*module.modules()][1:])
    ]  # fmt: skip
    for unit in units:
        unit.forward = _compiled(unit.forward)
    # torch counts the code of all units of a class together, and each may need its own.
    torch._dynamo.config.recompile_limit = MAX_SHAPES * max(len(units), 1)


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    from torch._dynamo.exc import FailOnRecompileLimitHit  # takes seconds

    compiled = torch.compile(function, dynamic=False, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise TrainingError(
                f"the model has been compiled for inputs of {MAX_SHAPES} kinds, and these are of another",
                where="model.compile",
                hint="set model.compile=false; or give batches fewer shapes (pad texts to a few lengths), and let the "
                "model keep numbers that change in every pass as tensors",
            ) from error

    return call
