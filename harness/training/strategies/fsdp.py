"""Fully sharded data parallelism, torch's FSDP2: each rank holds a shard of weights, gradients and optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.config.constraints import Conflict
from harness.config.schema import Config, ParallelSection
from harness.errors import ConfigError, plural
from harness.training.strategies.base import ParallelStrategy

if TYPE_CHECKING:
    from torch import nn

# Optimizers that need complete parameters, for norms or flat buffers. ``registry.find`` asks one of the user's own.
_NEEDS_WHOLE_PARAMETERS = re.compile(
    r"fused_\w+|(harness\.)?apex\.optimizers\.\w+|(torch\.optim\.)?(adafactor|muon|sparseadam)", re.IGNORECASE
)


class Strategy(ParallelStrategy):
    """Shards over all ranks (``harness.training.strategies.sharding``). One process has the bare model."""

    shards_weights = True

    @classmethod
    def conflicts(cls, config: Config) -> Iterator[Conflict]:
        yield from _of_other_types(config)
        if config.train.on_gradients:
            yield Conflict(
                "parallel.strategy",
                "the function gets whole gradients, but under fsdp each rank holds only a shard of them",
                "use parallel.strategy=ddp, or remove train.on_gradients",
            )
        if config.precision.opt_level in ("O2", "O3", "O5"):
            yield Conflict(
                "parallel.strategy",
                f"fsdp shards float32 weights, but {config.precision.opt_level} keeps them in half precision",
                "use precision.opt_level=O1 (float16) or O4 (bfloat16), where the weights are the masters, or O0; O4 "
                "with parallel.param_dtype=bfloat16 corresponds to O5",
            )
        if config.model.channels_last and config.task.name != "text_csv":  # no images, though preset:modern sets it
            yield Conflict(
                "parallel.strategy",
                "fsdp shards weights along their first dimension, which is not contiguous in channels-last weights",
                "use model.channels_last=false, or parallel.strategy=ddp",
            )
        if isinstance(config.model.compile, str):
            yield Conflict(
                "model.compile",
                f"{config.model.compile} replays CUDA graphs on fixed memory, but fsdp gathers weights into new memory "
                "in every pass",
                "use model.compile=true, or parallel.strategy=ddp",
            )
        if config.optimizer.larc is not None:
            yield Conflict(
                "parallel.strategy",
                "LARC needs the norms of complete parameters, but under fsdp each rank holds only a shard",
                "use parallel.strategy=ddp, or remove optimizer.larc",
            )
        if _NEEDS_WHOLE_PARAMETERS.fullmatch(config.optimizer.name):
            yield Conflict(
                "parallel.strategy",
                "this optimizer needs complete parameters or flat buffers, but fsdp passes it shards",
                "use sgd, adam or adamw, or parallel.strategy=ddp",
            )

    @classmethod
    def check_world(cls, section: ParallelSection, world_size: int) -> None:
        super().check_world(section, world_size)
        if world_size == 1 and section.param_dtype != "float32":
            raise ConfigError(
                f"parallel.param_dtype={section.param_dtype} is the dtype of gathered weights, but there is only one "
                "process",
                where="parallel.param_dtype",
                hint="start several processes, or remove it; precision.opt_level=O4 computes in bfloat16",
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        if self.holds_shard:
            import torch

            from harness.training.strategies import sharding

            sharding.shard(model, self.device, sharding.MIN_BLOCK, getattr(torch, self.section.param_dtype))
        return model

    def wrap(self, model: Any) -> None:
        super().wrap(model)
        self.exchanges = self.holds_shard
        if self.holds_shard:
            self._switch = model.set_requires_gradient_sync
            types = "" if self.section.param_dtype == "float32" else f" of {self.section.param_dtype}"
            parts = sum(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
            self.summary = f"fsdp in {plural(parts, 'part')}{types}"

    def switch_sync(self, on: bool) -> None:
        if self.holds_shard:
            self._switch(on)

    def compile(self, mode: str | None) -> None:
        from harness.training.model import compiled

        if self.holds_shard:
            compiled.compile_units(self.model)
        else:
            super().compile(mode)


def _of_other_types(config: Config) -> Iterator[Conflict]:
    """Yield what ``param_dtype`` cannot be combined with."""
    if config.parallel.param_dtype == "float32":
        return
    if config.model.compile:
        yield Conflict(
            "parallel.param_dtype",
            "with bfloat16 weights, batch norms are gathered separately, which is impossible inside a compiled module",
            "use model.compile=false, or parallel.param_dtype=float32",
        )
    if config.precision.opt_level == "O1":
        yield Conflict(
            "parallel.param_dtype",
            "O1 computes in float16, which would round the bfloat16 weights a second time",
            "use precision.opt_level=O4 or O0, or parallel.param_dtype=float32",
        )
