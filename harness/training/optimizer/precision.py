"""Mixed precision with one interface over two implementations: an installed Apex with amp, and harness.apex.

The rest of the harness uses only ``Precision``. Its implementation is chosen here, logged, and saved in checkpoints.
A step waits for the device as little as its level and its strategy allow (benchmarks/results/waits.md has the numbers):

    level                           after an overflow, the update is skipped by  the host waits in a step
    O0, O3 to O5                    nobody: by default, their scale is constant  never
    O1, not fsdp, fused optimizer   the device, within the update                never; ``counting`` does, later
    O1 otherwise; O2                amp, on the host                             once, at the end of the backward pass
    each with train.on_nan: skip    ``loop.update``, too, after any other NaN    once more, in ``finite_everywhere``; at
                                    or infinity                                  O1, it waits for amp, too
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.config.schema import LarcSection, PrecisionSection
from harness.errors import ConfigError


class Amp(Protocol):
    """What training uses of an ``amp`` module."""

    _amp_state: Any
    initialize: Callable[..., Any]

    def scale_loss(
        self, loss: Tensor, optimizers: torch.optim.Optimizer, /, *, delay_unscale: bool
    ) -> AbstractContextManager[Tensor]: ...
    def master_params(self, optimizer: torch.optim.Optimizer, /) -> Iterator[Tensor]: ...
    def state_dict(self) -> Mapping[str, Mapping[str, float]]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class Parallel(Protocol):
    """What training uses of a ``parallel`` module."""

    LARC: ModuleType
    DistributedDataParallel: Any
    SyncBatchNorm: Any

    def convert_syncbn_model(self, module: nn.Module, /) -> nn.Module: ...


@dataclass(frozen=True)
class Precision:
    """One amp implementation at one opt level. ``backend`` is its name and version."""

    amp: Amp
    parallel: Parallel
    backend: str
    options: dict[str, Any]

    def initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        try:
            initialized: tuple[nn.Module, torch.optim.Optimizer] = self.amp.initialize(model, optimizer, **self.options)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # of the device, not of the settings
            raise
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"amp rejects these settings: {error}", where="precision") from error
        return initialized

    def larc(self, optimizer: torch.optim.Optimizer, section: LarcSection) -> torch.optim.Optimizer:
        """Return ``optimizer`` with layer-wise adaptive rates. Call before ``initialize``, which patches its
        ``step``."""
        wrapped: torch.optim.Optimizer = self.parallel.LARC.LARC(optimizer, **section.model_dump())
        return wrapped

    def synchronized(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with synchronized batch norms. Call it before the optimizer is built, since it copies
        weights."""
        return self.parallel.convert_syncbn_model(model)

    def scale_loss(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool
    ) -> AbstractContextManager[Tensor]:
        return self.amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale)

    def master_params(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Return the parameters that the optimizer updates (masters, if there are any), in the order of its groups."""
        return self.amp.master_params(optimizer)

    def will_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the next ``optimizer.step()`` will be skipped because of an overflow. The same on all ranks,
        whose averaged gradients are equal; of shards of gradients, torch reduces it as amp unscales them. In
        harness.apex, ``already_patched`` waits for the device if only that knows."""
        # A private attribute of Apex and of harness.apex, which have no public one that is set before the step.
        stash = getattr(optimizer, "_amp_stash", None)
        return bool(getattr(stash, "already_patched", False))

    def skip_flag(self, optimizer: torch.optim.Optimizer) -> bool | Tensor:
        """Return ``will_skip``, or, where only the device knows it, the flag by which it skips the step: not 0 after an
        overflow. Never waits."""
        flag: Tensor | None = getattr(getattr(optimizer, "_amp_stash", None), "flag", None)
        return self.will_skip(optimizer) if flag is None else flag

    def next_scale(self) -> float | Tensor:
        """Return ``loss_scale``, or, where only the device knows it, a scalar there."""
        factor = getattr(self._scaler, "factor", None)
        return factor if isinstance(factor, Tensor) else self.loss_scale()

    def loss_scale(self) -> float:
        return float(self._scaler.loss_scale()) if self._scaler else 1.0

    def can_lower_scale(self) -> bool:
        """Return True if the loss scale is dynamic and above its minimum, which is 1 unless min_loss_scale is set."""
        dynamic = bool(self._scaler and self._scaler.dynamic)
        return dynamic and self.loss_scale() > (self.options.get("min_loss_scale") or 1.0)

    @property
    def _scaler(self) -> Any:
        """The scaler of the loss, of a private type of each amp, or None while amp is off."""
        return next(iter(getattr(self.amp._amp_state, "loss_scalers", None) or []), None)

    def state_dict(self) -> dict[str, Any]:
        return {name: dict(scaler) for name, scaler in self.amp.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


def choose(section: PrecisionSection, device: torch.device, ours: bool = False) -> Precision:
    """Return the implementation that ``section`` selects; ``auto``: an installed Apex on CUDA, else harness.apex.

    ``ours``: another setting needs harness.apex (``Config.needs_our_amp``). Raises ConfigError.
    """
    if section.backend == "harness" or (section.backend == "auto" and (ours or device.type == "cpu")):
        return _ours(section)
    try:
        installed = _installed(section)
    except ImportError as error:
        if section.backend == "auto":
            return _ours(section)
        raise ConfigError(
            f"precision.backend=apex, but {error}",
            where="precision.backend",
            hint="use precision.backend=harness, or install an NVIDIA Apex that has amp (25.05 or older)",
        ) from error
    if section.opt_level in ("O4", "O5") and not hasattr(installed.amp, "bfloat16_function"):
        raise ConfigError(
            f"the installed Apex has no level {section.opt_level} (ROCm's Apex has it)",
            where="precision.opt_level",
            hint="use precision.backend=harness",
        )
    return installed


def _installed(section: PrecisionSection) -> Precision:
    """Return the implementation of an installed Apex. Raises ImportError, with the reason, if it has no amp."""
    try:
        amp: Any = importlib.import_module("apex.amp")
        parallel: Any = importlib.import_module("apex.parallel")
    except Exception as error:
        no_amp = "the installed apex has no amp (PyPI's apex is another package, and NVIDIA removed amp after 25.05)"
        reasons = {"apex": "no Apex is installed", "apex.amp": no_amp, "apex.parallel": no_amp}
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        raise ImportError(reasons.get(missing, f"the installed apex cannot be imported: {error}")) from error
    if not all(hasattr(amp, name) for name in ("initialize", "scale_loss", "master_params", "state_dict")):
        raise ImportError("the installed apex.amp is not NVIDIA's")
    if amp.__name__.startswith("harness."):
        raise ImportError("apex.amp is harness.apex itself (harness.apex.install() was called)")
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return Precision(amp, parallel, f"apex {version}", _options(section))


def _ours(section: PrecisionSection) -> Precision:
    from harness.apex import amp, parallel

    return Precision(amp, parallel, "harness.apex", _options(section))


def _options(section: PrecisionSection) -> dict[str, Any]:
    """Return the arguments of ``amp.initialize``. Settings that are null are left to the opt level."""
    chosen = section.model_dump(exclude={"backend", "tf32"}, exclude_none=True)
    return {**chosen, "verbosity": 0}
