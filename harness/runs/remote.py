"""A run folder at a URL. Training works in a scratch folder of this machine's cache; the URL is authoritative.

Each start fills the scratch folder from the URL. A background thread then mirrors what training writes: the log and
other small files, the newest and the best checkpoint with their manifests last, and then the file ``latest``. So a kill
during an upload costs at most the checkpoint that was on its way, which is trained again with the same result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from typing import Any

from harness.config.schema import Config
from harness.distributed.threads import thread
from harness.errors import CheckpointError, ConfigError
from harness.runs import layout
from harness.runs.borrowed import download
from harness.runs.checkpoints import FROM_SCRATCH, outdated
from harness.runs.fetch import LOCK_S, made_once, writing
from harness.runs.locks import locked
from harness.runs.run_dir import RunFolder, Start, own_checkpoint
from harness.runs.storage import LocalStore, copy_run, working_folder
from harness.runs.uploader import Uploader, UploadTakenOver
from harness.runs.url_store import UrlStore

log = logging.getLogger("harness")

DETACH_S = 10.0  # for a rank's last files to be uploaded: its launcher may be about to kill it
_MOVING = "moving_to"  # in start.json: N, while the run is being moved to NAME.N


def run_folder(config: Config) -> RemoteRunFolder:
    """Return the run folder of ``config``, whose ``output`` is a URL. Raises ConfigError if no run can be kept
    there."""
    if config.output.startswith("memory://"):
        raise ConfigError(
            f"{config.output} exists only in memory: the run would be lost when the process ends", where="output",
            hint="give a folder, or the URL of a store, such as s3://BUCKET/runs",
        )  # fmt: skip
    return RemoteRunFolder(config)


class RemoteRunFolder(RunFolder):
    """``store`` is where the run is kept, ``path`` the scratch folder of this machine, which one process at a time
    fills."""

    def __init__(self, config: Config) -> None:
        self.store = UrlStore(f"{config.output.rstrip('/')}/{config.name}")
        scratch, section = working_folder(self.store.where, config.data.cache_dir), config.checkpoint
        super().__init__(scratch, section.keep, section.format)
        self.where = self.store.where  # starts on other hosts are not locked out; the older one exits
        self._lock_on = self.path.parent  # ``claim`` empties the scratch folder
        self._scratch = LocalStore(self.path)
        self._filled = False  # this process filled the scratch folder, and removes it
        self._uploaded: dict[str, str] = {}
        self._uploader = Uploader(self.where, self._upload)

    def lock(self) -> None:
        with writing(self.path):  # create its parent, in the cache: an error then names the cache
            pass
        super().lock()

    def claim(self, config: Config, rehearse: Callable[[], None] = lambda: None) -> str:
        """Claim the URL as a folder is: fill the scratch folder with the configuration, decide by it, write
        ``start.json``, which ends the uploads of an older start, and only then download what a resume takes."""
        if config.checkpoint.resume.startswith(self.where + "/"):
            raise own_checkpoint(config.checkpoint.resume)
        with contextlib.ExitStack() as stack:
            with writing(self.path):
                stack.enter_context(locked(self.path.with_name(f"{self.path.name}.lock"), LOCK_S))
                self.store.write("writable", "")  # to fail before anything large is downloaded
                self.store.remove(["writable"])
                shutil.rmtree(self.path, ignore_errors=True)
                if _MOVING in self._owner():
                    log.warning("an earlier start was interrupted while it moved a run to %s", self._move_aside())
                with contextlib.suppress(FileNotFoundError):
                    self.store.get(layout.CONFIG, self.path / layout.CONFIG)
            note = super().claim(config, rehearse)  # whose errors may be those of the user's own code
            with writing(self.path):
                # An older start that still runs uploads nothing more, so that the files below do not change.
                text = self._take_over()
                newest = self._download()
            # Other files are uploaded again: the older start may have been in the middle of replacing one.
            prefixes = (layout.CONFIG, f"{layout.CHECKPOINTS}/")
            self._uploaded = {name: mark for name, mark in self._scratch.files().items() if name.startswith(prefixes)}
            self._uploaded[layout.pointer(layout.LATEST)] = newest
            self.start = Start(text, newest)
        return note

    def _download(self) -> str:
        """Fill the scratch folder with what a resume needs; return the name of the newest checkpoint, if there is one.
        Raises CheckpointError if it is damaged."""
        apart = (layout.CONFIG, layout.FAILURE, layout.START)
        files = self.store.files()
        small = {name: mark for name, mark in files.items() if "/" not in name and name not in apart}
        copy_run(self.store, self._scratch, small | _copies_of_hub(files))
        latest, best = (self.store.read(layout.pointer(name)).strip() for name in (layout.LATEST, layout.BEST))
        if not latest:
            return ""
        if problem := self._download_checkpoint(latest):
            folder = f"{self.where}/{layout.CHECKPOINTS}"
            raise CheckpointError(
                f"the newest checkpoint of this run cannot be used: {problem}",
                where=f"{folder}/{latest}",
                hint=f"restore it; or start a new run from an earlier one with name=NAME checkpoint.resume={folder}/"
                f"step-N; or {FROM_SCRATCH}",
            )
        for pointer, name in ((layout.BEST, best), (layout.LATEST, latest)):
            if name:
                self._scratch.write(layout.pointer(pointer), name + "\n")
        return latest

    def _download_checkpoint(self, name: str) -> str | None:
        if layout.step_number(name) is None:
            return f"{name!r} is not the name of a checkpoint"
        return download(UrlStore(f"{self.where}/{layout.CHECKPOINTS}/{name}"), self.checkpoints.folder / name)

    def _take_over(self) -> str:
        """Claim the URL for this start, and return the content of ``start.json``. An older start that is still running
        detects this before it changes what a resume takes."""
        self._filled = True
        ends = f"{layout.LOGS}/{layout.RANK_EXITS}"
        self.store.remove(name for name in self.store.files() if name == layout.FAILURE or fnmatch(name, ends))
        self.store.put(self.path / layout.CONFIG, layout.CONFIG)
        start = {"id": secrets.token_hex(8), "host": socket.gethostname(), "time": time.time()}
        text = json.dumps(start) + "\n"
        self.store.write(layout.START, text)
        self._scratch.write(layout.START, text)
        torn = self.store.files(unfinished=True)
        self.store.remove(name for name in torn if not name.startswith(layout.START))  # which another start may write
        return text

    def attach(self, rank: int, start: Start | None) -> None:
        """Download the checkpoint that rank 0 resumes from, unless this machine has it, and the log of ``rank``."""
        assert start is not None
        self.start = start
        text, newest = start
        with made_once(self.path):
            if self._scratch.read(layout.START) != text:  # the first rank of a machine without rank 0
                self._filled = True
                shutil.rmtree(self.path, ignore_errors=True)
                self.logs.mkdir(parents=True)
                self.checkpoints.folder.mkdir()
                if newest and (problem := self._download_checkpoint(newest)):
                    url = f"{self.where}/{layout.CHECKPOINTS}/{newest}"
                    raise CheckpointError(problem, where=url, hint="run the same command again")
                copy_run(self.store, self._scratch, _copies_of_hub(self.store.files()))
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
            f"the newest results could not be uploaded: {self._uploader.error}",
            where=self.where,
            hint=f"run the same command again, which resumes from the newest checkpoint there; until then "
            f"the results are in {self.path} on {socket.gethostname()}",
        )

    def _upload(self) -> None:
        """Mirror what has changed: the files of rank 0, and the newest and the best checkpoint."""
        self._check_owner()
        with self.checkpoints.pinned() as pointers:
            scratch_files = self._scratch.files().items()
            files = {name: mark for name, mark in scratch_files if self._is_uploaded(name, pointers.values())}
            copy_run(self._scratch, self.store, files, copied=self._uploaded)
            self._check_owner()  # again: a checkpoint takes long
            copy_run(self._scratch, self.store, {}, pointers, self._uploaded)
        self._prune(pointers)

    def _prune(self, pointers: Mapping[str, str]) -> None:
        """Remove outdated and incomplete checkpoints from the URL, where ``pointers`` were just written."""
        # The best checkpoint may be at the URL only, or not be uploaded yet; then the URL still names the one before.
        best_name = pointers.get(layout.BEST) or self.store.read(layout.pointer(layout.BEST))
        latest, best = (layout.step_number(name) for name in (pointers.get(layout.LATEST, ""), best_name))
        files: dict[int, list[str]] = {}
        for name in self.store.files():
            top, _, rest = name.partition("/")
            if top == layout.CHECKPOINTS and (step := layout.step_number(rest.partition("/")[0])) is not None:
                files.setdefault(step, []).append(name)
        complete = {step for step, names in files.items() if any(_is_manifest(name) for name in names)}
        incomplete = files.keys() - complete - {latest, best}
        self._check_owner()  # the next start's checkpoints may be newer than the latest one here
        for step in [*outdated(complete, latest, best, self.checkpoints.keep), *incomplete]:
            # The manifest first: without it, what is left is no checkpoint.
            names = sorted(files[step], key=lambda name: not _is_manifest(name))
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

    def _owner(self) -> dict[str, Any]:
        """Return the content of ``start.json``, of the start that owns the run; empty if there is none."""
        with contextlib.suppress(ValueError):
            content = json.loads(self.store.read(layout.START))
            return content if isinstance(content, dict) else {}
        return {}

    def _check_owner(self) -> None:
        """Raise UploadTakenOver if a later start writes at the URL: their files would mix."""
        if self.start and (start := self.store.read(layout.START)) != self.start.text:
            if not start:
                raise UploadTakenOver(f"the run was removed: its {layout.START} is missing")
            raise UploadTakenOver(
                f"the run was started again on {self._owner().get('host')}, and only the newer start may upload its "
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
                limit_s = DETACH_S / 2  # the other half is for the files below
                uploaded = self._uploader.wait(limit_s)
                done = done and uploaded
                if not (uploaded or self._uploader.taken_over):
                    note = f"until the next start they are in {self.path}"
                    log.warning("the last results were not uploaded to %s within %.0f s; %s", self.where, limit_s, note)
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

        ``start.json`` records the target first, so that the next start completes a move that was interrupted, and an
        older start that still uploads ends.
        """
        start = self._owner()
        number = start.pop(_MOVING, None) or next(n for n in itertools.count(1) if not self._aside(n).files())
        aside = self._aside(number)
        self.store.write(layout.START, json.dumps({**start, _MOVING: number}) + "\n")
        names = sorted(self.store.files().keys() - {layout.START})
        for name in names:
            self.store.copy(name, aside)
        if start:
            aside.write(layout.START, json.dumps(start) + "\n")
        self.store.remove([*names, layout.START])
        shutil.rmtree(self.path, ignore_errors=True)
        return aside.where

    def _aside(self, number: int) -> UrlStore:
        return self.store.sibling(f"{self.path.name}.{number:d}")


def _copies_of_hub(files: Mapping[str, str]) -> dict[str, str]:
    return {name: mark for name, mark in files.items() if name.startswith(layout.OF_HUB)}


def _is_manifest(name: str) -> bool:
    return name.count("/") == 2 and name.endswith(f"/{layout.MANIFEST}")  # not a file of a checkpoint's own folders
