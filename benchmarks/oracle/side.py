"""Runs cells with one of the two implementations, each in a process of its own that is forked after the imports.

    python -m benchmarks.oracle.side FOLDER NAMES DEVICE [CHECKOUT]

``FOLDER`` receives the result of each cell, ``NAMES`` is a file with one name of a cell per line. Without ``CHECKOUT``
``apex`` is ``harness.apex``. On ``DEVICE`` "cpu" the original sees CPU tensors as CUDA tensors; on "cuda" all tensors
of a cell are on the GPU, its two ranks included.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch

from benchmarks.oracle import original
from benchmarks.oracle.cells import CELLS

SECONDS = 100  # for one cell; the slowest takes about five on an idle core


def main(folder: str, names: str, device: str, checkout: str = "") -> None:
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # every optimizer imports it; once here instead of once per cell
    if not checkout:
        import harness.apex

        harness.apex.install()
    for kernels in (False, True):
        chosen = [name for name in Path(names).read_text().splitlines() if CELLS[name].kernels is kernels]
        if chosen and checkout:
            # A child, because what torch and apex look like afterwards cannot be undone.
            _in_child(
                lambda chosen=chosen, kernels=kernels: _original(Path(checkout), kernels, folder, device, chosen), 0
            )
        elif chosen:
            _run(folder, device, chosen)


def _original(checkout: Path, kernels: bool, folder: str, device: str, names: list[str]) -> None:
    original.install(checkout, device, kernels=kernels)
    _run(folder, device, names)


def _run(folder: str, device: str, names: list[str]) -> None:
    for name in names:
        file = path_of(folder, name)
        code = _in_child(lambda name=name, file=file: _cell(name, file, device), SECONDS)
        if not file.exists():
            torch.save({"error": f"ended with status {code}"}, file)


def path_of(folder: str | Path, name: str) -> Path:
    """The file with the result of the cell ``name``."""
    return Path(folder) / (name.replace("/", "_").replace(" ", "_") + ".pt")


def _cell(name: str, file: Path, device: str) -> None:
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device(device)
    torch.manual_seed(0)
    try:
        result = CELLS[name].run()
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    torch.save(result, file)


def _in_child(work, seconds: int) -> int:  # type: ignore[no-untyped-def]
    """Call ``work`` in a forked process and return its exit status; it is killed after ``seconds`` if not 0."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(seconds)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
