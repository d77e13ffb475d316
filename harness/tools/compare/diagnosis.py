"""Why two runs differ: random draws and unsaved attributes, recorded with file and line in short observed runs.

``harness.training.probe.observations`` makes the observations, in the ranks.
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.runs.probe_plan import Kill, ProbePlan
from harness.tools.compare.first_difference import FirstDifference
from harness.tools.compare.kill_plan import Progress
from harness.tools.compare.starts import Starts

_SHOWN = 8  # causes of a kind
_SOURCES = {
    "entropy": "draws unseeded random numbers, so every run differs; derive them from row_seed(seed, epoch, row) or "
    "from a fixed seed",
    "worker": "draws from the global random number generator of a loader process, which starts over after a resume; "
    "derive the numbers from row_seed(seed, epoch, row)",
    "clock": "reads the clock; its value must not reach the model",
    "op": "has no deterministic implementation; set train.deterministic=true to have it refused or replaced",
}


def of_chance(runs: Starts, first: FirstDifference) -> list[str]:
    """Causes why two uninterrupted runs differ."""
    until = _until(first)
    folder = runs.folder / "observed"
    runs.finish("observed", ProbePlan("", None, str(folder)), f"train.max_steps={until}")
    causes = _draws(folder, ("entropy", "op"))
    if not causes:
        causes = _of_hashes(runs, until) or _draws(folder, ("clock",))
    return causes


def of_loss(runs: Starts, first: FirstDifference, done: Progress) -> list[str]:
    """Causes why a resumed run differs from an uninterrupted one: what changes during training and is not saved."""
    saved = done.checkpoints[0]
    steps = tuple(range(saved + 1, min(saved + 3, done.last) + 1)) or (done.last,)
    until = f"train.max_steps={max(steps[-1], _until(first))}"
    folders = [runs.folder / name for name in ("observed", "observed-resumed")]
    runs.finish("observed", ProbePlan("", None, str(folders[0]), steps), until)
    mark = runs.folder / "mark-observed.json"
    runs.start("observed-resumed", ProbePlan(str(mark), Kill("step", steps[0])), until)
    runs.finish("observed-resumed", ProbePlan("", None, str(folders[1]), steps), until)
    causes = [*_draws(folders[0], ("worker",)), *_attributes(*folders), *_changes(folders[0])]
    return causes or _draws(folders[0], ("entropy", "clock"))


def _until(first: FirstDifference) -> int:
    return (first.step or 1) + 1


def _of_hashes(runs: Starts, until: int) -> list[str]:
    """Return True if two runs agree once the hashes of strings, and with them the order of sets, are the same in
    both."""
    from harness.tools.compare.exactness import differences

    names = ["hashes-1", "hashes-2"]
    for name in names:
        runs.finish(name, None, "launch.env.PYTHONHASHSEED='0'", f"train.max_steps={until}")
    if differences(*map(runs.folder_of, names)):
        return []
    return ["probably the order of a set or the hash of a string, which differ between processes: two runs with "
            "PYTHONHASHSEED=0 are equal. Sort the elements of a set before you use them"]  # fmt: skip


def _draws(folder: Path, kinds: tuple[str, ...]) -> list[str]:
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for entry in _entries(folder, "draws"):
        if entry["kind"] in kinds:
            found.setdefault((entry["kind"], entry["file"], entry["line"]), entry)
    ordered = sorted(found.values(), key=lambda entry: kinds.index(entry["kind"]))
    return [_draw(entry) for entry in ordered[:_SHOWN]]


def _draw(entry: dict[str, Any]) -> str:
    if not entry["file"]:
        return f"{entry['function']} {_SOURCES[entry['kind']]}"
    code, file = linecache.getline(entry["file"], entry["line"]).strip(), Path(entry["file"])
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{entry['line']}: {entry['function']} {_SOURCES[entry['kind']]}\n      {code}"


def _attributes(one: Path, other: Path) -> list[str]:
    """Attributes that differ after the same step of the uninterrupted and of the resumed run."""
    causes: dict[str, str] = {}
    for path in sorted(one.glob("attributes-*.json")):
        rank, step = path.stem.split("-")[1:]
        if not (other / path.name).exists():
            continue
        mine, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in (path, other / path.name))
        for name in sorted(mine.keys() | theirs.keys()):
            pair = mine.get(name, "(absent)"), theirs.get(name, "(absent)")
            if pair[0] != pair[1]:
                causes.setdefault(
                    name,
                    f"{name} changes during training, and no checkpoint holds it: after step {step} it is {pair[0]} in "
                    f"the uninterrupted run, {pair[1]} in a resumed one (rank {rank}); make it a buffer, or add it to "
                    "the state_dict",
                )
    return list(causes.values())[:_SHOWN]


def _changes(folder: Path) -> list[str]:
    """Attributes of a dataset that changed in a loader process."""
    found: dict[str, dict[str, Any]] = {}
    for entry in _entries(folder, "changes"):
        found.setdefault(entry["name"], entry)
    return [
        f"{name} changes in a loader process while a batch is loaded, {' -> '.join(entry['values'])}; "
        "a resume starts new processes, so a batch may depend only on its rows and its epoch"
        for name, entry in list(found.items())[:_SHOWN]
    ]


def _entries(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"{kind}-*.jsonl")):
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
