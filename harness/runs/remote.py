"""A run folder at a URL: training works in a folder of this machine's cache, and the URL is kept in step with it.

The URL is the truth. Whatever moment a run is killed at, it holds a whole state: what a checkpoint vouches for, such as
the record and the best weights, goes there before it, and ``latest`` names it after that. The folder in the cache is
believed only where it is of the newest start, which ``start.json`` in both tells, and has all that the URL has: then
the URL is brought up to date from it, and nothing that a kill kept from arriving is lost. Links, threads and protocols
live in ``outbox``, ``courier`` and ``url_folder``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from harness.config.schema import Config
from harness.errors import CheckpointError, ConfigError
from harness.runs.checkpoint import Checkpoints, damage, outdated
from harness.runs.files import is_url, write_atomically
from harness.runs.layout import START
from harness.runs.run_dir import RunFolder, own_checkpoint
from harness.runs.snapshot import Identity, Outbox, Parcel, identify
from harness.runs.storage import UrlFolder, working_folder
from harness.runs.uploader import Courier, Refused

log = logging.getLogger("harness")

LEAVE_S = 10.0  # for the last words of a rank to arrive: its launcher may be about to kill it
_LOCK_S = 3600.0  # for another process of this machine, which may be fetching a large checkpoint
_MOVED = "moved-to"
_HERE = ("config.yaml", "metrics.jsonl", "summary.json", "weights.safetensors")  # without which a folder is not whole
_STEP = re.compile(r"checkpoints/step-(\d+)/(state\.pt|manifest\.json)")


def run_folder(config: Config) -> RunFolder:
    """The run folder of ``config``, which is ``OUTPUT/NAME``. Raises ConfigError for a URL of no known kind."""
    return MirroredFolder(config) if is_url(config.output) else RunFolder(Path(config.output) / config.name)


class MirroredFolder(RunFolder):
    """``url`` is where the run is, ``path`` where this machine works on it."""

    def __init__(self, config: Config) -> None:
        self.url = UrlFolder(f"{config.output.rstrip('/')}/{config.name}")
        super().__init__(working_folder(self.url.url, config.data.cache_dir))
        self._place = self.path.parent
        self.where = self.url.url  # an earlier start on another machine is not held off: it ends
        self._keep = config.checkpoint.keep
        self._arrived: dict[str, Identity] = {}  # what the URL has, as it was when it was sent
        self._steps: set[int] = set()  # checkpoints at the URL
        self._mine = False  # this process brought the folder here, and takes it away
        self._moved = False
        self._outbox: Outbox | None = None
        self._courier: Courier[Parcel] = Courier(self.where, self._bring, Outbox.drop)

    def claim(self, config: Config, rehearse: Callable[[], None] = lambda: None) -> str:
        """As of any run folder, with the URL's content fetched into the cache, or the URL brought up to date from it.
        Raises ConfigError where the URL cannot be used or written."""
        if config.checkpoint.resume.startswith(self.url.url + "/"):
            raise own_checkpoint(config.checkpoint.resume)
        with self._preparing():
            self._outbox = Outbox(self._place / "outbox")
            self.url.write("writable", "")  # before anything big is fetched
            self.url.remove(["writable"])
            self._finish_moving()
            there = self.url.sizes()
            newest = self._is_newest(there)
            if not newest:
                shutil.rmtree(self.path, ignore_errors=True)
                if "config.yaml" in there:
                    self.url.get("config.yaml", self.path / "config.yaml")
            told = super().claim(config, rehearse)
            there = {} if self._moved else there
            self._steps = {int(found[1]) for name in there if (found := _STEP.fullmatch(name))}
            if newest and not self._moved:
                parcel = self._pack()
                self._bring(parcel)
                self._outbox.drop(parcel)
            else:
                self._fetch(there)
            self._begin(there)
        return told

    def _is_newest(self, there: dict[str, int]) -> bool:
        """Whether the folder in the cache has what the URL has and may have more: the URL's newest start was made
        here, and nothing is missing or damaged."""
        start = self._local(START)
        if not start or start != self.url.read(START):
            return False
        if any(name in there and not (self.path / name).is_file() for name in _HERE):
            return False
        whole = Checkpoints(self.checkpoints, self._keep).newest()
        named = self._local("checkpoints/latest").strip()
        if (whole.name if whole else "") != named:
            return False
        mine, known = _step(named), _step(self.url.read("checkpoints/latest"))
        return known is None or (mine is not None and mine >= known)

    def _fetch(self, there: dict[str, int]) -> None:
        """The newest whole checkpoint of the URL, and all else that a resume needs, into the cache."""
        chosen = self._fetch_newest(there)
        for name in there:
            if not name.startswith(("checkpoints/", "logs/")) and name not in ("config.yaml", "failure.json", START):
                self.url.get(name, self.path / name)
                self._arrived[name] = identify(self.path / name)
        latest, best = (self.url.read(f"checkpoints/{pointer}") for pointer in ("latest", "best"))
        if best:
            write_atomically(self.checkpoints / "best", best)
        if chosen:
            write_atomically(self.checkpoints / "latest", chosen + "\n")
            if chosen != (latest or "").strip():  # what comes after it is abandoned, there too
                self.url.write("checkpoints/latest", chosen + "\n")

    def _fetch_newest(self, there: dict[str, int]) -> str:
        """The name of the checkpoint that was fetched; empty if there is none that is whole."""
        named = (self.url.read("checkpoints/latest") or "").strip()
        names = [f"step-{step}" for step in sorted(self._steps, reverse=True)]
        for name in sorted(names, key=lambda name: name != named):
            files = {f"checkpoints/{name}/{file}" for file in ("state.pt", "manifest.json")}
            if files <= there.keys():
                problem = self._fetch_checkpoint(name)
                if not problem:
                    return name
            else:
                problem = "it was not written to its end"
            log.warning("checkpoint refused: %s/checkpoints/%s: %s", self.where, name, problem)
            self._steps.discard(int(name[len("step-") :]))  # it must not take the place of one that is whole
        return ""

    def _fetch_checkpoint(self, name: str) -> str:
        """What is wrong with the checkpoint ``name`` of the URL; it is in the cache if nothing is."""
        folder = self.checkpoints / name
        for file in ("manifest.json", "state.pt"):
            self.url.get(f"checkpoints/{name}/{file}", folder / file)
            self._arrived[f"checkpoints/{name}/{file}"] = identify(folder / file)
        if problem := damage(folder):
            shutil.rmtree(folder)
        return problem

    def _begin(self, there: dict[str, int]) -> None:
        """From here on the URL is this start's."""
        self._mine = True
        self.url.remove(name for name in there if name == "failure.json" or name.endswith(".end.json"))
        self.url.put(self.path / "config.yaml", "config.yaml")
        start = {"id": secrets.token_hex(8), "host": socket.gethostname(), "time": time.time()}
        newest = self._local("checkpoints/latest").strip()
        self.begun = (json.dumps(start) + "\n", newest)
        self.url.write(START, self.begun[0])
        write_atomically(self.path / START, self.begun[0])

    def join(self, rank: int, begun: Any) -> None:
        """Fetch the checkpoint that rank 0 goes on from, unless this machine has it, and this rank's log."""
        self.begun = begun
        start, newest = begun
        with self._preparing():
            if self._local(START) != start:  # neither rank 0 nor a rank before this one works in this folder
                self._mine = True
                shutil.rmtree(self.path, ignore_errors=True)
                if newest and (problem := self._fetch_checkpoint(newest)):
                    raise CheckpointError(problem, where=f"{self.where}/checkpoints/{newest}", hint="start it again")
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                self.logs.mkdir(exist_ok=True)
                write_atomically(self.path / START, start)
            name = f"logs/rank-{rank}.log"
            if not (self.path / name).exists() and (earlier := self.url.read(name)):
                (self.path / name).write_text(earlier, encoding="utf-8")

    def changed(self) -> None:
        if self._courier.refused:
            raise self._not_there()
        self._courier.send(self._pack())

    def deliver(self) -> None:
        """Wait until the URL has all that is written. Raises CheckpointError if it does not get there."""
        self.changed()
        if not self._courier.wait():
            raise self._not_there()

    def _not_there(self) -> CheckpointError:
        why = str(self._courier.trouble or "it goes too slowly")
        return CheckpointError(
            f"the newest results did not arrive there: {why}",
            where=self.where,
            hint=f"they are in {self.path}: start the same command again on {socket.gethostname()}, which brings them",
        )

    def _pack(self) -> Parcel:
        """All of the folder but what other ranks bring, and checkpoints that neither are the newest nor the best."""
        pointers = {name: self._local(f"checkpoints/{name}").strip() for name in ("latest", "best")}
        ways = {f"checkpoints/{name}" for name in ("latest", "best", *filter(None, pointers.values()))}
        files = (Path(folder, file) for folder, _, names in os.walk(self.path) for file in names)
        names = []
        for path in files:
            name = path.relative_to(self.path).as_posix()
            top = name.partition("/")[0]
            if top == "checkpoints" and not {name, name.rpartition("/")[0]} & ways:
                continue
            others = top == "logs" and not name.startswith("logs/rank-0.")
            passing = name in (START, "failure.json") or name.endswith(".tmp") or path.is_symlink()
            if not others and not passing:
                names.append(name)
        assert self._outbox is not None  # made by claim
        return self._outbox.pack(self.path, names, self._arrived, pointers)

    def _bring(self, parcel: Parcel) -> None:
        """Bring ``parcel`` to the URL, in the order in which a kill at any moment does no harm."""
        assert self._outbox is not None
        self._check_ours()
        for name in sorted(parcel.files, key=_turn):
            identity, link = parcel.files[name]
            if self._arrived.get(name) == identity:  # since it was packed, or in an attempt that failed later
                continue
            self.url.put(self._outbox.whole(identity, link), name, self._courier.moved)
            self._arrived[name] = identity
            if found := _STEP.fullmatch(name):
                self._steps.add(int(found[1]))
        latest, best = (_step(parcel.pointers[name]) for name in ("latest", "best"))
        for step in outdated(self._steps, latest, best, self._keep):
            files = [f"checkpoints/step-{step}/{file}" for file in ("manifest.json", "state.pt")]
            self.url.remove(files)
            self._steps.discard(step)
            for name in files:
                self._arrived.pop(name, None)

    def _check_ours(self) -> None:
        """Two starts that write at one URL would mix their files: the earlier one leaves it to the later."""
        if self.begun and (start := self.url.read(START)) != self.begun[0]:
            by = f" on {json.loads(start)['host']}" if start else ", or somebody removed the run"
            raise Refused(f"another start of this run{by} has taken it over")

    def leave(self, rank: int, done: bool) -> None:
        """The last words of ``rank``: its log, its end, and the failure if it was its own. Never raises, and does not
        take long. What is done and has arrived is removed from the cache."""
        if self.begun is None:
            return
        ended = threading.Thread(target=self._last, args=(rank, done), name="harness-leave", daemon=True)
        ended.start()
        ended.join(LEAVE_S)
        if ended.is_alive():
            log.warning("the log of rank %d did not arrive at %s within %.0f s", rank, self.where, LEAVE_S)

    def _last(self, rank: int, done: bool) -> None:
        try:
            if self._outbox is not None:  # rank 0 has more to bring, such as what trackers wrote last
                self._courier.send(self._pack())
                done = self._courier.wait(LEAVE_S) and done
            self._check_ours()
            for name in (f"logs/rank-{rank}.log", f"logs/rank-{rank}.end.json"):
                if (self.path / name).exists():
                    self.url.put(self.path / name, name)
            with contextlib.suppress(OSError, ValueError):
                report = json.loads((self.path / "failure.json").read_text(encoding="utf-8"))
                if report["rank"] == rank or self.url.read("failure.json") is None:
                    self.url.put(self.path / "failure.json", "failure.json")
        except Exception as error:
            log.warning("the log of rank %d did not arrive: %s", rank, error)
        else:
            with contextlib.suppress(OSError):
                if done:
                    self._clear(rank)

    def _clear(self, rank: int) -> None:
        """Leave nothing of a run in the cache that is done and has arrived, but for the logs of ranks that still run:
        the last one to leave removes the folder."""
        if self._mine:
            (self.path / START).unlink(missing_ok=True)  # first: what is left is no whole folder
            for path in self.path.iterdir():
                if path != self.logs:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.rmtree(self._place / "outbox", ignore_errors=True)
        for path in self.logs.glob(f"rank-{rank}.*"):
            path.unlink()
        with contextlib.suppress(OSError):
            self.logs.rmdir()
            self.path.rmdir()

    def _move_aside(self) -> str:
        """Object stores cannot rename: the files are copied there and removed here. ``moved-to`` is there meanwhile,
        so that a move that was cut short is gone on with."""
        names = (f"{self.path.name}.{number}" for number in itertools.count(1))
        aside = next(name for name in names if not self.url.beside(name).sizes())
        self.url.write(_MOVED, aside)
        self._finish_moving()
        shutil.rmtree(self.path, ignore_errors=True)
        self._moved = True
        return self.url.beside(aside).url

    def _finish_moving(self) -> None:
        if not (name := self.url.read(_MOVED)):
            return
        aside, files = self.url.beside(name), [name for name in self.url.sizes() if name != _MOVED]
        for file in files:
            self.url.copy(file, aside)
        self.url.remove([*files, _MOVED])

    def _local(self, name: str) -> str:
        """The text of a small file in the cache; empty if there is none."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except OSError:
            return ""

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """One process of this machine at a time; what its disk refuses is told as such."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self._place / "lock", timeout=_LOCK_S):
                yield
        except (filelock.Timeout, NotImplementedError, OSError) as error:
            raise ConfigError(
                f"the run cannot be worked on here: {getattr(error, 'strerror', None) or error}",
                where=str(self._place),
                hint="set APEX_HARNESS_CACHE (or data.cache_dir) to a folder on a local disk with room for some "
                "checkpoints",
            ) from error


def borrow(config: Config) -> Path:
    """The checkpoint that ``checkpoint.resume`` names, on this machine: fetched where that is a URL. Raises ConfigError
    where there is none, CheckpointError where it is damaged."""
    wanted = config.checkpoint.resume
    if is_url(wanted):
        path = working_folder(wanted, config.data.cache_dir, "borrowed")
        problem = _fetch_borrowed(UrlFolder(wanted), path)
    else:
        path = Path(wanted)
        if not path.is_dir():
            raise ConfigError(
                f"there is no checkpoint folder {wanted}",
                where="checkpoint.resume",
                hint="name one such as runs/digits/checkpoints/step-100, or use auto or never",
            )
        problem = damage(path)
    if problem:
        raise CheckpointError(problem, where=wanted, hint="name another one, or use checkpoint.resume=auto")
    return path


def _fetch_borrowed(source: UrlFolder, target: Path) -> str:
    """Have the checkpoint ``source`` at ``target``; return what is wrong with it."""
    target.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.parent / "lock", timeout=_LOCK_S):
        manifest, here = source.read("manifest.json"), target / "manifest.json"
        if manifest is None:
            raise ConfigError(
                "there is no checkpoint there", where=source.url,
                hint="name one such as s3://BUCKET/runs/NAME/checkpoints/step-100",
            )  # fmt: skip
        if here.exists() and here.read_text(encoding="utf-8") == manifest and not damage(target):
            return ""
        source.get("state.pt", target / "state.pt")
        source.get("manifest.json", here)
        return damage(target)


def _turn(name: str) -> tuple[int, str]:
    """Who goes first to the URL."""
    last = ("/state.pt", "/manifest.json", "checkpoints/latest")
    return next((number for number, end in enumerate(last, 1) if name.endswith(end)), 0), name


def _step(name: str | None) -> int | None:
    found = re.fullmatch(r"step-(\d+)", (name or "").strip())
    return int(found[1]) if found else None
