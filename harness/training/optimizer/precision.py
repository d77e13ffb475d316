"""Mixed precision with one interface over two implementations: an installed Apex with amp, and harness.apex.

The rest of the harness uses only ``Precision``. Its implementation is chosen here, logged, and saved in checkpoints.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
        whose averaged gradients are equal; of shards of gradients, torch reduces it as amp unscales them."""
        # A private attribute of Apex and of harness.apex, which have no public one that is set before the step.
        stash = getattr(optimizer, "_amp_stash", None)
        return bool(getattr(stash, "already_patched", False))

    def skip_flag(self, optimizer: torch.optim.Optimizer) -> bool | Tensor:
        """Return ``will_skip``, or, where only the device knows it, the flag by which it skips the step: not 0 after an
        overflow."""
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
    apex, why_not = installed_apex()
    if apex is None:
        if section.backend == "auto":
            return _ours(section)
        raise ConfigError(
            f"precision.backend=apex, but {why_not}",
            where="precision.backend",
            hint="use precision.backend=harness, or install an NVIDIA Apex that has amp (25.05 or older)",
        )
    if section.opt_level in ("O4", "O5") and not hasattr(apex[0], "bfloat16_function"):
        raise ConfigError(
            f"the installed Apex has no level {section.opt_level} (ROCm's Apex has it)",
            where="precision.opt_level",
            hint="use precision.backend=harness",
        )
    return Precision(*apex, _options(section))


@contextmanager
def half_on_cpu(section: PrecisionSection, device: torch.device) -> Iterator[None]:
    """Context in which a CPU computes products of float16 and bfloat16 tensors in float32, if ``section`` uses them and
    it has no arithmetic for them. Without it, O1 trains 15 to 60 times as slowly as O0 there, and O4 3 to 10 times."""
    library = None
    if _emulated(section, device):
        from harness.apex.on_cpu import half_kernels

        library = half_kernels.register(half_kernels.slow_dtypes())
    try:
        yield
    finally:
        if library is not None:
            library._destroy()  # torch has no public way to deregister kernels


def _emulated(section: PrecisionSection, device: torch.device) -> str:
    """Return the dtype of ``section`` for which ``device`` has no arithmetic; empty if there is none. Its products are
    computed in float32, on a GPU by CUDA."""
    if section.opt_level == "O0":
        return ""
    half = torch.bfloat16 if section.opt_level in ("O4", "O5") else torch.float16
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True
        slow = set() if native else {torch.bfloat16}
    else:
        from harness.apex.on_cpu import half_kernels

        slow = half_kernels.slow_dtypes()
    return str(half).removeprefix("torch.") if half in slow else ""


def describe(section: PrecisionSection, device: torch.device, backend: str) -> str:
    """Return the level, the implementation, and what a device does about a dtype that it lacks, for the log."""
    text = f"{section.opt_level} by {backend}"
    if half := _emulated(section, device):
        name = "CPU" if device.type == "cpu" else "GPU"
        text += f"; on this {name}, matrix products are computed in float32 and rounded to {half}"
    return text


def warning(section: PrecisionSection, device: torch.device) -> str:
    """Return a warning if ``device`` has no arithmetic for the dtype of ``section``; empty otherwise."""
    half = _emulated(section, device)
    if not half:
        return ""
    name, other = (torch.cuda.get_device_name(device), "O1") if device.type == "cuda" else ("this CPU", "O0")
    default = "" if "opt_level" in section.model_fields_set else ", the default"
    return (
        f"{name} has no arithmetic for {half}; at {section.opt_level}{default}, its products are computed in float32 "
        f"and rounded; use precision.opt_level={other}"
    )


def set_tf32(section: PrecisionSection) -> None:
    """Allow or forbid TF32 in this process, if ``section`` says so."""
    if section.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = section.tf32
        torch.backends.cudnn.allow_tf32 = section.tf32


def installed_apex() -> tuple[tuple[Amp, Parallel, str] | None, str]:
    """Return ((amp, parallel, name), "") of an installed Apex with both, else (None, the reason)."""
    try:
        amp: Any = importlib.import_module("apex.amp")
        parallel: Any = importlib.import_module("apex.parallel")
    except ModuleNotFoundError as error:
        if error.name == "apex":
            return None, "no Apex is installed"
        return (
            None,
            "the installed apex has no amp (PyPI's apex is another package, and NVIDIA removed amp after 25.05)",
        )
    except Exception as error:
        return None, f"the installed apex cannot be imported: {error}"
    if not all(hasattr(amp, name) for name in ("initialize", "scale_loss", "master_params", "state_dict")):
        return None, "the installed apex.amp is not NVIDIA's"
    if amp.__name__.startswith("harness."):
        return None, "apex.amp is harness.apex itself (harness.apex.install() was called)"
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return (amp, parallel, f"apex {version}"), ""


def _ours(section: PrecisionSection) -> Precision:
    from harness.apex import amp, parallel

    return Precision(amp, parallel, "harness.apex", _options(section))


def _options(section: PrecisionSection) -> dict[str, Any]:
    """Return the arguments of ``amp.initialize``. Settings that are null are left to the opt level."""
    chosen = section.model_dump(exclude={"backend", "tf32"}, exclude_none=True)
    return {**chosen, "verbosity": 0}
