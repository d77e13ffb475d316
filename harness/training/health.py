"""Checks that a run still learns: finite loss and weights, equal on all ranks, and steps that update the weights.

Every decision is made from values that are equal on all ranks, where the host waits for the device anyway: the loss at
log lines, the weights at checkpoints, the updates at the end of an epoch, the validation loss at evaluations.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.distributed.runtime import Runtime
from harness.errors import TrainingError
from harness.runs import layout
from harness.training.optimizer.ema import Ema
from harness.training.optimizer.precision import Precision
from harness.training.state import State
from harness.training.strategies.sharding import local

log = logging.getLogger("harness")

MAX_SKIPPED_IN_A_ROW = 100  # a dynamic loss scale halves at each skip, so it has long reached its minimum by then
_ON_ALL_RANKS = (
    "what is your own (train.on_gradients, hooks, the optimizer) must do the same on all ranks: draw random numbers "
    "from the generator that it gets; if machines of several kinds compute differently, set train.deterministic=warn, "
    "with which a resume is not exact"
)


@dataclass
class Health:
    """The checks of a run, which raise TrainingError on all ranks alike. ``where``: the run folder, for messages.

    Building it is collective. Buffers and frozen parameters that are not finite at that time, such as a mask of -inf,
    are not checked later.
    """

    config: Config
    runtime: Runtime
    precision: Precision
    module: nn.Module
    ema: Ema | None
    optimizer: torch.optim.Optimizer
    where: str
    _unchecked: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        fixed = {name for name, tensor in self._tensors() if not tensor.requires_grad}
        self._unchecked = frozenset(fixed.intersection(_not_finite(self._peaks_of_all_ranks())))

    def loss(self, total: float, steps: int, state: State, on_disk: int) -> None:
        """Check ``total``, the reduced loss of the last ``steps`` steps, and the steps skipped in a row. Collective."""
        if not math.isfinite(total):
            when = "in the last step" if steps == 1 else f"within the last {steps} steps"
            self._fail(f"the loss became {total} {when}", state, on_disk, batches=True)
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            problem = f"{state.skipped_in_a_row} steps in a row were skipped because their gradients were not finite"
            self._fail(problem, state, on_disk)

    def weights(self, state: State, on_disk: int) -> None:
        """Check the weights, their moving average, the buffers and the optimizer's state on every rank, and that ranks
        have the same weights. Collective; the host waits."""
        if _not_finite(self._peaks_of_all_ranks(equal=True)):
            self._fail("the weights are no longer finite", state, on_disk)
        # An infinite second moment freezes its weight, which stays finite.
        bad = _not_finite(_peaks_of_this_rank(self._optimizer_state()))
        if names := [name for rank_names in self.runtime.gather(bad[:1]) for name in rank_names]:
            self._fail(f"the optimizer's {names[0]} is no longer finite", state, on_disk)

    def updates(self, state: State, on_disk: int) -> None:
        """At the end of an epoch, check that it updated the weights. Collective.

        At the start the loss scale may have to fall for longer than a short epoch. So an epoch without an update fails
        only if the scale cannot fall any further.
        """
        if state.epoch_skipped and not state.epoch_applied and not self.precision.can_lower_scale():
            problem = f"no step of epoch {state.epoch + 1} updated the weights ({state.epoch_skipped} skipped)"
            self._fail(f"{problem}: their gradients were not finite", state, on_disk)

    def validation(self, metrics: dict[str, float], state: State) -> None:
        """Check the validation loss. Collective.

        The loss is every metric with "loss" in its name; without one, every metric for which lower is better. Other
        metrics may be infinite or NaN: a perplexity that overflows, an F1 score without positives.
        """
        directions = self.config.task.metrics
        losses = [name for name in directions if "loss" in name] or [
            name for name, better in directions.items() if better == "min"
        ]
        if bad := [name for name in losses if not math.isfinite(metrics[name])]:
            self._fail(f"the validation {bad[0]} is {metrics[bad[0]]}", state, state.best_step)

    def result(self, state: State) -> None:
        """At the end of the run, check that an evaluation could be the best; warn if no step updated the weights."""
        if not state.applied:
            scale = self.precision.loss_scale()
            log.warning(
                "no step updated the weights (%d skipped), which are still the initial ones: the loss scale started "
                "too high and has fallen to %g; train for more steps, or set precision.max_loss_scale=%g",
                state.step,
                scale,
                scale,
            )
        if state.history and state.best is None:
            others = ", ".join(name for name in self.config.task.metrics if name != self.config.best_metric)
            raise TrainingError(
                f"no evaluation had a finite {self.config.best_metric}, so no best weights were written",
                where=self.where,
                hint=f"set checkpoint.best_metric to another metric ({others})" if others else "lower optimizer.lr",
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights and buffers in the order of the model's layers, then the moving averages, with their names."""
        for prefix, layer in self.module.named_modules():
            yield from layer.named_parameters(prefix, recurse=False)
            yield from layer.named_buffers(prefix, recurse=False)
        if self.ema is not None:
            names = {id(param): name for name, param in self.module.named_parameters()}
            for param, average in zip(self.ema.params, self.ema.average, strict=True):
                yield f"the moving average of {names[id(param)]}", average

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state for each element of the weights, such as exp_avg_sq, with names."""
        names = {id(param): name for name, param in self.module.named_parameters()}
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.shape == param.shape and value.dim():
                    yield f"{key} of {names.get(id(param), f'parameter {index}')}", value

    def _peaks_of_all_ranks(self, equal: bool = False) -> dict[str, float]:
        """Return the largest absolute value of each tensor over all ranks, NaN if it has one. ``equal``: see
        ``_require_equal``. Collective."""
        peaks = _peaks_of_this_rank(self._tensors())
        checked_peaks = {name: peak for name, peak in peaks.items() if name not in self._unchecked}
        of_ranks = np.array(self.runtime.gather(list(checked_peaks.values())))
        if equal:
            self._require_equal(dict(zip(checked_peaks, of_ranks.T, strict=True)))
        return dict(zip(checked_peaks, np.max(of_ranks, axis=0).tolist(), strict=True))

    def _require_equal(self, peaks: dict[str, np.ndarray]) -> None:
        """Raise TrainingError, or warn unless train.deterministic, if the largest value of a weight that each rank has
        whole differs between ranks. Peaks are exact, however a rank computes them, and gathered anyway."""
        for name, param in self.module.named_parameters():
            of_ranks = peaks.get(name, np.zeros(1))
            differing_rank = int(np.argmax(of_ranks != of_ranks[0]))
            if differing_rank and param.requires_grad and local(param) is param and np.isfinite(of_ranks).all():
                ends = f"{of_ranks[0]:.9g} on rank 0, {of_ranks[differing_rank]:.9g} on rank {differing_rank}"
                text = f"the weights differ between ranks: {name} is up to {ends}"
                if self.config.train.deterministic is True:
                    raise TrainingError(text, where=self.where, hint=_ON_ALL_RANKS)
                log.warning("%s; %s", text, _ON_ALL_RANKS)
                return

    def _fail(self, problem: str, state: State, good_step: int, batches: bool = False) -> NoReturn:
        """Raise TrainingError with the first layer that is not finite, what to try, and the step to continue from.

        ``batches``: single batches may be the cause. Collective.
        """
        peaks, config = self._peaks_of_all_ranks(), self.config
        if bad := _not_finite(peaks):
            layer = f"first non-finite layer: {bad[0]} ({len(bad)} of {len(peaks)} tensors)"
        else:
            name = max(peaks, key=lambda key: peaks[key], default="none")
            layer = f"all weights are finite; the largest is in {name} ({peaks.get(name, 0.0):.3g})"
        epoch = state.epoch + state.in_epoch  # counted from 1, as in the log
        position = f"step {state.step}, epoch {epoch}, loss scale {self.precision.loss_scale():g}"
        raise TrainingError(
            f"{problem} ({position}); {layer}",
            where=self.where,
            hint=f"{_remedies(config, batches and not bad, good_step <= 0)}\n     {self._continuation(good_step)}",
        )

    def _continuation(self, step: int) -> str:
        """Return the command to continue with other settings from the checkpoint of ``step``, if there is one."""
        if step <= 0:
            return "there is no good checkpoint to continue from: start again with these settings"
        checkpoint = f"{self.where}/{layout.CHECKPOINTS}/{layout.step_name(step)}"
        return (
            f"to continue from step {step}, the last good one, with these settings, add name={self.config.name}-2 "
            f"{shlex.quote(f'checkpoint.resume={checkpoint}')}; the same command without changes would most likely "
            "fail again"
        )


def _remedies(config: Config, batches: bool, from_scratch: bool) -> str:
    """Return the settings to try. ``batches``: single batches may be the cause. ``from_scratch``: no checkpoint is left
    to continue from. A run that continues from one keeps its opt level, and its warm-up is over."""
    remedies = [f"lower optimizer.lr (now {config.optimizer.lr:g})"]
    if config.train.on_gradients:
        remedies.insert(0, f"look for NaN in what train.on_gradients={config.train.on_gradients} writes")
    if config.train.clip_norm is None:
        remedies.append("set train.clip_norm=1")
    schedule = config.schedule
    if from_scratch and not (schedule.warmup or schedule.name == "one_cycle"):
        remedies.append("set schedule.warmup=1")
    if from_scratch and config.precision.opt_level in ("O1", "O2", "O3"):
        remedies.append("use precision.opt_level=O4 (bfloat16)")
    if batches and config.train.on_nan == "stop":
        remedies.append("use train.on_nan=skip if individual batches cause it")
    return ", or ".join(remedies)


@torch.no_grad()
def _peaks_of_this_rank(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the largest absolute value of each dense floating-point tensor on this rank. The host waits for the
    device."""
    names, peaks = [], []
    for name, tensor in tensors:
        values = local(tensor.detach())
        values = torch.view_as_real(values) if values.is_complex() else values
        if not values.is_floating_point() or values.layout is not torch.strided:
            continue
        names.append(name)
        values = values.float() if values.dtype.itemsize == 1 else values  # float8 has no aminmax
        ends = torch.aminmax(values) if values.numel() else (values.new_zeros(()),) * 2  # a shard may be empty
        peaks.append(torch.stack(list(ends)).double().abs().max())
    return dict(zip(names, torch.stack(peaks).tolist() if peaks else [], strict=True))


def _not_finite(peaks: dict[str, float]) -> list[str]:
    return [name for name, peak in peaks.items() if not math.isfinite(peak)]
