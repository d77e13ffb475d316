"""A run folder at a URL. Training works in a scratch folder of this machine's cache; the URL is authoritative.

Each start fills the scratch folder from the URL, and a background thread uploads what training writes. A kill during
an upload costs at most the checkpoint that was on its way, which is trained again with the same result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harness.config.schema import Config
from harness.distributed.threads import thread
from harness.errors import CheckpointError, ConfigError, did_you_mean, reason, remedy
from harness.runs import layout
from harness.runs.checkpoint import damage, none_usable, outdated, require_same_format
from harness.runs.files import is_url
from harness.runs.locks import locked
from harness.runs.run_dir import RunFolder, own_checkpoint
from harness.runs.storage import LocalStore, copy_run, working_folder
from harness.runs.uploader import Uploader, UploadTakenOver
from harness.runs.url_store import UrlStore

log = logging.getLogger("harness")

DETACH_S = 10.0  # for a rank's last files to be uploaded: its launcher may be about to kill it
_LOCK_S = 3600.0  # another process of this machine may be downloading a large checkpoint
_CHECKPOINT_FILES = (layout.STATE, layout.MANIFEST)


def run_folder(config: Config) -> RunFolder:
    """The run folder of ``config``, OUTPUT/NAME. Raises ConfigError for a URL at which no run can be kept."""
    if config.output.startswith("memory://"):
        raise ConfigError(
            f"{config.output} exists only in memory: the run would be lost when the process ends", where="output",
            hint="give a folder, or the URL of a store, such as s3://BUCKET/runs",
        )  # fmt: skip
    if is_url(config.output):
        return RemoteRunFolder(config)
    return RunFolder(Path(config.output) / config.name, config.checkpoint.keep, config.checkpoint.format)


class RemoteRunFolder(RunFolder):
    """``store`` is where the run is kept, ``path`` the scratch folder of this machine."""

    def __init__(self, config: Config) -> None:
        self.store = UrlStore(f"{config.output.rstrip('/')}/{config.name}")
        scratch, section = working_folder(self.store.where, config.data.cache_dir), config.checkpoint
        super().__init__(scratch, section.keep, section.format)
        self.where = self.store.where  # starts on other hosts are not locked out; the older one exits
        self._lock_on = self.path.parent  # ``claim`` empties the scratch folder
        self._scratch = LocalStore(self.path)
        self._filled = False  # this process filled the scratch folder, and removes it
        self._uploaded: dict[str, str] = {}
        self._refused: set[int] = set()  # damaged checkpoints at the URL, which do not count as the newest
        self._uploader = Uploader(self.where, self._upload)

    def claim(self, config: Config, rehearse: Callable[[], None] = lambda: None) -> str:
        if config.checkpoint.resume.startswith(self.where + "/"):
            raise own_checkpoint(config.checkpoint.resume)
        with self._exclusively():
            self.store.write("writable", "")  # to fail before anything large is downloaded
            self.store.remove(["writable"])
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                self.store.get(layout.CONFIG, self.path / layout.CONFIG)
            note = super().claim(config, rehearse)
            # An older start that still runs uploads nothing more, so that the files below do not change.
            text = self._take_over()
            newest = self._download({} if note else self.store.files())
            # Other files are uploaded again: the older start may have been in the middle of replacing one.
            kept = (layout.CONFIG, f"{layout.CHECKPOINTS}/")
            self._uploaded = {name: mark for name, mark in self._scratch.files().items() if name.startswith(kept)}
            self._uploaded[f"{layout.CHECKPOINTS}/{layout.LATEST}"] = newest
            self.start = (text, newest)
        return note

    def _download(self, files: Mapping[str, str]) -> str:
        """Fill the scratch folder with what a resume needs; return the name of the newest complete checkpoint."""
        apart = (f"{layout.CHECKPOINTS}/*", f"{layout.LOGS}/*", layout.CONFIG, layout.FAILURE, layout.START,
                 layout.UPLOADED)  # fmt: skip
        small = {name: mark for name, mark in files.items() if not any(fnmatch(name, pattern) for pattern in apart)}
        copy_run(self.store, self._scratch, small)
        pointers = [f"{layout.CHECKPOINTS}/{pointer}" for pointer in (layout.LATEST, layout.BEST)]
        latest, best = (self.store.read(name).strip() for name in pointers)
        refused: dict[str, str] = {}
        names = [layout.step_name(step) for step in sorted(_steps(files), reverse=True)]
        for name in sorted(names, key=lambda name: name != latest):
            if not (problem := self._download_checkpoint(name)):
                require_same_format(f"{self.where}/{layout.CHECKPOINTS}", name, refused)
                break
            log.warning("checkpoint rejected: %s/%s/%s: %s", self.where, layout.CHECKPOINTS, name, problem)
            self._refused.add(layout.step_number(name) or 0)
            refused[name] = problem
        else:
            if names or latest or layout.UPLOADED in files:  # otherwise the first upload was interrupted
                incomplete = {layout.step_name(step) for step in _steps(files, complete=False)} | {latest}
                refused |= dict.fromkeys(sorted(filter(None, incomplete - refused.keys())), "it is incomplete")
                removed = {layout.CHECKPOINTS: "all were removed"}
                raise none_usable(f"{self.where}/{layout.CHECKPOINTS}", refused or removed)
            return ""
        if best:
            self._scratch.write(pointers[1], best + "\n")
        self._scratch.write(pointers[0], name + "\n")
        if name != latest:  # the checkpoints after it are abandoned
            self.store.write(pointers[0], name + "\n")
        return name

    def _download_checkpoint(self, name: str) -> str:
        return _download(UrlStore(f"{self.where}/{layout.CHECKPOINTS}/{name}"), self.checkpoints.folder / name)

    def _take_over(self) -> str:
        """Claim the URL for this start, and return the content of ``start.json``. An older start that is still running
        detects this before it uploads its next file."""
        self._filled = True
        ends = f"{layout.LOGS}/{layout.RANK_EXITS}"
        self.store.remove(name for name in self.store.files() if name == layout.FAILURE or fnmatch(name, ends))
        self.store.put(self.path / layout.CONFIG, layout.CONFIG)
        start = {"id": secrets.token_hex(8), "host": socket.gethostname(), "time": time.time()}
        text = json.dumps(start) + "\n"
        self.store.write(layout.START, text)
        self._scratch.write(layout.START, text)
        return text

    def attach(self, rank: int, start: Any) -> None:
        """Download the checkpoint that rank 0 resumes from, unless this machine has it, and the log of ``rank``."""
        self.start = start
        text, newest = start
        with self._exclusively():
            if self._scratch.read(layout.START) != text:  # the first rank of a machine without rank 0
                self._filled = True
                shutil.rmtree(self.path, ignore_errors=True)
                self.logs.mkdir(parents=True)
                self.checkpoints.folder.mkdir()
                if newest and (problem := self._download_checkpoint(newest)):
                    place = f"{self.where}/{layout.CHECKPOINTS}/{newest}"
                    raise CheckpointError(problem, where=place, hint="run the same command again")
                self._scratch.write(layout.START, text)
            name = f"{layout.LOGS}/{layout.rank_log(rank)}"
            if not (self.path / name).exists() and (earlier := self.store.read(name)):
                (self.path / name).write_text(earlier, encoding="utf-8")

    def publish(self) -> None:
        if self._uploader.taken_over:
            raise self._not_uploaded()
        self._uploader.request()

    def wait_published(self) -> None:
        self.publish()
        if not self._uploader.wait():
            raise self._not_uploaded()

    def _not_uploaded(self) -> CheckpointError:
        return CheckpointError(
            f"the newest results could not be uploaded: {self._uploader.error or 'the connection is too slow'}",
            where=self.where,
            hint=f"run the same command again, which resumes from the newest checkpoint there; until then "
            f"the results are in {self.path} on {socket.gethostname()}",
        )

    def _upload(self) -> None:
        """Copy what has changed to the URL: the files of rank 0, and the newest and best checkpoint."""
        self._check_owner()
        with self.checkpoints.pinned() as pointers:
            found = self._scratch.files().items()
            files = {name: mark for name, mark in found if self._is_uploaded(name, pointers.values())}
            progress = self._uploader.progress
            # Each file is preceded by a check: uploading a checkpoint takes long.
            copy_run(self._scratch, self.store, files, pointers, self._uploaded, progress, check=self._check_owner)
            if layout.LATEST in pointers and layout.UPLOADED not in self._uploaded:
                self.store.write(layout.UPLOADED, "a checkpoint of this run has been uploaded\n")
                self._uploaded[layout.UPLOADED] = ""
        self._prune(pointers)

    def _prune(self, pointers: Mapping[str, str]) -> None:
        """Remove outdated and incomplete checkpoints from the URL, where ``pointers`` were just written."""
        latest = layout.step_number(pointers.get(layout.LATEST, ""))
        # The best checkpoint may be at the URL only, or not be uploaded yet; then the URL still names the one before.
        named = pointers.get(layout.BEST) or self.store.read(f"{layout.CHECKPOINTS}/{layout.BEST}")
        best = layout.step_number(named)
        self._refused.discard(latest or 0)  # written again
        files = self.store.files()
        complete = _steps(files)
        incomplete = _steps(files, complete=False) - complete - {latest, best}
        self._check_owner()  # the next start's checkpoints may be newer than the latest one here
        for step in [*outdated(complete - self._refused, latest, best, self.checkpoints.keep), *incomplete]:
            # The manifest first: without it, what is left is no checkpoint.
            names = [f"{layout.CHECKPOINTS}/{layout.step_name(step)}/{file}" for file in reversed(_CHECKPOINT_FILES)]
            self.store.remove(names)
            for name in names:
                self._uploaded.pop(name, None)

    @staticmethod
    def _is_uploaded(name: str, checkpoints: Collection[str]) -> bool:
        top, _, rest = name.partition("/")
        if top == layout.CHECKPOINTS:
            return rest.partition("/")[0] in checkpoints
        if top == layout.LOGS:
            return rest == layout.rank_log(0)
        return name not in (layout.START, layout.FAILURE)

    def _check_owner(self) -> None:
        """Raise UploadTakenOver if a later start writes at the URL: their files would mix."""
        if self.start and (start := self.store.read(layout.START)) != self.start[0]:
            if not start:
                raise UploadTakenOver(f"the run was removed: its {layout.START} is missing")
            raise UploadTakenOver(
                f"the run was started again on {json.loads(start)['host']}, and only the newer start may upload its "
                "results"
            )

    def detach(self, rank: int, done: bool) -> None:
        """Upload the log of ``rank``, how it ended, and its failure. Never raises, and takes DETACH_S at most."""
        if self.start is None:
            return
        last = thread(lambda: self._detach(rank, done), "harness-detach")
        last.start()
        last.join(DETACH_S)
        if last.is_alive():
            log.warning("the log of rank %d could not be uploaded to %s within %.0f s", rank, self.where, DETACH_S)

    def _detach(self, rank: int, done: bool) -> None:
        try:
            if rank == 0:  # trackers may have written more
                self._uploader.request()
                done = self._uploader.wait(DETACH_S / 2) and done  # the other half is for the files below
            self._check_owner()
            for name in (layout.rank_log(rank), layout.rank_exit(rank)):
                if (self.logs / name).exists():
                    self.store.put(self.logs / name, f"{layout.LOGS}/{name}")
            with contextlib.suppress(OSError, ValueError):
                report = json.loads((self.path / layout.FAILURE).read_text(encoding="utf-8"))
                if report["rank"] == rank or not self.store.read(layout.FAILURE):
                    self.store.put(self.path / layout.FAILURE, layout.FAILURE)
        except Exception as error:
            log.warning("the log of rank %d could not be uploaded: %s", rank, error)
        else:
            with contextlib.suppress(OSError):
                if done:
                    self._clear(rank)

    def _clear(self, rank: int) -> None:
        """Remove the scratch folder, except the logs of ranks that still run: the last rank removes the folder."""
        if self._filled:
            for path in self.path.iterdir():
                if path != self.logs:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in (layout.rank_log(rank), layout.rank_exit(rank)):
            (self.logs / name).unlink(missing_ok=True)
        self.logs.rmdir()
        self.path.rmdir()

    def _held(self) -> set[str]:
        return {name for name in self.store.files() if name in (*layout.RESULTS, layout.CONFIG)}

    def _is_run(self) -> bool:
        return True  # object stores have no empty folders by which to tell

    def _move_aside(self) -> str:
        """Object stores cannot rename: copy each file, then remove it.

        An interrupted move is repeated by the next start with the same target, which ``start.json`` identifies. It is
        copied first and removed after the checkpoints, so that no start resumes from half of a run. Its change at the
        old place stops an older start that still uploads there.
        """
        start = self.store.read(layout.START)
        names = (f"{self.path.name}.{number}" for number in itertools.count(1))
        siblings = (self.store.sibling(name) for name in names)
        aside = next(other for other in siblings if not other.files() or _same_start(other.read(layout.START), start))
        if start:
            if not aside.read(layout.START):
                aside.write(layout.START, start)
            self.store.write(layout.START, json.dumps({**json.loads(start), "moving": True}) + "\n")
        files = self.store.files()
        pointers = [f"{layout.CHECKPOINTS}/{pointer}" for pointer in (layout.LATEST, layout.BEST)]
        for name in sorted(files.keys() - {layout.START}, key=lambda name: name in pointers):
            self.store.copy(name, aside)
        last = (layout.CONFIG, layout.START)
        first = (layout.UPLOADED, f"{layout.CHECKPOINTS}/")  # without the former, no start misses what follows
        order = sorted(files, key=lambda name: (name in last, name != first[0], not name.startswith(first), name))
        self.store.remove(order)
        shutil.rmtree(self.path, ignore_errors=True)
        return aside.where

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Let one process of this machine at a time fill the scratch folder."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent / "lock", _LOCK_S):
                yield
        except OSError as error:
            raise ConfigError(
                f"the scratch folder of the run cannot be used: {reason(error)}",
                where=str(self.path.parent),
                hint=remedy(
                    error,
                    "or set APEX_HARNESS_CACHE (or data.cache_dir) to a folder on a local disk with room for some "
                    "checkpoints",
                ),
            ) from error


def _same_start(one: str, other: str) -> bool:
    return bool(one and other) and json.loads(one)["id"] == json.loads(other)["id"]


def _steps(files: Mapping[str, str], complete: bool = True) -> set[int]:
    """The steps of the checkpoints in a store; only those that have both files if ``complete``."""
    found: dict[int, set[str]] = {}
    for name in files:
        top, _, rest = name.partition("/")
        folder, _, file = rest.partition("/")
        if top == layout.CHECKPOINTS and (step := layout.step_number(folder)) is not None:
            found.setdefault(step, set()).add(file)
    return {step for step, names in found.items() if not complete or names >= set(_CHECKPOINT_FILES)}


def _download(checkpoint: UrlStore, target: Path) -> str:
    """Copy ``checkpoint`` to the folder ``target``; return the reason why it is unusable, if it is."""
    copy_run(checkpoint, LocalStore(target), dict.fromkeys(_CHECKPOINT_FILES, ""))
    if problem := damage(target):
        shutil.rmtree(target, ignore_errors=True)
    return problem


def borrow(config: Config) -> Path:
    """The local folder of the checkpoint that ``checkpoint.resume`` names; one at a URL is downloaded. Raises
    ConfigError if there is none, CheckpointError if it is damaged."""
    wanted = config.checkpoint.resume
    if is_url(wanted):
        path = working_folder(wanted, config.data.cache_dir, "borrowed")
        problem = _borrow(UrlStore(wanted), path)
    else:
        path = Path(wanted)
        if not path.is_dir():
            hint = did_you_mean(path, os.path.isdir) or (
                "give a checkpoint folder, such as runs/digits/checkpoints/step-100, or use auto or never"
            )
            raise ConfigError(f"there is no checkpoint folder {wanted}", where="checkpoint.resume", hint=hint)
        problem = damage(path)
    if problem:
        raise CheckpointError(problem, where=wanted, hint="choose another, or use checkpoint.resume=auto")
    return path


def _borrow(store: UrlStore, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / "lock", _LOCK_S):
        manifest = store.read(layout.MANIFEST)
        if not manifest:
            raise ConfigError(
                "there is no checkpoint there", where=store.where,
                hint="give a checkpoint, such as s3://BUCKET/runs/NAME/checkpoints/step-100",
            )  # fmt: skip
        if LocalStore(target).read(layout.MANIFEST) == manifest and not damage(target):
            return ""
        return _download(store, target)
