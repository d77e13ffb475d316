"""Runs all cells with both implementations and writes ``benchmarks/results/oracle.md``.

    python -m benchmarks.oracle CHECKOUT [--only PATTERN] [--workers 2] [--device cuda]

Exits with 1 if a cell differs that ``deliberate`` does not list, or is equal although listed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks import machine
from benchmarks.oracle import deliberate, original, verdict
from benchmarks.oracle.cells import CELLS

ROOT = Path(__file__).parents[2]


@dataclass
class Row:
    """A cell: what differs, and why that is meant to be; both empty for a cell that is bitwise equal."""

    name: str
    family: str
    difference: str
    reason: str

    @property
    def wrong(self) -> bool:
        return bool(self.difference) != bool(self.reason)


def row(name: str, difference: str, device: str) -> Row:
    """The row of the cell ``name``. A cell that differs on purpose on the CPU may be equal on a GPU."""
    reason = deliberate.reason(name) if difference or device == "cpu" else ""
    return Row(name, CELLS[name].family, difference, reason)


def compare(checkout: Path, names: Sequence[str], workers: int = 2, device: str = "cpu") -> list[Row]:
    """Run the cells ``names`` with both implementations, each in ``workers`` / 2 processes at a time."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, side) for side in ("original", "ours")]
        running = []
        for part in range(max(1, workers // 2)):
            listed = Path(temporary, f"names{part}")
            listed.write_text("\n".join(names[part :: max(1, workers // 2)]))
            for folder, arguments in zip(folders, ([str(checkout.resolve())], []), strict=True):
                folder.mkdir(exist_ok=True)
                running.append(
                    _start(Path(temporary, f"{folder.name}{part}.log"), [str(folder), str(listed), device, *arguments])
                )
        try:
            for log, process in running:
                if process.wait():
                    print(f"{' '.join(process.args)} failed:\n{log.read_text()[-2000:]}", file=sys.stderr)
        finally:
            for _, process in running:
                process.kill()
        return [row(name, verdict.difference(name, *folders), device) for name in names]


def _start(log: Path, arguments: list[str]) -> tuple[Path, subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.oracle.side", *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with log.open("w") as output:
        return log, subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)


def page(rows: Sequence[Row], commit: str, device: str = "cpu") -> str:
    """The table of families, the deliberate differences, and what is wrong, as Markdown."""
    equal = sum(not row.difference for row in rows)
    single = sum(row.family in ("operation", "spelling") for row in rows)
    families = []
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        families.append([family, str(sum(not row.difference for row in own)), str(len(own))])
    command = "make oracle APEX_CHECKOUT=DIR" if device == "cpu" else "python -m benchmarks.oracle DIR --device cuda"
    kind, disguise = ("GPU", "") if device == "cuda" else ("CPU", ", to which CPU tensors look like CUDA tensors")
    listed = [[row.name, row.reason, row.difference.replace("|", "\\|")] for row in rows if row.reason]
    wrong = [[row.name, row.difference or "is listed as different, but equal"] for row in rows if row.wrong]
    return "\n\n".join(
        [
            f"**{equal} of {len(rows)} cells are bitwise equal**; {len(rows) - equal - len(wrong)} differ on purpose. "
            f"{single} cells test a single operation. "
            f"NVIDIA/apex at {commit}, {datetime.date.today()}, `{command}`.",
            f"Each cell is a small script, run twice on the {kind} with the same torch kernels: once with the original "
            f"`apex`{disguise}, and once with `harness.apex`. The comparison covers losses, weights, saved weights, "
            "masters, gradients, optimizer state and amp state. The original "
            "runs without its compiled extensions, and its cast cache is adapted to torch 1.10 and later. In the "
            "cells of fused optimizers and unscaling kernels, `harness.apex.amp_C` replaces its CUDA kernels.",
            machine.table(["cells", "bitwise equal", "of"], families),
            "## Deliberate differences",
            "[Differences](../../docs/apex_differences.md#compared-with-nvidias-apex) explains the reasons.",
            machine.table(["cell", "reason", "what differs"], listed),
            *(["## To be explained", machine.table(["cell", "what differs"], wrong)] if wrong else []),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="*", help="shell pattern of names of cells; nothing is written then")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    original.check(arguments.checkout)
    names, device = [name for name in CELLS if fnmatchcase(name, arguments.only)], arguments.device
    rows = compare(arguments.checkout, names, arguments.workers, device)
    if arguments.only == "*":
        commit = original.commit(arguments.checkout)
        name = "oracle" if device == "cpu" else "oracle_cuda"
        machine.write(name, "harness.apex compared with NVIDIA's Apex, bit for bit", page(rows, commit, device))
    else:
        print("\n".join(f"{row.name}: {row.difference or 'bitwise equal'}" for row in rows))
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()
