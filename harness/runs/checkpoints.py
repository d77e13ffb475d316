"""The checkpoints of a run: which is the newest that can be used, which are kept, which is the best, and what is in
them, which is loaded without executing code.
"""

from __future__ import annotations

import logging
import pickle
import re
import shlex
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError, HarnessError, reason, remedy
from harness.runs import layout, ownership
from harness.runs.checkpoint import ADVICE, VERSION, complete, damage, manifest_of, steps, synced
from harness.runs.files import read_text, replacing, temporary_for, write_atomically
from harness.runs.formats import base as formats
from harness.runs.weights_file import save_weights

log = logging.getLogger("harness")

FROM_SCRATCH = "start from scratch with checkpoint.resume=never, which keeps this folder as NAME.1"
_GLOBAL = re.compile(r"(?:GLOBAL:?|refers to) ([\w.]+)")  # in refusals to load a file
_MAX_LISTED = 8  # damaged checkpoints in a message


class Checkpoints:
    """The checkpoints of one run folder. Rank 0 uses it, but every rank reads, and writes its part of a sharded one."""

    def __init__(self, folder: str | Path, keep: int, format_name: str = "whole") -> None:
        """``format_name``: of the format in which to write. Raises ConfigError if there is none."""
        self.folder, self.keep, self.format_name = Path(folder), keep, format_name
        self.format = formats.find(format_name)
        self.run_folder: Path | None = None  # the run folder, once a start has claimed it
        self._pinned: set[Path] = set()
        self._lock = threading.Lock()  # an upload pins checkpoints from its own thread

    def write(self, step: int, content: dict[str, Any], ranks: Runtime | None = None) -> None:
        """Save ``content`` as the newest checkpoint. ``ranks``: all ranks, which write a sharded format together; by
        default this one writes alone. Collective over ``ranks``. Raises CheckpointError, with earlier checkpoints
        intact."""
        ranks = ranks or Runtime()
        first, folder = ranks.rank == 0, temporary_for(self.folder / layout.step_name(step))
        try:  # in stages: the format's write() may be a collective, which ``together`` must not contain
            with ranks.together("saving"), self._writing(step):
                if first:
                    self._require_run()
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
            with self._writing(step):
                names = [*self.format.write(folder, content, ranks)]
            with ranks.together("hashing"), self._writing(step):
                files = {name: synced(folder / name) for name in names}
            of_ranks = ranks.gather(files)
            with ranks.together("saving"), self._writing(step):
                if first:
                    all_files = {name: entry for rank in of_ranks for name, entry in rank.items()}
                    if len(all_files) < sum(map(len, of_ranks)):
                        raise CheckpointError(
                            f"several ranks wrote the same file of a checkpoint: {', '.join(sorted(all_files))}",
                            where=f"checkpoint.format={self.format_name}",
                            hint="write() returns the names of the files of its own rank: put the rank into them",
                        )
                    complete(folder, step, self.format_name, all_files)
        except Exception:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if first:
            self.sweep()

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Context in which an error of the system becomes a CheckpointError."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            if isinstance(error, FileNotFoundError) and not self.folder.is_dir():
                raise _folder_gone(self.folder.parent) from None
            again = "resumes from the previous checkpoint" if self.exist() else "starts from the beginning"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {reason(error)} ({_free(self.folder)})",
                where=str(self.folder),
                hint=remedy(error, f"run the same command again: it {again}"),
            ) from None

    def read(self, path: Path, mapped: bool, own: formats.Own) -> dict[str, Any]:
        """Return the content of the checkpoint ``path``. The format of this run is trusted: its user has named it."""
        return read(path, mapped, own, trusted_format=self.format_name)

    def mark_best(self, step: int, weights: dict[str, Tensor], path: Path) -> None:
        """Make ``step`` the best checkpoint, and write its ``weights``, as from ``on_host``, to ``path``."""
        self._require_run()
        try:
            with replacing(path) as temporary:
                # In a folder that uploads skip, on the disk of ``path``: ``checkpoints`` may be a link to another one.
                save_weights(weights, temporary, {"step": str(step)}, work=temporary_for(path, "work"))
            write_atomically(self.folder / layout.BEST, layout.step_name(step) + "\n")
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"the best weights could not be written: {reason(error)}",
                where=str(path),
                hint=remedy(error, "run the same command again: it resumes from the newest checkpoint"),
            ) from None
        self.sweep()

    def _require_run(self) -> None:
        """Raise CheckpointError if the run folder was removed or renamed. Writing would make one without a recipe."""
        if self.run_folder is not None and not (self.run_folder / layout.CONFIG).is_file():
            raise _folder_gone(self.run_folder)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; None if there has been none. A damaged one is logged and skipped.

        Raises CheckpointError if all are damaged, since starting from scratch would replace the results of this run, or
        if a newer one is of another version of the harness.
        """
        folders, latest = steps(self.folder), self.named(layout.LATEST)
        if latest and folders and not (self.folder / latest).exists():
            log.warning("checkpoint rejected: %s: it is missing", self.folder / latest)
        refused: dict[str, str] = {}  # {name: problem}
        # The one `latest` names comes first: those with higher numbers were abandoned by a resume from an earlier one.
        for path in sorted(
            (folders[step] for step in sorted(folders, reverse=True)), key=lambda path: path.name != latest
        ):
            problem = damage(path)
            if problem is None:
                newer = next((name for name in refused if _is_of_other_version(self.folder / name)), None)
                if newer is None:
                    return path
                resume = shlex.quote(f"checkpoint.resume={path}")
                raise CheckpointError(
                    refused[newer],
                    where=str(self.folder / newer),
                    hint=f"to continue from the older {path.name} instead, without the later steps, remove {newer}, or "
                    f"start a new run with name=NAME {resume}",
                )
            log.warning("checkpoint rejected: %s: %s", path, problem)
            refused[path.name] = problem
        if not folders:
            if latest is None:
                return None
            refused = {latest: "it is missing"}
        lines = [f"  {name}: {problem}" for name, problem in refused.items()]
        more = [f"  and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
        raise CheckpointError(
            "\n".join(["no checkpoint of this run can be used", *lines[:_MAX_LISTED], *more]),
            where=str(self.folder),
            hint=f"restore one of them; or {FROM_SCRATCH}",
        )

    def exist(self) -> bool:
        """Return True if there is any, complete or not, or if one is named that was removed."""
        return bool(steps(self.folder)) or self.named(layout.LATEST) is not None

    def named(self, pointer: str) -> str | None:
        """Return the name of the checkpoint that ``latest`` or ``best`` points to; None if there is none. Raises
        CheckpointError if the disk or its server fails: the checkpoint may exist."""
        try:
            return read_text(self.folder / pointer).strip() or None
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            again = "run the same command again: it resumes from the newest checkpoint"
            raise CheckpointError(
                f"it cannot be read: {reason(error)}", where=str(self.folder / pointer), hint=remedy(error, again)
            ) from None

    @contextmanager
    def pinned(self) -> Iterator[dict[str, str]]:
        """Yield {pointer: checkpoint} for `best` and `latest`; neither checkpoint is removed until the block ends."""
        with self._lock:
            name_of = {pointer: self.named(pointer) for pointer in (layout.BEST, layout.LATEST)}
            names = {pointer: name for pointer, name in name_of.items() if name and (self.folder / name).is_dir()}
            self._pinned = {self.folder / name for name in names.values()}
        try:
            yield names
        finally:
            self._pinned = set()

    def sweep(self) -> None:
        """Remove all but the best and the newest ``keep``, and what a crash left incomplete. Nothing is removed while
        it is unknown which is the best."""
        with self._lock:
            folders = steps(self.folder)
            try:
                latest, best = (
                    layout.step_number(self.named(pointer) or "") for pointer in (layout.LATEST, layout.BEST)
                )
            except CheckpointError as error:
                log.warning("older checkpoints are not removed: %s", error)
                return
            for step in outdated(folders, latest, best, self.keep):
                if folders[step] not in self._pinned:
                    shutil.rmtree(folders[step], ignore_errors=True)
        for path in self.folder.glob("*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def read(
    path: Path,
    mapped: bool = False,
    own: formats.Own = lambda key, size: None,
    trusted_format: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint folder ``path`` onto the CPU. Raises CheckpointError, which names the folder.

    ``mapped``: memory-map the files, so that the ranks of a node share their pages. Copy the tensors that are to stay.
    ``own``: tensors like those to read from a sharded checkpoint, instead of whole ones.

    A format with a dotted name is imported only if this user started the run, it is ``trusted_format``,
    or ``trust`` is set.
    """
    name = str(manifest_of(path).get("format"))
    if "." in name and not (trust or trusted_format == name) and not ownership.is_own(path.absolute().parents[1]):
        raise CheckpointError(
            f"its format is {name}, whose code would be imported, and you did not start this run on this machine",
            where=str(path),
            hint=f"if you trust its author, add checkpoint.format={name} to train, or --trust to compare",
        )
    try:
        content = formats.find(name).read(path, mapped, own)
    except HarnessError as error:
        raise CheckpointError(error.message, where=str(path), hint=error.hint) from None
    except Exception as error:
        refused = _refusal(error)
        hint = f"other tools may run the code in it, so do not load it with them; {ADVICE}" if refused else ADVICE
        message = refused or f"the checkpoint cannot be read: {reason(error)}"
        raise CheckpointError(message, where=str(path), hint=hint) from None
    if not isinstance(content, dict):
        raise CheckpointError("it is not a checkpoint of this harness", where=str(path), hint=ADVICE)
    return content


def _refusal(error: Exception) -> str:
    """Return why torch refuses a file that holds more than data, without torch's advice to load it nevertheless."""
    if not isinstance(error, pickle.UnpicklingError) and "weights_only" not in str(error):
        return ""
    match = _GLOBAL.search(str(error))
    problem = f"it refers to {match[1]}" if match else "it holds something else, or is damaged"
    return f"the checkpoint is rejected: it may hold only tensors and plain data, but {problem}"


def _is_of_other_version(path: Path) -> bool:
    try:
        return bool(manifest_of(path).get("version") != VERSION)
    except CheckpointError:
        return False


def _folder_gone(path: Path) -> CheckpointError:
    return CheckpointError(
        "the run folder was removed or renamed during the run",
        where=str(path),
        hint="if it was renamed, rename it back; the same command then resumes from its newest checkpoint",
    )


def outdated(steps: Iterable[int], latest: int | None, best: int | None, keep: int) -> list[int]:
    """Return the checkpoints among ``steps`` to remove: all but the newest ``keep``, the ``latest`` and the
    ``best``."""
    # Steps beyond the latest were abandoned by a resume from an earlier one, and do not count as the newest.
    ordered = sorted(steps)
    current = [step for step in ordered if latest is None or latest not in ordered or step <= latest]
    return [step for step in ordered if step not in (*current[-keep:], latest, best)]


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    except OSError as error:
        return reason(error)
