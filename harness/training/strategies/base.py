"""The interface of a parallel strategy, which decides how ranks share the work of a step.

``parallel.strategy`` names it: NAME is ``harness/training/strategies/NAME.py``, and ``package.module`` a module of the
user's own. Either has a class ``Strategy``, a subclass of ``ParallelStrategy``. A built-in one imports torch only where
it is needed, because a launcher checks the configuration with ``conflicts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config import plugins
from harness.config.constraints import Conflict
from harness.config.schema import Config, ParallelSection
from harness.errors import ConfigError, plural

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from harness.data.rank_data import MicroBatch
    from harness.training.optimizer.precision import Precision
    from harness.training.reproducibility.logical_ranks import LogicalRanks


class ParallelStrategy:
    """What a process does alone, which a strategy overrides. ``harness.training.build`` calls ``check_world``, then
    ``prepare`` and, after the optimizer is built and amp has initialized both, ``wrap``. Then, for each micro-batch,
    the loop enters ``micro_batch`` and calls ``backward``, in which what ``wrap`` has built averages gradients.
    """

    one_process: ClassVar[bool] = False  # the strategy runs in one process only
    shards_weights: ClassVar[bool] = False
    """True if each of several processes holds a part of the weights, as DTensors. ``prepare`` then gets the model on
    the CPU, where only rank 0 needs its values, and moves it to the device. A forward pass, and reading a whole
    parameter, are collective. Such a strategy needs harness.apex, whose amp reads DTensors."""

    model: nn.Module  # what training calls
    module: nn.Module  # the bare model inside it
    exchanges: bool = False  # whether processes exchange gradients: ``wrap`` sets it, with ``summary``
    summary: str = "one process"  # what the ranks do, for the log
    sync_norms: tuple[Any, ...] = ()  # batch norms over the rows of all ranks
    own_norms: tuple[nn.Module, ...] = ()  # norms whose running statistics are of this rank's rows

    def __init__(self, section: ParallelSection, precision: Precision, ranks: LogicalRanks) -> None:
        """``ranks``: the logical ranks, of which this process computes some. ``world_size`` counts processes."""
        self.section, self.precision, self.ranks = section, precision, ranks
        self.device, self.world_size = ranks.runtime.device, ranks.runtime.world_size

    @classmethod
    def conflicts(cls, config: Config) -> Iterator[Conflict]:
        """Yield settings that cannot be combined with this strategy."""
        yield from ()

    @classmethod
    def check_world(cls, section: ParallelSection, world_size: int) -> None:
        """Raise ConfigError if the strategy does not support ``world_size`` processes."""
        if section.logical_ranks and world_size > section.logical_ranks:
            raise ConfigError(
                f"{plural(section.logical_ranks, 'logical rank')} cannot be computed by {world_size} processes",
                where="parallel.logical_ranks",
                hint=f"start at most {plural(section.logical_ranks, 'process')}",
            )
        if cls.one_process and world_size > 1:
            raise ConfigError(
                f"parallel.strategy={section.strategy} runs in one process, but {world_size} were started",
                where="parallel.strategy",
                hint="use parallel.strategy=ddp, or start one process",
            )

    @property
    def holds_shard(self) -> bool:
        """True if this process holds a part of the weights only."""
        return self.shards_weights and self.world_size > 1

    def prepare(self, model: nn.Module) -> nn.Module:
        """Make the changes that replace parameters or modules. Collective if the strategy ``shards_weights``."""
        return self.precision.synchronized(model) if self._syncs_norms else model

    def wrap(self, model: nn.Module) -> None:
        """Set ``model`` and ``module``, after amp, which changes the types of the weights."""
        from torch import nn

        self.model = self.module = model
        norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
        self.own_norms = tuple(norm for norm in norms if not hasattr(norm, "process_group"))  # that of SyncBatchNorm
        if self._syncs_norms:
            sync_norm_class = self.precision.parallel.SyncBatchNorm
            self.sync_norms = tuple(module for module in model.modules() if isinstance(module, sync_norm_class))

    @property
    def _syncs_norms(self) -> bool:
        return self.section.sync_batchnorm and self.world_size > 1

    def compile(self, mode: str | None) -> None:
        """Compile the wrapped model, whose parameters and their names stay."""
        from harness.training.model import compiled

        compiled.compile_whole(self.module, mode=mode)

    def backward(self, loss: Tensor, ends: bool) -> None:
        """Run the backward pass. ``ends``: whether this micro-batch is the last of its logical rank in this step, whose
        gradients are then complete; a strategy that adds up those of several logical ranks (ddp) needs it."""
        loss.backward()

    def switch_sync(self, on: bool) -> None:
        """Turn the averaging of gradients in backward passes on or off."""

    @contextmanager
    def micro_batch(self, micro: MicroBatch, last: bool) -> Iterator[None]:
        """Context for forward and ``backward`` of ``micro``, with the random streams and buffers of its logical rank.
        Gradients are averaged only in the ``last`` micro-batch of this process in a step."""
        self.ranks.activate(micro.rank)
        if not last and self.exchanges:
            self.switch_sync(False)
        try:
            with nullcontext() if micro.num_rows else self._norms_left_out():
                yield
        finally:
            if not last and self.exchanges:
                self.switch_sync(True)
        if last:
            self.ranks.activate(self.ranks.own.start)

    @contextmanager
    def _norms_left_out(self) -> Iterator[None]:
        """Context for a micro-batch that only keeps this rank in step: norms over all ranks leave it out (``idle``),
        and buffers of other norms are put back."""
        saved_buffers = [(buffer, buffer.clone()) for norm in self.own_norms for buffer in norm.buffers(recurse=False)]
        for norm in self.sync_norms:
            norm.idle = True
        try:
            yield
        finally:
            for norm in self.sync_norms:
                norm.idle = False
            for buffer, value in saved_buffers:
                buffer.copy_(value)

    def check_own_loop(self) -> None:
        """Raise TrainingError if the steps of a loop of the user's own have left out what the strategy needs."""

    def devices(self) -> list[torch.device]:
        return [self.device]

    @property
    def eval_model(self) -> nn.Module:
        """The model to call in evaluation: the bare one, so that no rank waits for another."""
        return self.module

    def describe(self) -> str:
        return f"{self.summary}, batch norm over all ranks" if self.sync_norms else self.summary


def strategy_class(section: ParallelSection) -> type[ParallelStrategy]:
    """Return the class that ``parallel.strategy`` names. Raises ConfigError."""
    strategy: type[ParallelStrategy] = plugins.find("strategy", section.strategy, "parallel.strategy")
    return strategy
