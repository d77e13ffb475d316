"""Measures ``harness report`` on many long runs: time, memory and page size.

python -m benchmarks.report [--runs 1000] [--records 10000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.synthetic_runs import Fake, write_run

ROOT = Path(__file__).resolve().parents[1]

# The report runs in a fresh process and prints its own peak memory: getrusage of a child includes its parent's.
_REPORT = r"""
import re, sys
from pathlib import Path
from harness.tools.report import page
page.write([Path(sys.argv[1])], Path(sys.argv[2]))
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
"""


def write_runs(folder: Path, num_runs: int, num_records: int) -> None:
    """Write runs of ``num_records`` log lines with 20 learning rates, 5 batches, 2 world sizes and several seeds."""
    epochs = 20
    for number in range(num_runs):
        recipe, seed = number % 200, number // 200
        fake = Fake(
            name=f"run{number:04d}",
            lr=0.001 * 1.3 ** (recipe % 20),
            batch=64 * 2 ** (recipe // 20 % 5),
            world=1 + recipe // 100,
            seed=seed,
            epochs=epochs,
            rows=64 * 2 ** (recipe // 20 % 5) * (num_records // epochs - 2),
            log_every=1,
            final=0.95 - 0.01 * abs(recipe % 20 - 8),
            skips=(17,) if number % 7 == 0 else (),
        )
        write_run(folder / fake.name, fake)


def measure(folder: Path, out: Path) -> list[str]:
    """[wall time, processor time, peak memory, size] of a report on ``folder``."""
    began, before = time.perf_counter(), os.times()
    command = [sys.executable, "-c", _REPORT, str(folder), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    took_s, after = time.perf_counter() - began, os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    peak = int(done.stdout.split()[-1]) / 1024
    return [f"{took_s:.1f} s", f"{used_s:.1f} s", f"{peak:.0f} MiB", f"{out.stat().st_size / 1e6:.2f} MB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--records", type=int, default=10_000, help="lines of each run's metrics.jsonl")
    parser.add_argument("--folder", type=Path, help="existing runs, or where to write and keep them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name) / "runs"
        if not folder.exists():
            write_runs(folder, arguments.runs, arguments.records)
        records = sorted(folder.glob("*/metrics.jsonl"))
        size = sum(path.stat().st_size for path in records) / 1e9
        lines = records[0].read_bytes().count(b"\n")
        load = os.getloadavg()[0]
        row = measure(folder, Path(name) / "report.html")
    text = f"""`harness report` over {len(records):,} synthetic runs of {lines:,} records each, {size:.1f} GB of
metrics.jsonl in the page cache; a fresh process, measured from its start. Every record is read. Curves are
downsampled, keeping the minimum and maximum of every interval, and drawn only for the best runs; the table lists all.
The load average before the measurement was {load:.1f} on {os.cpu_count()} cores. Under load, compare processor times.

{machine.table(["time", "processor time", "peak memory", "page"], [row])}"""
    machine.write("report", "Reports of many runs", text)


if __name__ == "__main__":
    main()
