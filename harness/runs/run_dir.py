"""The run folder: its small files, the lock on it, and how a new start takes over what an earlier one left."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.config import loader, merge
from harness.config.places import is_url
from harness.config.recipe import recipe_difference
from harness.config.schema import Config
from harness.distributed.rank_exit import Cause
from harness.errors import ConfigError, first_line, plural, reason, remedy, require_regular_file
from harness.runs import exit_files, hub_copies, layout, ownership, provenance
from harness.runs.checkpoints import FROM_SCRATCH, Checkpoints
from harness.runs.files import finite, make_folder, read_json, read_sealed, read_text, write_atomically, write_sealed
from harness.runs.locks import Lock, forget_marker

log = logging.getLogger("harness")

_OF_EVALUATION = {layout.SUMMARY, layout.WEIGHTS, layout.PREDICTIONS}  # a checkpoint is written before
_NEWEST = layout.pointer(layout.LATEST)
_LOCK_S = 20.0  # a rank that has lost its peers or its launcher has ended by then


def cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to the run folder: {reason(error)}",
        where=str(path),
        hint=remedy(error, "or choose another folder with output=FOLDER"),
    )


def _name_taken(path: Path, reason: str) -> ConfigError:
    hint = "move it away and run the same command again, or rename this run with name=NAME"
    return ConfigError(f"the run cannot use this name: {reason}", where=str(path), hint=hint)


def own_checkpoint(resume: str) -> ConfigError:
    return ConfigError(
        f"{resume} is a checkpoint of this run itself",
        where="checkpoint.resume",
        hint="auto resumes from the newest one; to go back to an earlier one, start a new run with name=NAME",
    )


class Start(NamedTuple):
    """The start that has claimed a run at a URL: the content of its ``start.json``, and its newest checkpoint or ""."""

    text: str
    newest: str


class RunFolder:
    """The run folder on a disk that all ranks share, and its small files.

    A start calls ``lock`` and ``claim`` on rank 0, then ``attach`` on every rank; ``publish`` and ``wait_published`` on
    rank 0 whenever something important was written; ``detach`` on every rank at its end, and ``unlock`` on rank 0.
    Publishing means nothing here: ``harness.runs.remote`` overrides it for runs that are kept at a URL.
    """

    def __init__(self, path: Path, keep: int = 1, form: str = "whole") -> None:
        """``keep``: number of newest checkpoints to keep in addition to the best. ``form``: the format of new ones."""
        self.path = path
        self.where = str(path)  # for messages
        self.claimed = False  # by this start; before that, the files may belong to another
        self.start: Start | None = None  # set by ``claim``; rank 0 sends it to the others, which pass it to ``attach``
        self.done_at: int | None = None  # the step at which the last start finished; set by ``claim``
        self._lock: Lock | None = None
        self._lock_on = path
        self._config = ""  # of this start, until it is written
        self.checkpoints = Checkpoints(path / layout.CHECKPOINTS, keep, form)
        self.logs = path / layout.LOGS
        self.metrics = path / layout.METRICS
        self.weights = path / layout.WEIGHTS

    def lock(self) -> None:
        """Keep other starts out until ``unlock`` or the end of this process. Waits for a start that is about to end.
        Raises ConfigError if it does not, or if the folder cannot be locked."""
        lock = Lock(self._lock_on, is_folder=True)
        try:
            make_folder(self._lock_on)
            if not (acquired := lock.try_acquire()):
                who = lock.owner or "another process"
                log.info("waiting up to %g s: the run folder %s is in use by %s", _LOCK_S, self.where, who)
                acquired = lock.acquire(_LOCK_S)
        except OSError as error:
            raise cannot_write(Path(error.filename or self._lock_on), error) from None
        if not acquired:
            owner = f" ({lock.owner})" if lock.owner else ""
            raise ConfigError(
                f"another process is already training in this run folder{owner}",
                where=self.where,
                hint="wait for it or stop it, then run the same command again; or rename this run with name=NAME",
            )
        self._lock = lock

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def claim(self, config: Config, rehearse: Callable[[], None] = lambda: None) -> str:
        """Claim the folder for this run; return a note for the user if an earlier run was moved aside or if this start
        gives the run another length.

        The same recipe resumes. Another recipe, or ``resume: never``, moves the earlier run aside to NAME.1 (or the
        next free number), so that nothing is lost, unless it failed before its first step; before that ``rehearse``
        raises any error that would keep the new run from starting. So does a run without checkpoints that has been
        evaluated: it cannot resume. Raises ConfigError if the folder cannot be written, or holds something else than a
        run.
        """
        self._require_files()
        source = config.checkpoint.named
        if source and not is_url(source) and self.path.resolve() in Path(source).resolve().parents:
            raise own_checkpoint(source)
        note = self._resume_or_move(config, rehearse)
        last = exit_files.read(self.logs).get(0)
        self.done_at = last.step if last and last.cause is Cause.DONE else None
        try:
            make_folder(self.path)
            if self._lock is not None and not self._lock.is_current():  # the lock moved aside with the earlier run
                self.unlock()
                self.lock()
            self.checkpoints.folder.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            ownership.remember(text := loader.to_text(config))
            self._config = text
            if not (self.path / layout.CONFIG).exists():
                self.write_config()
            self.checkpoints.run_folder = self.path
            if self.done_at is None:  # a finished run stays one until its new start is built
                self.forget_end()
        except OSError as error:
            raise cannot_write(self.path, error) from None
        return note

    def write_config(self) -> None:
        """Write the configuration of this start, on rank 0. A start that resumes calls it when there is something left
        to train: the results of a finished run belong to the configuration that it was trained with."""
        if self._config:
            write_atomically(self.path / layout.CONFIG, self._config)
            self._config = ""

    def _require_files(self) -> None:
        """Raise ConfigError if a name that this start will write to, or read from, is taken by something else."""
        files = sorted(layout.OF_TRAINING - {layout.CHECKPOINTS})
        pointers = map(layout.pointer, (layout.LATEST, layout.BEST))
        for path in [*(self.path / name for name in (*files, *pointers)), *self.logs.glob(layout.OF_RANKS)]:
            try:
                require_regular_file(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                if path.is_symlink():
                    raise _name_taken(path, str(error.strerror)) from None
            except OSError as error:
                raise _name_taken(path, reason(error)) from None
        for folder in (self.checkpoints.folder, self.logs):
            if os.path.lexists(folder) and not folder.is_dir():
                raise _name_taken(folder, "it is not a folder")

    def forget_end(self) -> None:
        """Remove the files about how an earlier start ended."""
        (self.path / layout.FAILURE).unlink(missing_ok=True)
        exit_files.remove(self.logs)

    def _resume_or_move(self, config: Config, rehearse: Callable[[], None]) -> str:
        names, scratch = self._held(), config.checkpoint.resume == "never"
        if not names:
            return ""
        listed = ", ".join(sorted(names))
        if layout.SWEEP in names or not self._is_run():
            raise ConfigError(
                f"this is not a run folder, but it contains files that a run would overwrite: {listed}",
                where=self.where,
                hint="choose another folder with name=NAME or output=FOLDER, or move these files",
            )
        if layout.CONFIG not in names and not scratch:
            raise ConfigError(
                f"config.yaml is missing, so the recipe that produced the results in this folder ({listed}) is unknown",
                where=self.where,
                hint=f"restore config.yaml; or {FROM_SCRATCH}",
            )
        saved = {} if scratch else _saved_tree(self.path / layout.CONFIG, config)
        changed, starts = recipe_difference(saved, loader.as_tree(config)), self._starts()
        earlier = {"model.name": starts if not (saved.get("model") or {}).get("weights") else []}
        hub_keys = [key for key in hub_copies.KEPT if key in changed]
        moved = [key for key in hub_keys if hub_copies.is_same_folder(self.path, earlier.get(key, []), *changed[key])]
        if scratch:
            reason = "checkpoint.resume=never"
        elif difference := {key: pair for key, pair in changed.items() if key not in moved}:
            if names <= {layout.CONFIG, layout.METRICS} and not self._has_log():
                (self.path / layout.CONFIG).unlink()  # of a start that failed before its first step
                return ""
            changes = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in list(difference.items())[:4])
            changes += f" and {len(difference) - 4} more" if len(difference) > 4 else ""
            reason = f"its recipe differs ({changes})"
        elif _NEWEST in names:
            notes = [f"{key} {changed[key][0]} -> {changed[key][1]} has the same files" for key in moved]
            return "; ".join(filter(None, [*notes, _new_length(saved.get("train") or {}, config)]))
        elif names & _OF_EVALUATION:
            reason = "it has results, but no checkpoint to resume from"
        else:
            return ""
        rehearse()
        return f"the earlier run was moved to {self._move_aside()}: {reason}"

    def _held(self) -> set[str]:
        """Return the files in the folder that a start would replace or continue."""
        names = {name for name in (*layout.RESULTS, layout.CONFIG) if os.path.lexists(self.path / name)}
        return names | {_NEWEST} if self.checkpoints.exist() else names

    def _has_log(self) -> bool:
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def _is_run(self) -> bool:
        """Return True if a start has claimed the folder before: that makes folders first, and the files later."""
        return self.checkpoints.folder.is_dir() or self.logs.is_dir()

    def _move_aside(self) -> str:
        """Rename the folder to the first free of NAME.1, NAME.2, …; return its new place."""
        number = next(n for n in itertools.count(1) if not self.path.with_name(f"{self.path.name}.{n}").exists())
        aside = self.path.with_name(f"{self.path.name}.{number}")
        try:
            os.rename(self.path, aside)
        except OSError as error:
            raise ConfigError(
                f"the earlier run cannot be moved aside: {reason(error)}",
                where=str(self.path),
                hint=remedy(error, "or give the new run another name with name=NAME"),
            ) from None
        forget_marker(aside)
        return str(aside)

    def attach(self, rank: int, start: Start | None) -> None:
        """Make the files that ``rank`` needs available on its machine. Every rank calls it after ``claim``."""

    def publish(self) -> None:
        """Start to upload what was written; does not wait. Raises CheckpointError if another start owns the run."""

    def wait_published(self) -> None:
        """Wait until everything written is uploaded. Raises CheckpointError if that fails."""

    def detach(self, rank: int, done: bool) -> None:
        """Upload the last files of ``rank``. ``done``: the run is complete."""

    def results(self, step: int, predictions: bool) -> dict[str, Any]:
        """Return the summary if the last start finished at ``step`` and its weights and, on request, its
        ``predictions`` are there; otherwise nothing."""
        files = [self.weights, *([self.path / layout.PREDICTIONS] if predictions else [])]
        if self.done_at != step or not all(path.is_file() for path in files):
            return {}
        with contextlib.suppress(OSError, ValueError):
            summary: dict[str, Any] = read_sealed(self.path / layout.SUMMARY)
            lost = any(None in entry.values() for entry in summary["history"])  # numbers that JSON does not have
            return summary if summary["finished"] and summary["step"] == step and not lost else {}
        return {}

    def add_start(self, start: dict[str, Any]) -> list[str]:
        """Add ``start`` (``harness.runs.provenance``) to ``provenance.json``; return warnings about what has changed
        since the last one."""
        starts = self._starts()
        write_atomically(self.path / layout.PROVENANCE, json.dumps([*starts, start], indent=1) + "\n")
        return provenance.warnings(starts[-1], start) if starts else []

    def _starts(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):  # a damaged file must not fail the start
            content = read_json(self.path / layout.PROVENANCE)
            return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []
        return []

    def repair(self, finished: bool) -> list[str]:
        """Return warnings about damaged files that this start writes again. Raises ConfigError for summary.json if the
        run is ``finished``: only an evaluation writes that file."""
        warnings = []
        for name, when in ((layout.SUMMARY, "at the next evaluation"), (layout.TASK, "now")):
            try:
                read_sealed(self.path / name)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                if finished and name == layout.SUMMARY:
                    raise ConfigError(
                        f"the summary of this finished run cannot be trusted: {reason(error)}",
                        where=str(self.path / name),
                        hint=f"restore it; or raise train.epochs, which writes it again; or {FROM_SCRATCH}",
                    ) from None
                warnings.append(f"{name} is written again {when}: {reason(error)}")
        return warnings

    def learned(self, learned: Mapping[str, object]) -> None:
        """``task.json``: what the task took from the training data, for predictions without them."""
        write_sealed(self.path / layout.TASK, dict(learned))

    def summary(self, values: dict[str, Any]) -> None:
        write_sealed(self.path / layout.SUMMARY, finite(values))

    def confusion(self, evaluation: Mapping[str, Any]) -> None:
        """``confusion.csv``: a row for each true class, a column for each prediction, counts in the cells."""
        if {"confusion", "class_accuracy"} <= evaluation.keys():
            text, classes, matrix = io.StringIO(), evaluation["class_accuracy"], evaluation["confusion"]
            rows = ([name, *counts] for name, counts in zip(classes, matrix, strict=True))
            csv.writer(text, lineterminator="\n").writerows([["label", *classes], *rows])
            write_atomically(self.path / layout.CONFUSION, text.getvalue())


def _new_length(saved: dict[str, Any], config: Config) -> str:
    """Return a note on train.epochs and train.max_steps if they differ from those ``saved`` at the last start."""
    now = config.train
    pairs = {key: (saved[key], getattr(now, key)) for key in ("epochs", "max_steps") if key in saved}
    changes = [f"train.{key} {was or 'null'} -> {new or 'null'}" for key, (was, new) in pairs.items() if was != new]
    limit = f", at most {plural(now.max_steps, 'step')}" if now.max_steps else ""
    spans = f"the schedule now spans {plural(now.epochs, 'epoch') if now.epochs else 'as many epochs'}{limit}"
    return f"{', '.join(changes)} since the last start; {spans}" if changes else ""


def _saved_tree(path: Path, config: Config) -> dict[str, Any]:
    """Return the resolved configuration of an earlier run, with defaults for keys that its version did not have.

    A task that ``config`` does not name is not imported, so its defaults are not added; nor is a checkpoint format.
    Raises ConfigError if the file is damaged.
    """
    try:
        tree = merge.load_yaml(read_text(path))
        if not isinstance(tree, dict):
            raise ValueError("it has no settings")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"the configuration of the earlier run in this folder is damaged: {first_line(error)}",
            where=str(path), hint=f"restore it; or {FROM_SCRATCH}",
        ) from None  # fmt: skip
    task = tree.get("task")
    if isinstance(task, dict) and task.get("name") == config.task.name:
        with contextlib.suppress(ConfigError):
            return loader.as_tree(loader.load(path, ["checkpoint.format=whole"]))
    return tree
