"""Measures how long ranks take to open their shards of an annotation CSV, and how much memory they need.

    python -m benchmarks.open_shard --rows 10000000 --world 8
    python -m benchmarks.open_shard --rows 30000000 --world 8 --readers first,warm

Each reader runs in ``--world`` processes at once. After importing, the processes wait for each other, then open the
file and read every label and caption of their shard as whole columns. The slowest rank is reported. Readers:

    pandas  pandas.read_csv and a slice of the frame, on every rank: the original recipe
    first   open_table with an empty cache: one rank converts, the others wait
    warm    open_table of a file that is already converted

"other load" is the share of the machine that other processes used meanwhile; if it is large, ignore the times, and
compare the processor time of all ranks instead.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import multiprocessing
import shutil
import statistics
import tempfile
import time
from importlib.metadata import version
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from benchmarks import machine

READERS = ("pandas", "first", "warm")
COLUMNS = ["path", "label", "x", "y", "w", "h", "caption"]


def write_csv(path: Path, num_rows: int, num_labels: int = 1000, seed: int = 0) -> None:
    """Write rows sorted by label, with the row number in ``path``. 35 % are quoted, 5 % have line breaks."""
    rng = np.random.default_rng(seed)
    captions = _captions(rng, 20_000)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in range(num_rows):
            if row % 100_000 == 0:  # drawing them one at a time would be slow
                drawn = rng.integers(0, (640, 640, 640, 640, len(captions)), (100_000, 5)).tolist()
            *box, caption = drawn[row % 100_000]
            label = row * num_labels // num_rows
            writer.writerow([f"images/part_{label}_{row:09}.jpg", label, *box, captions[caption]])


def _captions(rng: np.random.Generator, count: int) -> list[str]:
    words = "a,the,small,large,dog,cat,street,photo,of,in,front,on,table,red,blue,wooden,near,standing"
    pool = words.split(",")
    captions = []
    for kind in rng.random(count):
        chosen = [pool[i] for i in rng.integers(0, len(pool), rng.integers(8, 19))]
        if kind < 0.05:
            chosen[4] = f"\n{chosen[4]}"
        elif kind < 0.35:
            chosen[4] = f', "{chosen[4]}"'
        captions.append(" ".join(chosen))
    return captions


def read_pandas(path: Path, rank: int, world: int, cache: Path) -> tuple[Any, tuple[int, int, int]]:
    """(objects to keep alive, (rows, sum of labels, sum of caption lengths) of the shard)."""
    import pandas as pd

    frame = pd.read_csv(path)
    start, stop = int(rank * len(frame) / world), int((rank + 1) * len(frame) / world)
    shard = frame.iloc[start:stop]
    seen = len(shard), int(shard["label"].to_numpy().sum()), int(shard["caption"].str.len().sum())
    return (frame, shard), seen


def read_table(path: Path, rank: int, world: int, cache: Path) -> tuple[Any, tuple[int, int, int]]:
    """The same with open_table."""
    from harness.data.table.table import open_table

    table = open_table(path, text=["path", "caption"], label="label", cache_dir=cache)
    start, stop = int(rank * table.num_rows / world), int((rank + 1) * table.num_rows / world)
    labels = np.array(table.vocabulary)[table.labels(np.arange(start, stop))]
    captions = table.slice("caption", start, stop)
    return (table, labels), (stop - start, int(labels.sum()), pc.sum(pc.utf8_length(captions)).as_py())


def _rank(reader: str, path: Path, rank: int, world: int, cache: Path, barrier: Barrier, results: Any) -> None:
    # Import before the clock starts, as a training script does. The table does not need pandas.
    importlib.import_module("pandas" if reader == "pandas" else "harness.data.table.table")

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    barrier.wait()
    start, busy = time.perf_counter(), time.process_time()
    kept, seen = (read_pandas if reader == "pandas" else read_table)(path, rank, world, cache)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    barrier.wait()
    results.put((rank, seconds, seen, _memory_mb("status", "VmHWM"), _memory_mb("smaps_rollup", "Pss"), busy))
    barrier.wait()  # keep all memory until every rank has measured
    del kept


def _memory_mb(file: str, field: str) -> float:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def measure(reader: str, path: Path, world: int, cache: Path) -> dict[str, Any]:
    """Run one reader on all ranks."""
    if reader == "first":
        shutil.rmtree(cache, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(world), context.Queue()
    arguments = (world, cache, barrier, results)
    ranks = [context.Process(target=_rank, args=(reader, path, rank, *arguments)) for rank in range(world)]
    load = machine.OtherLoad()
    for process in ranks:
        process.start()
    found = [results.get(timeout=1200) for _ in ranks]
    for process in ranks:
        process.join()
    return {
        "others": load.share(),
        "seconds": max(r[1] for r in found),
        "seen": tuple(sum(r[2][i] for r in found) for i in range(3)),
        "peak_mb": max(r[3] for r in found),
        "pss_mb": sum(r[4] for r in found),
        "cpu_s": sum(r[5] for r in found),
    }


def report(runs: dict[str, list[dict[str, Any]]], csv_bytes: int, num_rows: int, world: int) -> str:
    """A Markdown table with ratios to pandas, paired by repetition."""
    header = ["reader", "slowest rank, s: median (range)", "speed-up", "processor time of all ranks, s",
              "speed-up in processor time", "peak RSS of a rank, MB", "PSS of all ranks, MB", "memory ratio",
              "other load"]  # fmt: skip
    rows = []
    for reader, results in runs.items():
        seconds = [r["seconds"] for r in results]
        ratios = {"seconds": "", "cpu_s": "", "pss_mb": ""}
        if "pandas" in runs and reader != "pandas":
            pairs = list(zip(runs["pandas"], results, strict=True))
            ratios = {key: f"{statistics.median(p[key] / r[key] for p, r in pairs):.1f}" for key in ratios}
        peak, pss, busy, others = (
            statistics.median(r[key] for r in results) for key in ("peak_mb", "pss_mb", "cpu_s", "others")
        )
        span = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
        rows.append([reader, span, ratios["seconds"], f"{busy:.2f}", ratios["cpu_s"], f"{peak:.0f}", f"{pss:.0f}",
                     ratios["pss_mb"], f"{others:.0%}"])  # fmt: skip
    repetitions = len(next(iter(runs.values())))
    title = f"### {num_rows:,} rows ({csv_bytes / 1e9:.2f} GB), world {world}, {repetitions} repetitions"
    return f"{title}\n\n{machine.table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--readers", default=",".join(READERS), help="comma-separated, in the order to alternate")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for temporary files, about 3 times the size of the CSV")
    options = parser.parse_args()
    readers = options.readers.split(",")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, cache = Path(folder, "annotations.csv"), Path(folder, "cache")
        write_csv(path, options.rows)
        runs: dict[str, list[dict[str, Any]]] = {reader: [] for reader in readers}
        for _ in range(options.repeat):
            for reader in readers:
                runs[reader].append(measure(reader, path, options.world, cache))
        seen = {run["seen"] for results in runs.values() for run in results}
        assert [rows for rows, _, _ in seen] == [options.rows], f"the readers saw different rows: {seen}"
        versions = f"pandas {version('pandas')}, pyarrow {version('pyarrow')}"
        print(f"{machine.describe()}, {versions}\n")
        print(report(runs, path.stat().st_size, options.rows, options.world))


if __name__ == "__main__":
    main()
