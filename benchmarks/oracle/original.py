"""Makes the ``apex`` of a checkout of NVIDIA's repository importable and able to run on this torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.oracle import fake_cuda


def check(checkout: Path) -> None:
    """Exit with a message unless ``checkout`` holds an Apex with amp."""
    if not (checkout / "apex" / "amp" / "frontend.py").exists():
        sys.exit(
            f"{checkout} holds no apex/amp: expected a checkout of NVIDIA/apex at a tag up to 25.05. Type:\n"
            "    make oracle APEX_CHECKOUT=DIR"
        )


def commit(checkout: Path) -> str:
    """The commit of ``checkout``, or "unknown"."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or "unknown"


def install(checkout: Path, device: str, *, kernels: bool = False) -> None:
    """Make ``import apex`` find the one in ``checkout``, for the rest of this process.

    ``kernels``: the original's compiled kernels, which need CUDA, are those of ``harness.apex.amp_C`` (without them it
    uses its Python fallback, and its fused optimizers refuse to start).
    """
    if kernels:
        sys.modules["amp_C"] = importlib.import_module("harness.apex.amp_C")
    sys.path.insert(0, str(checkout))
    if device == "cpu":
        fake_cuda.install()
    importlib.import_module("apex.amp.utils").cached_cast = cast_once
    importlib.import_module("apex.optimizers")
    importlib.import_module("apex.parallel.LARC")


def cast_once(cast: Callable[[Any], Any], value: Any, cache: dict[Any, Any]) -> Any:
    """O1's cache of cast weights: each is cast once per iteration, and again when a gradient is needed.

    In place of the original's, which fails on torch 1.10 and later when a weight is used twice: it looks for the weight
    in a place of the autograd graph that no longer exists.
    """
    if isinstance(value, list | tuple):
        return type(value)([cast_once(cast, each, cache) for each in value])
    hit = cache.get(value)
    if hit is None or (torch.is_grad_enabled() and hit.requires_grad != value.requires_grad):
        hit = cache[value] = cast(value)
    return hit


def without_cache() -> None:
    """Let O1 cast a weight again at each use, if this process runs the original."""
    utils = sys.modules.get("apex.amp.utils")
    if utils is not None and hasattr(utils, "cached_cast"):
        utils.cached_cast = lambda cast, value, cache: cast_once(cast, value, {})  # type: ignore[attr-defined]
