"""Whole training steps as CUDA graphs (``train.cuda_graphs``): recorded once, then started by one call each.

A graph repeats what ``update`` of the loop does on the device, from the forward pass to the optimizer, on the same
memory. So the device also decides what depends on an overflow: whether the update is skipped, the loss scale of the
next step (``DeviceScale``), and its learning rate, from a table. The host counts later: ``settle`` reads which steps
were skipped, and does for each what follows an ordinary step. After it, nothing differs from a run without graphs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.schema import Config
from harness.data.loader import MicroBatch
from harness.errors import ConfigError
from harness.training.cuda_recorder import Recorder, recorded
from harness.training.precision import Precision
from harness.training.step_timer import Untimed

log = logging.getLogger("harness")

WARM_UP = 3  # updates of a start before the first graph: optimizers create state, libraries choose and load kernels
WINDOW = 64  # steps between two calls of ``settle``, at most

# of harness.training.loop, with their arguments (run, group, measured, timer) and (run, losses, skip)
Update = Callable[[Any, list[MicroBatch], bool, Any], tuple[list[tuple[Tensor, MicroBatch]], bool]]
Count = Callable[[Any, list[tuple[Tensor, MicroBatch]], bool], None]


def require(config: Config, world_size: int, device: torch.device | None = None) -> None:
    """Raise ConfigError if ``train.cuda_graphs`` is set but impossible with ``world_size`` processes or on ``device``,
    if that is known."""
    if not config.train.cuda_graphs or (world_size == 1 and (device is None or device.type == "cuda")):
        return
    found = f"{world_size} processes were started" if world_size > 1 else f"this run is on {device}"
    raise ConfigError(
        f"train.cuda_graphs records the steps of one process on a CUDA device, but {found}",
        where="train.cuda_graphs",
        hint="set train.cuda_graphs=false" + (", or start one process" if world_size > 1 else ""),
    )


@dataclass
class _Pending:
    """A step that was started but not counted."""

    micro: MicroBatch
    loss: Tensor
    skipped: Tensor  # () on the device, 0 or 1
    count: Count


class _Graph:
    """A step on the memory of one batch. Its first call does the work directly, the second records it."""

    def __init__(
        self,
        micro: MicroBatch,
        body: Callable[[MicroBatch], tuple[Tensor, Tensor | None]],
        tensors: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.micro = micro
        self._tensors = tensors
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self._body = body
        self._called = False
        self._replay: Callable[[], None] | None = None

    def __call__(self, recorder: Recorder) -> None:
        if self._called and self._replay is None:
            self._replay = recorded(recorder, self._work, self._tensors)
        self._called = True
        (self._replay or self._work)()

    def _work(self) -> None:
        self.loss, self.norm = self._body(self.micro)


class StepGraphs:
    """The graphs of a run, and its steps that are not counted yet. One process; see ``require``."""

    def __init__(self, recorder: Recorder, run: Any, device: torch.device) -> None:
        self.recorder = recorder
        self.optimizer: torch.optim.Optimizer = run.optimizer
        self.pending: list[_Pending] = []
        self._window = min(WINDOW, run.config.train.log_every)
        self._first = run.state.applied
        precision: Precision = run.precision
        self._scale = precision.on_device(device)
        self._rates = torch.zeros(self._window, len(self.optimizer.param_groups), device=device)
        self._applied = torch.zeros(1, dtype=torch.int64, device=device)  # updates since the window began
        self._layout: tuple[Any, ...] | None = None
        self._graphs: dict[bool, _Graph] = {}

    def start(self, run: Any, group: list[MicroBatch], measured: bool, update: Update, count: Count) -> bool:
        """Start the step of ``group``, without waiting for it; False if it has to run without a graph.

        ``update`` does the work of a step; ``settle`` later calls ``count``. All graphs are of one layout of batches:
        that of the first full one after ``WARM_UP`` updates.
        """
        micro = group[0]
        ready = run.state.applied - self._first >= WARM_UP and micro.num_rows == run.train_data.per_rank
        if self._layout is None and ready:
            self._layout = _layout(micro)
            log.info("batches of shape %s run as CUDA graphs from here on", list(micro.batch.inputs.shape))
        if not ready or _layout(micro) != self._layout:
            self.settle(run)
            return False
        if len(self.pending) == self._window:
            self.settle(run)
        if not self.pending:
            self._begin(run)
        graph = self._graph(run, micro, measured and run.config.train.clip_norm is None, update)
        run.meter.timer.start()
        graph.micro.batch.inputs.copy_(micro.batch.inputs, non_blocking=True)
        graph.micro.batch.targets.copy_(micro.batch.targets, non_blocking=True)
        graph(self.recorder)
        run.meter.timer.end("backward")  # a graph does not tell its parts
        assert graph.loss is not None
        run.meter.norm = graph.norm
        static = graph.micro.batch  # pending steps must not hold their batches
        batch = replace(micro.batch, inputs=static.inputs, targets=static.targets)
        loss, skipped = graph.loss.clone(), self._scale.found.clone()
        self.pending.append(_Pending(replace(micro, batch=batch), loss, skipped, count))
        return True

    def settle(self, run: Any) -> None:
        """Count the steps that were started, in their order. The host waits for the last."""
        if not self.pending:
            return
        steps, self.pending = self.pending, []
        for step, skipped in zip(steps, torch.stack([step.skipped for step in steps]).tolist(), strict=True):
            run.set_lr()
            self._scale.count(skipped != 0)
            step.count(run, [(step.loss, step.micro)], skipped != 0)

    def round_lr(self) -> None:
        """Round the learning rates as the kernels read them from tensors, for the steps without a graph."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(np.float32(group["lr"]))

    def _begin(self, run: Any) -> None:
        """Give the device the loss scale, and the learning rates of the next updates."""
        state, rates = run.state, list[list[float]]()
        for ahead in range(self._window):
            run.schedule.set_lr(self.optimizer, state.applied + ahead, state.plateau.reductions)
            rates.append([group["lr"] for group in self.optimizer.param_groups])
        self._rates.copy_(torch.tensor(rates))
        self._applied.zero_()
        self._scale.start()

    def _graph(self, run: Any, micro: MicroBatch, measured: bool, update: Update) -> _Graph:
        if measured not in self._graphs:
            batch = replace(micro.batch, inputs=micro.batch.inputs.clone(), targets=micro.batch.targets.clone())
            static = next((graph.micro for graph in self._graphs.values()), replace(micro, batch=batch))
            self._graphs[measured] = _Graph(
                static, lambda micro: self._work(run, micro, measured, update), lambda: self._tensors(run.module)
            )
        return self._graphs[measured]

    def _work(self, run: Any, micro: MicroBatch, measured: bool, update: Update) -> tuple[Tensor, Tensor | None]:
        """A step on the device; its loss, and the norm of its gradients if that was computed."""
        run.meter.norm = None
        rates = self._rates.index_select(0, self._applied).view(-1)
        with self._scale.deciding(self.optimizer), self._rates_of(rates):
            ((loss, _),), _ = update(run, [micro], measured, Untimed())
        self._applied.add_(self._scale.found == 0)
        return loss.detach(), run.meter.norm

    def _tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """What a step changes and the next step reads."""
        params = itertools.chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        states = enumerate(self.optimizer.state.get(param, {}) for param in params)
        found = {
            f"{key} of the optimizer ({number})": value for number, state in states for key, value in state.items()
        }
        return {**dict(model.named_parameters()), **dict(model.named_buffers()), **found}

    @contextmanager
    def _rates_of(self, rates: Tensor) -> Iterator[None]:
        """Context in which the optimizer reads its learning rates from ``rates`` and can be recorded."""
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        recording = rates.is_cuda and torch.cuda.is_current_stream_capturing()
        for group, rate in zip(groups, rates.unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:  # checked by torch, without an effect on fused kernels
                group["capturable"] = group["capturable"] or recording
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def _layout(micro: MicroBatch) -> tuple[Any, ...]:
    """What a graph of ``micro`` repeats, apart from the values in its tensors."""
    parts = (micro.batch.inputs, micro.batch.targets)
    return (*((part.shape, part.stride(), part.dtype) for part in parts), micro.weight)
