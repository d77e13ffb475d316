"""Describes the machine of a measurement and its other load, and writes results as Markdown."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def describe() -> str:
    """Processor, cores, memory, versions; no host name."""
    import torch  # late: it would count as memory of the processes that benchmarks.open_shard measures

    known = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in known if line.startswith("model name"))  # x86 only
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [next(names, platform.machine()), f"{os.cpu_count()} cores", f"{memory:.0f} GiB"]
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name())
    return ", ".join(parts)


class OtherLoad:
    """The load of other programs since this object was made."""

    def __init__(self) -> None:
        self._start, self._before = time.perf_counter(), self._busy_s()

    def share(self) -> float:
        """The share of the cores that programs other than the children of this process used; children that still run
        count as others."""
        total, ours = (now - then for now, then in zip(self._busy_s(), self._before, strict=True))
        return max(0.0, total - ours) / (time.perf_counter() - self._start) / (os.cpu_count() or 1)

    @staticmethod
    def _busy_s() -> tuple[float, float]:
        """Processor seconds of the machine, and of the children of this process that have ended."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return total, children.ru_utime + children.ru_stime


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows(page: str) -> Iterator[dict[str, str]]:
    """The rows of the tables of ``benchmarks/results/PAGE.md``: {column: cell}."""
    header: list[str] = []
    for line in (RESULTS / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif cells[0].strip("-"):
            yield dict(zip(header, cells, strict=False))


def goals(without: str) -> list[list[str]]:
    """[page, what was measured, what was found, goal, reached] of each row with a goal in the tables of all results but
    those of the page ``without``."""
    found = []
    for page in sorted(path.stem for path in RESULTS.glob("*.md") if path.stem != without):
        for row in rows(page):
            if row.get("goal") and "reached" in row:
                measured, value, *_ = row.values()
                found.append([f"[{page}]({page}.md)", measured, row.get("ratio") or value, row["goal"], row["reached"]])
    return found


def write(name: str, title: str, text: str) -> None:
    """Write ``benchmarks/results/NAME.md`` and print it."""
    RESULTS.mkdir(exist_ok=True)
    page = f"# {title}\n\nMachine: {describe()}.\n\n{text}\n"
    (RESULTS / f"{name}.md").write_text(page)
    print(page)
