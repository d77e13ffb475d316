"""torch's DataParallel: one process copies the model to all visible CUDA devices in every step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.constraints import Conflict
from harness.config.schema import Config
from harness.training.strategies.base import ParallelStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("harness")


class Strategy(ParallelStrategy):
    """DataParallel; the bare model if there is one device, or a CPU."""

    one_process = True

    @classmethod
    def conflicts(cls, config: Config) -> Iterator[Conflict]:
        if config.model.compile:
            yield Conflict(
                "parallel.strategy",
                "dp replaces the weights in every forward pass, but a compiled model is bound to its weights",
                "use model.compile=false, or parallel.strategy=ddp",
            )
        if config.model.activation_checkpointing:
            yield Conflict(
                "parallel.strategy",
                "dp copies modules to each device, but a module recomputed in the backward pass stays on its own "
                "device",
                "use parallel.strategy=ddp, with one process per device",
            )
        if config.parallel.sync_batchnorm:
            yield Conflict(
                "parallel.sync_batchnorm",
                "sync_batchnorm needs several processes, but dp runs in one",
                "use parallel.strategy=ddp, with one process per device",
            )

    def wrap(self, model: nn.Module) -> None:
        import torch

        super().wrap(model)
        count = torch.cuda.device_count() if self.device.type == "cuda" else 1
        if count > 1:
            self.model, self.summary = torch.nn.DataParallel(model), f"dp on {count} devices"
            return
        log.warning(
            "parallel.strategy=dp found only one device (%s), so it acts as parallel.strategy=none", self.device
        )
        self.summary = f"dp on one device ({self.device})"

    def devices(self) -> list[torch.device]:
        import torch

        return [torch.device("cuda", index) for index in getattr(self.model, "device_ids", ())] or [self.device]

    @property
    def eval_model(self) -> nn.Module:
        """The wrapper: there is no other rank to wait for."""
        return self.model
