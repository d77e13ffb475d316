"""Operations without a deterministic implementation on CUDA: a search for them, and the error of torch.

    with Audit() as audit:
        loss_of(model).backward()
    audit.found  # {"AdaptiveAvgPool2d"}

The search runs on the CPU. It sees the ATen operations of a forward and a backward pass, which have the same names on
CUDA; kernels that a library chooses there, such as cuDNN's, are not visible.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.utils.deterministic
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.schema import PrecisionSection
from harness.distributed import stack
from harness.errors import ConfigError
from harness.runs import layout
from harness.training.reproducibility.nondeterministic import OPERATIONS

log = logging.getLogger("harness")

Level = bool | Literal["warn"]

_RECURRENT = "dropout between the layers of {}"  # of cuDNN, which keeps its random state to itself

_RAISED = "does not have a deterministic implementation"
_CUBLAS = "not deterministic because it uses CuBLAS"


class OutOfTime(Exception):
    """What runs in an ``Audit`` has reached its time limit."""


class Audit(TorchDispatchMode):
    """Context that collects the operations of the list that are called in it, in ``found``, and all in ``seen``. After
    ``until`` (time.monotonic), the next operation raises OutOfTime."""

    def __init__(self, until: float = math.inf) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.seen: set[str] = set()
        self._until = until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._until:
            raise OutOfTime
        schema = func._schema
        name = schema.name.partition("::")[2]
        self.seen.add(name)
        for operation_name, operation in OPERATIONS.items():
            if {name, f"{name}.{schema.overload_name}"} & set(operation.aten.split()):
                arguments = dict(zip([argument.name for argument in schema.arguments], args, strict=False))
                if operation.when(arguments | (kwargs or {})):
                    self.found.add(operation_name)
        return func(*args, **(kwargs or {}))


def require(level: Level) -> None:
    """Make torch refuse (True), warn of (warn) or allow (False) algorithms whose result changes from run to run. Call
    it before CUDA starts."""
    if level:
        # cuBLAS reads this at its first use. Without it, torch refuses matrix products in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(bool(level), warn_only=level == "warn")
    torch.backends.cudnn.benchmark = not level
    # In deterministic mode torch fills each new tensor with NaN before its kernel writes it, to show code that reads it
    # unwritten: a kernel for each result, hundreds in a step of a ResNet-18. No other bits change.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def describe(level: Level, operations: set[str] | None = None) -> str:
    """Return the strictness ``level`` in words, with the ``operations`` of the model that it is about, if they are
    known."""
    words = {
        True: "only deterministic algorithms; others raise an error",
        "warn": "deterministic algorithms where torch has them; "
        f"{layout.LOGS}/rank-N.log has a warning for each operation without one",
        False: "any algorithm: on a GPU, identical runs may differ in their last bits",
    }[level]
    return f"{words}; no deterministic algorithm on CUDA for: {', '.join(sorted(operations))}" if operations else words


def unrestorable(model: nn.Module) -> set[str]:
    """Return what a resume on CUDA cannot restore: the dropout between the layers of a recurrent module. cuDNN draws it
    from a state of its own, which torch can neither read nor set. Other dropout draws from torch's generator."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    return {_RECURRENT.format(type(layer).__name__) for layer in layers if layer.num_layers > 1 and layer.dropout > 0}


def require_restorable(model: nn.Module, device: torch.device, level: Level) -> None:
    """Raise ConfigError, or warn at the level "warn", if a resume of ``model`` on ``device`` could not be exact."""
    if device.type != "cuda" or not level or not torch.backends.cudnn.enabled or not (modules := unrestorable(model)):
        return
    names = ", ".join(sorted(modules))
    if level == "warn":
        log.warning("a resume will not be exact: on CUDA, it cannot restore %s", names)
        return
    raise ConfigError(
        f"on CUDA, a resume cannot restore {names}, and train.deterministic=true requires an exact one",
        where="train.deterministic",
        hint="stack modules of one layer with nn.Dropout between them, as harness/training/model/built_in/char_gru.py "
        "does; or set its dropout to 0; or use train.deterministic=warn",
    )


def warn_of_threads(before: int, device: torch.device) -> int:
    """Return torch's number of threads, by which sums on a CPU are divided. Warn if code of the user has changed it."""
    now = torch.get_num_threads()
    if now != before and device.type == "cpu":
        log.warning(
            "the number of torch's threads has changed from %d to %d: on a CPU, results depend on it; remove the "
            "call of torch.set_num_threads, and set launch.threads or OMP_NUM_THREADS",
            before, now,
        )  # fmt: skip
    return now


def refused(operations: set[str]) -> ConfigError:
    """Return the error for a model that calls ``operations`` on CUDA under ``train.deterministic: true``."""
    names = ", ".join(sorted(operations))
    return _error(f"on CUDA, torch has no deterministic implementation of {names}", operations)


def explained(error: BaseException) -> ConfigError | None:
    """Return the error for a ``RuntimeError`` by which torch refuses an operation that is not deterministic, else
    None."""
    text = str(error)
    if isinstance(error, RuntimeError) and _CUBLAS in text:
        return ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')!r} makes matrix products on CUDA "
            "differ from run to run, which train.deterministic=true does not allow",
            where="train.deterministic", hint="unset it, or export CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )  # fmt: skip
    if not isinstance(error, RuntimeError) or _RAISED not in text:
        return None
    name = text.partition(f" {_RAISED}")[0]  # of a kernel, such as max_unpooling2d_forward_out
    kernel = name.strip("_").replace("unpooling", "unpool")
    operations = {
        operation_name
        for operation_name, operation in OPERATIONS.items()
        if any(kernel.startswith(aten.partition(".")[0].strip("_")) for aten in operation.aten.split())
    }
    location = stack.raised_at(error)
    where = f" (in {location})" if location else ""
    return _error(f"torch has no deterministic implementation of {name}{where}", operations)


def _error(problem: str, operations: set[str]) -> ConfigError:
    instead = [f"{name}: {OPERATIONS[name].instead}" for name in sorted(operations) if OPERATIONS[name].instead]
    return ConfigError(
        f"{problem}, and train.deterministic=true requires one for an exact resume",
        where="train.deterministic",
        hint="use train.deterministic=warn (a resume may then differ in the last bits) or false"
        + (f"; or use another operation ({'; '.join(instead)})" if instead else ""),
    )


def kernels(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, besides the code and the numbers: it must not change within a
    run."""
    description: dict[str, Any] = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        description["device"] = torch.cuda.get_device_name(device)
        description["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        matmul, conv, rnn = (backend.fp32_precision == "tf32" for backend in tf32_places())
        description["tf32"] = [matmul, conv] if conv == rnn else [matmul, conv, rnn]
    else:
        description["processor"] = processor()
        description["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return description


def set_tf32(section: PrecisionSection) -> None:
    """Allow or forbid TF32 in this process, if ``section`` says so."""
    if section.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = section.tf32
        torch.backends.cudnn.allow_tf32 = section.tf32


def tf32_places() -> list[Any]:
    """Return where torch keeps ``fp32_precision`` of CUDA. Once one is set, reading ``allow_tf32`` may fail."""
    cudnn: Any = torch.backends.cudnn  # of which mypy knows less
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]


def processor() -> str:
    """Return the model of the CPU, and the vector instructions that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        model = next(models, platform.machine())
    except OSError:
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
