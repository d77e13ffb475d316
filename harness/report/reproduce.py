"""How to have a run again, and on what it was made: the commands to type, and its provenance in words."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.report import words
from harness.report.study import Run, devices, shown
from harness.runs import layout


def commands(run: Run) -> list[str]:
    """What to type in the project's folder: the code as it was, then the same configuration under another name."""
    start = _newest(run)
    lines = []
    git = start.get("git")
    if isinstance(git, dict) and git.get("commit"):
        lines.append(f"git checkout {shlex.quote(str(git['commit'])[:12])}")
    if run.record.sweep is not None:
        return [*lines, trial_again(run.record.sweep.path, run.record.sweep.name, run.record.path)]
    config = shlex.quote(shown(run.record.path / layout.CONFIG))
    name = shlex.quote(f"name={run.record.name}_again")
    ranks = [str(rank) for rank in start.get("ranks", [])] if isinstance(start.get("ranks"), list) else []
    hosts = list(dict.fromkeys(rank.partition(":")[0] for rank in ranks))
    world = run.world or 1
    if len(hosts) > 1:
        where = f"NNODES={len(hosts)} NODE_RANK=0 MASTER_ADDR=NODE0 MASTER_PORT=PORT"
        lines.append(f"{where} launch/multi_node.sh {world // len(hosts)} {config} {name}   # and so on, on each node")
    elif world > 1:
        lines.append(f"launch/single_node.sh {world} {config} {name}")
    else:
        lines.append(f"python driver.py -c {config} {name}")
    return lines


def trial_again(sweep: Path, name: str, run: Path) -> str:
    """The command that trains the trial ``run`` of the sweep folder ``sweep`` again as it was trained, with its ranks,
    threads and engine, beside the sweep: in the sweep's folder nothing else belongs."""
    own = [f"output={shown(sweep.parent)}", f"name={name}-{run.name}"]
    return shlex.join(["harness", "launch", "-c", shown(run / layout.CONFIG), *own])


def caveats(run: Run) -> list[str]:
    """What stands between those commands and the same numbers."""
    start = _newest(run)
    found = []
    git = start.get("git")
    if not isinstance(git, dict) or not git.get("commit"):
        found.append("The run does not say which commit it was made with.")
    elif git.get("changed"):
        found.append("The code had changes that were not committed: the commit alone may not give the same numbers.")
    if len(run.record.provenance) > 1:
        found.append(f"It was trained in {len(run.record.provenance)} starts, each going on from a checkpoint.")
    if run.settings.get("train.deterministic") is False:
        found.append("It was not deterministic (train.deterministic: false): the numbers will be near, not equal.")
    return found


def provenance(run: Run) -> list[tuple[str, str]]:
    """(what, how it was) of the newest start."""
    start, starts = _newest(run), run.record.provenance
    if not start:
        return []
    facts = {
        "started": _when(start.get("started")) + (f" (the first of {len(starts)}: {_when(starts[0].get('started'))})"
                                                  if len(starts) > 1 else ""),
        "command": _command(start.get("command")),
        "git commit": _commit(start),
        "machine": _machine(start.get("ranks")),
        "ranks": str(start.get("world_size", words.NOTHING)),
        "launched by": str(start.get("launched_by", words.NOTHING)),
        "amp": str(start.get("amp", words.NOTHING)),
        "Python": str(start.get("python", words.NOTHING)),
        "CUDA": str(start.get("cuda") or "none"),
        "packages": ", ".join(f"{name} {version}" for name, version in _packages(start).items()),
    }  # fmt: skip
    return list(facts.items())


def differences(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, int]]]]:
    """(what, [(how it was, in how many runs)]) of all in which the runs' provenance differs."""
    told: dict[str, Counter[str]] = {}
    for run in runs:
        start = _newest(run)
        if not start:
            continue
        facts = {
            "git commit": _commit(start),
            "launched by": str(start.get("launched_by")),
            "amp": str(start.get("amp")),
        }
        facts |= {"Python": str(start.get("python")), "device": ", ".join(sorted(set(devices(run.record))))}
        facts |= _packages(start)
        for what, how in facts.items():
            told.setdefault(what, Counter())[how] += 1
    return [(what, counts.most_common()) for what, counts in told.items() if len(counts) > 1]


def commit(run: Run) -> str:
    return _commit(_newest(run))


def _newest(run: Run) -> dict[str, Any]:
    return run.record.provenance[-1] if run.record.provenance else {}


def _commit(start: dict[str, Any]) -> str:
    git = start.get("git")
    if not isinstance(git, dict) or not git.get("commit"):
        return "unknown"
    return str(git["commit"])[:12] + (" with changes" if git.get("changed") else "")


def _when(started: Any) -> str:
    return re.sub(r"T(\d\d:\d\d):\d\d", r" \1 ", str(started)) if started else "unknown"


def _command(command: Any) -> str:
    """As it was typed, with the interpreter and the folders of this machine left out."""
    parts = [str(word) for word in command] if isinstance(command, list) else []
    if not parts:
        return words.NOTHING
    parts[0] = os.path.basename(parts[0])
    return words.from_here(shlex.join(parts))


def _machine(ranks: Any) -> str:
    """ "2 × host: cuda (NVIDIA H100)" """
    kinds = Counter(re.sub(r"cuda:\d+", "cuda", str(rank)) for rank in ranks) if isinstance(ranks, list) else Counter()
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or words.NOTHING


def _packages(start: dict[str, Any]) -> dict[str, str]:
    packages = start.get("packages")
    return {str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
