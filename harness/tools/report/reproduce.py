"""The commands that reproduce a run, and its provenance."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.config.places import is_url
from harness.errors import plural
from harness.runs import layout
from harness.runs.reader import over_starts, ranks
from harness.tools.report import formatting
from harness.tools.report.run_set import ReportedRun, devices


def commands(run: ReportedRun) -> list[str]:
    """Check out the commit of the working folder, then train the same configuration under a new name."""
    git = _newest(run).get("git")
    commit = str(git.get("commit") or "")[:12] if isinstance(git, dict) else ""
    checkout = [f"git checkout {shlex.quote(commit)}"] if commit else []
    sweep = run.record.sweep
    if sweep is not None:
        return [*checkout, trial_command(sweep.path, sweep.name, run.record.path)]
    return [*checkout, _train_command(run, [f"name={run.record.name}_again"])]


def resume_command(run: ReportedRun) -> str:
    """Return the command that resumes a stopped run, with what its configuration says otherwise: the folder of a run
    that was moved, and ``checkpoint.resume``."""
    if run.record.sweep is not None:
        return "the command of its sweep"
    folder, output = run.record.path, str(run.settings.get("output", ""))
    stays = is_url(output) or Path(output).absolute() == folder.parent.absolute()
    words = [] if stays else [f"output={formatting.path(folder.parent)}"]
    words += [f"name={folder.name}"] if folder.name != run.record.name else []
    words += ["checkpoint.resume=auto"] if run.settings.get("checkpoint.resume") == "never" else []
    return _train_command(run, words)


def _train_command(run: ReportedRun, words: list[str]) -> str:
    """Return the command that trains the configuration of ``run``, changed by ``words``, on the ranks of its newest
    start."""
    config = f"-c {shlex.quote(formatting.path(run.record.path / layout.CONFIG))}"
    settings = "".join(f" {shlex.quote(word)}" for word in words)
    sizes = [*Counter(rank["host"] for rank in ranks(_newest(run))).values()]
    if len(sizes) > 1:
        nproc, node_variables = str(sizes[0]), f"its NODE_RANK, 0 to {len(sizes) - 1}"
        if len({*sizes}) > 1:
            nproc, node_variables = "NPROC", f"{node_variables}, and NPROC: {', '.join(map(str, sizes))}"
        nodes = f"--nnodes={len(sizes)} --node-rank=NODE_RANK --master-addr=NODE0 --master-port=PORT"
        start = f"torchrun {nodes} --nproc-per-node={nproc} -m harness.train"
        return f"{start} {config}{settings}   # on each node, with {node_variables}"
    world = (run.record.world_sizes or [1])[-1]
    return f"harness launch {config} --nproc {world}{settings}" if world > 1 else f"harness train {config}{settings}"


def trial_command(sweep: Path, name: str, run: Path) -> str:
    """Return the command that trains the trial at ``run`` again, with its ranks, threads and engine, into a folder next
    to the sweep: a sweep folder holds only its own trials."""
    own_settings = [f"output={formatting.path(sweep.parent)}", f"name={name}-{run.name}"]
    return shlex.join(["harness", "launch", "-c", formatting.path(run / layout.CONFIG), *own_settings])


def caveats(run: ReportedRun) -> list[str]:
    """Reasons why these commands may give other numbers."""
    start = _newest(run)
    notes = []
    git = start.get("git")
    if not isinstance(git, dict) or not git.get("commit"):
        if any((folder / ".git").exists() for folder in run.record.path.absolute().parents):
            notes.append("The commit is unknown.")
    elif any(_commit(start) != _commit(before) for before in run.record.provenance):
        notes.append(f"The code changed when the run was resumed ({commit(run)}); these commands use the last commit.")
    elif git.get("changed"):
        notes.append("The code had uncommitted changes, so the commit may give different numbers.")
    if len(run.record.provenance) > 1:
        text = f"The run was resumed from a checkpoint ({plural(len(run.record.provenance), 'start')})"
        changed = len(run.record.world_sizes) > 1
        notes.append(f"{text}, on {run.ranks}; these commands use the last number." if changed else f"{text}.")
    notes += [
        f"{key} changed when the run was resumed; these commands use the last value for the whole run."
        for key, lengths in run.record.lengths.items() if len(lengths) > 1
    ]  # fmt: skip
    on_gpu = set(devices(run.record)) != {"cpu"}
    if on_gpu and (level := run.settings.get("train.deterministic")) in (False, "warn"):
        notes.append(
            f"Training was not deterministic (train.deterministic: {str(level).lower()}): expect similar numbers, not "
            "equal ones."
        )
    return notes


def provenance(run: ReportedRun) -> list[tuple[str, str]]:
    """Return (title, value): time and command of the newest start, and facts over all starts."""
    start, starts = _newest(run), run.record.provenance
    if not start:
        return []
    first = f" (the first of {len(starts)}: {_when(starts[0].get('started'))})" if len(starts) > 1 else ""
    entries = {"started": _when(start.get("started")) + first, "command": _command(start.get("command"))}
    entries |= _over_starts(map(_facts, starts)) | {"ranks": run.record.world_size_text or formatting.NOTHING}
    packages = _over_starts(map(_packages, starts))
    entries["packages"] = "; ".join(f"{name} {version}" for name, version in packages.items())
    return list(entries.items())


def _facts(start: dict[str, Any]) -> dict[str, str]:
    return {
        "git commit": _commit(start),
        "harness": _harness(start),
        **{f"code in {formatting.path(Path(folder))}": _commit(entry) for folder, entry in _own_code(start)},
        "model": str((start.get("model") or {}).get("name", formatting.NOTHING)),
        "machine": machine(start),
        "launcher": str(start.get("launched_by", formatting.NOTHING)),
        "amp": str(start.get("amp", formatting.NOTHING)),
        "Python": str(start.get("python", formatting.NOTHING)),
        "CUDA": str(start.get("cuda") or "none"),
    }


def _over_starts(starts: Iterable[dict[str, str]]) -> dict[str, str]:
    start_facts = list(starts)
    titles = dict.fromkeys(title for facts in start_facts for title in facts)
    return {title: str(over_starts(facts.get(title, formatting.NOTHING) for facts in start_facts)) for title in titles}


def commit(run: ReportedRun) -> str:
    return str(over_starts(map(_commit, run.record.provenance or [{}])))


def _newest(run: ReportedRun) -> dict[str, Any]:
    return run.record.provenance[-1] if run.record.provenance else {}


def _commit(start: dict[str, Any]) -> str:
    git = start.get("git")
    if not isinstance(git, dict) or not git.get("commit"):
        return "unknown"
    return str(git["commit"])[:12] + (" with changes" if git.get("changed") else "")


def _harness(start: dict[str, Any]) -> str:
    """ "0.1.0, commit 0123456789ab" """
    harness = start.get("harness")
    if not isinstance(harness, dict):
        return "unknown"
    return f"{harness.get('version')}, commit {_commit(harness)}"


def _own_code(start: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    folders = start.get("own_code")
    return (
        [(folder, entry) for folder, entry in folders.items() if isinstance(entry, dict)]
        if isinstance(folders, dict)
        else []
    )


def _when(started: Any) -> str:
    return re.sub(r"T(\d\d:\d\d):\d\d", r" \1 ", str(started)) if started else "unknown"


def _command(command: Any) -> str:
    """Return the command line, without the interpreter's folder and the working folder."""
    parts = [str(word) for word in command] if isinstance(command, list) else []
    if not parts:
        return formatting.NOTHING
    parts[0] = os.path.basename(parts[0])
    return formatting.without_working_folder(shlex.join(parts))


def machine(start: dict[str, Any]) -> str:
    """ "2 × host: cuda (NVIDIA H100)" """
    kinds = Counter((rank["host"], rank["device"].partition(":")[0], rank["name"]) for rank in ranks(start))
    parts = (
        f"{count} × {host}: {device}" + (f" ({name})" if name != device else "")
        for (host, device, name), count in kinds.items()
    )
    return ", ".join(parts) or formatting.NOTHING


def _packages(start: dict[str, Any]) -> dict[str, str]:
    packages = start.get("packages")
    return {str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
