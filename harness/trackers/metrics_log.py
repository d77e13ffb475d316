"""The log of a run, ``metrics.jsonl``: rank 0 writes it and forwards every entry to the trackers."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from harness.config import plugins
from harness.config.recipe import in_recipe
from harness.config.schema import Config
from harness.config.trees import flatten
from harness.errors import CheckpointError, ConfigError, reason, remedy
from harness.runs import layout
from harness.runs.files import finite, read_json, write_atomically
from harness.runs.followed import read_entry
from harness.trackers.base import RunInfo, Sample, Tracker
from harness.trackers.forwarder import Forwarder

log = logging.getLogger("harness")

CLOSE_S = 60.0  # for a tracker to process its queue at the end of training
STOP_S = 10.0  # the same for a run that was stopped or failed: a scheduler may be about to kill it
ARTIFACTS = (layout.CONFIG, layout.SUMMARY, layout.CONFUSION, layout.PREDICTIONS, layout.WEIGHTS)


def require(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker whose package is not installed, or that is the user's own and cannot be
    imported or is not a tracker."""
    for name in names:
        if "." in name:
            tracker = plugins.find("tracker", name, "trackers")
            members = [member for member in vars(Tracker) if not member.startswith("_")]
            if not inspect.isclass(tracker) or any(not callable(getattr(tracker, member, None)) for member in members):
                hint = f"a tracker is a class with {', '.join(members)}; see harness.trackers.base.Tracker"
                raise ConfigError(f"{name} is not a tracker", where="trackers", hint=hint)
            continue
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed",
                where="trackers",
                hint=f"run pip install 'apex-harness[{name}]' (or pip install {name}), or remove it from trackers",
            )


def open_log(path: Path, rank: int, config: Config, config_yaml: str) -> MetricsLog:
    """Return the log at ``path`` with the trackers of ``config``; on ranks other than 0 it writes nothing.

    Raises ConfigError for a tracker that is not installed.
    """
    if rank != 0:
        return MetricsLog(None)
    require(config.trackers)
    if not config.trackers:
        return MetricsLog(path)
    info = _run_info(path.parent, config, config_yaml)
    return MetricsLog(path, [Forwarder(name, info) for name in dict.fromkeys(config.trackers)])


def _run_info(folder: Path, config: Config, config_yaml: str) -> RunInfo:
    """Return the run's identity in the trackers, kept in trackers.json across resumes."""
    path = folder / layout.TRACKERS
    try:
        saved = read_json(path)
        run_id, started = str(saved["id"]), float(saved["started"])
    except (OSError, ValueError, KeyError, TypeError):
        run_id, started = secrets.token_hex(8), time.time()
        write_atomically(path, json.dumps({"id": run_id, "started": started}) + "\n")
    settings = flatten(config.model_dump(mode="json", by_alias=True))
    recipe = {key: value for key, value in settings.items() if in_recipe(key, config.task.name)}
    metrics = tuple(config.task.metrics)
    return RunInfo(config.name, run_id, started, folder, folder.parent, settings, config_yaml, recipe, metrics)


def _open(path: Path) -> TextIO:
    return open(path, "a+", encoding="utf-8")


class MetricsLog:
    """One JSON object per line, whole lines only, numbers at full precision. ``path`` None: write nothing."""

    def __init__(self, path: Path | None, forwarders: Sequence[Forwarder] = ()) -> None:
        self._path, self._forwarders, self._cpu_s = path, forwarders, 0.0
        self._file = _open(path) if path else None
        self._hash = hashlib.sha256()  # of the log so far; ``rewind`` sets it for a log that exists
        self.damage = ""  # what this start found wrong with the log, and what is lost

    def log(self, split: str, values: dict[str, Any]) -> None:
        """Append an entry. Numbers that are not finite are written as null: JSON has no representation for them."""
        if self._file is None:
            return
        entry = finite({"split": split, **values})
        line = json.dumps(entry) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from None
        self._hash.update(line.encode())
        for forwarder in self._forwarders:
            forwarder.log(entry)

    def _write_error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write: {reason(error)}",
            where=str(self._path),
            hint=remedy(error, "start the same command again: it resumes from the newest checkpoint"),
        )

    def offset(self) -> int:
        """Return the size of the log in bytes, all of it synced to disk: a checkpoint relies on these bytes after a
        crash."""
        if self._file is None:
            return 0
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_error(error) from None
        return self._file.tell()

    def digest(self) -> str:
        """Return the SHA-256 of the log so far, which ``rewind`` checks; empty on ranks other than 0."""
        return self._hash.hexdigest() if self._path else ""

    def goes_on(self, offset: int, digest: str) -> bool:
        """Return True if the log has entries after ``offset``, and those before are the ones of ``digest``."""
        if self._file is None:
            return False
        size = self._file.seek(0, os.SEEK_END)
        return size > offset and hashlib.sha256(os.pread(self._file.fileno(), offset, 0)).hexdigest() == digest

    def rewind(self, offset: int, digest: str = "", evaluations: Sequence[dict[str, Any]] = ()) -> None:
        """Delete the entries after ``offset``, which a resumed run writes again, and start the trackers.

        If those before are not the ones of ``digest``, restore what can be restored: the intact lines, and
        ``evaluations`` that are missing. ``damage`` then says what is lost.
        """
        if self._file is None or self._path is None:
            return
        size = self._file.seek(0, os.SEEK_END)
        before = os.pread(self._file.fileno(), min(offset, size), 0)
        self._hash = hashlib.sha256(before)
        if digest and self._hash.hexdigest() != digest:
            offset = self._mend(before, offset, evaluations)
        else:
            self._file.truncate(len(before))  # truncating a log that was deleted would fill it with zeros
            self._file.seek(0, os.SEEK_END)
        for forwarder in self._forwarders:
            forwarder.start(self._path, offset)

    def _mend(self, before: bytes, offset: int, evaluations: Sequence[dict[str, Any]]) -> int:
        """Replace the log by what is left of it; return its size. The damaged file is kept under another name."""
        assert self._path is not None
        assert self._file is not None
        entries = [entry for line in before.split(b"\n") if (entry := read_entry(line)) is not None]
        num_lines = len(entries)
        evaluated_steps = {entry.get("step") for entry in entries if entry.get("split") == "eval"}
        missing = [{"split": "eval", **entry} for entry in evaluations if entry["step"] not in evaluated_steps]
        for entry in missing:
            later = (index for index, later_entry in enumerate(entries) if later_entry.get("step", 0) > entry["step"])
            entries.insert(next(later, len(entries)), entry)
        damaged_name = f"{self._path.name}.damaged"
        self._file.close()
        os.replace(self._path, self._path.with_name(damaged_name))
        text = "".join(json.dumps(finite(entry)) + "\n" for entry in entries).encode()
        write_atomically(self._path, text)
        self._file, self._hash = _open(self._path), hashlib.sha256(text)
        self.damage = (
            f"{self._path.name} was damaged before the run was resumed: {len(before)} of the {offset} bytes that the "
            f"checkpoint relies on were left, with {num_lines} readable lines, whose values may be wrong; "
            f"{len(missing)} evaluations were restored from the checkpoint; the damaged file is {damaged_name}"
        )
        log.warning("%s", self.damage)
        return len(text)

    def show(self, sample: Sample) -> None:
        """Send predictions to the trackers; the log does not contain them."""
        for forwarder in self._forwarders:
            forwarder.show(sample)

    def take_cpu_s(self) -> float:
        """Return the CPU time of the trackers' threads since the last call: Python code in them holds up the
        training."""
        before, self._cpu_s = self._cpu_s, sum(forwarder.cpu_s for forwarder in self._forwarders)
        return self._cpu_s - before

    def close(self, done: bool = False) -> None:
        """Close the log, and wait a limited time for the trackers. ``done``: training ran to its end."""
        if self._file is None or self._path is None:
            return
        with contextlib.suppress(OSError):  # an entry that did not fit on the disk; ``log`` has raised for it
            self._file.close()
        files = [path for name in ARTIFACTS if (path := self._path.parent / name).exists()]
        for forwarder in self._forwarders:
            forwarder.finish(files, done)
        deadline = time.monotonic() + (CLOSE_S if done else STOP_S)
        for forwarder in self._forwarders:
            forwarder.join(max(0.0, deadline - time.monotonic()))
