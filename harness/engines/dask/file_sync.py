"""The run folder of ranks that share no disk with the client: sent out to resume from, and brought home as it grows.

All goes through the scheduler, in chunks, beside the tasks; ``dask_disk`` is the other end. At home a kill at any
moment leaves what a resume can use: files are replaced whole or grow at their end, a checkpoint is checked before it
takes its name, and `latest` names it only then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.engines.dask import worker_files
from harness.engines.dask.worker_files import Listing, crc_of, listing, on_disk, read, write
from harness.runs.checkpoint import Checkpoints, damage
from harness.runs.files import write_atomically
from harness.runs.rank_exit import LOST_CONTACT

FOREIGN = "from"  # in a job's folder on a worker: a checkpoint of another run that this one starts from
_OURS = ("config.yaml", "failure.json")  # written at home: the former before the start, the latter when it is known
_APART = (*_OURS, "checkpoints/")


class Home:
    """The run folder ``folder`` of this machine, and the copies of it that the ranks work in."""

    def __init__(self, client: Any, job: str, folder: Path, keep: int, ranks: Mapping[str, Sequence[int]]) -> None:
        """``ranks``: those of each worker, rank 0's first. ``keep``: checkpoints that stay, beside the best."""
        self._client, self._job, self._folder, self._ranks = client, job, folder, ranks
        self._first = next(iter(ranks))
        self._run_folder = f"output/{folder.name}"
        self._checkpoints = Checkpoints(folder / "checkpoints", keep)
        self._known: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._failures: dict[str, dict[str, Any]] = {}

    # Out

    def send(self, foreign: Path | None) -> None:
        """What the ranks need to go on: the newest whole checkpoint to all, the rest of the run to rank 0, each its
        log. ``foreign``: a checkpoint of another run, for a run that has none of its own yet."""
        newest = self._checkpoints.newest()
        if newest is not None:
            self._send_checkpoints(newest)
        elif foreign is not None:
            self._send_folder(list(self._ranks), foreign, FOREIGN)
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder)
            if name.parts[0] not in ("checkpoints", "logs", *_OURS) and path.is_file():
                self._send_file([self._first], path, f"{self._run_folder}/{name.as_posix()}")
        for worker, ranks in self._ranks.items():
            for log in (f"logs/rank-{rank}.log" for rank in ranks):
                self._send_file([worker], self._folder / log, f"{self._run_folder}/{log}")

    def _send_checkpoints(self, newest: Path) -> None:
        folder = f"{self._run_folder}/checkpoints"
        self._send_folder(list(self._ranks), newest, f"{folder}/{newest.name}")
        best = self._pointer("best")
        if best not in ("", newest.name):
            self._send_folder([self._first], self._checkpoints.folder / best, f"{folder}/{best}")
        self._ask(write, [self._first], f"{folder}/latest", 0, f"{newest.name}\n".encode())
        self._send_file([self._first], self._checkpoints.folder / "best", f"{folder}/best")

    def _send_folder(self, workers: Sequence[str], source: Path, name: str) -> None:
        for path in sorted(source.rglob("*")):
            self._send_file(workers, path, f"{name}/{path.relative_to(source).as_posix()}")

    def _send_file(self, workers: Sequence[str], source: Path, name: str) -> None:
        if not source.is_file():
            return
        with open(source, "rb") as file:
            offset = 0
            while (chunk := file.read(worker_files.CHUNK_BYTES)) or offset == 0:
                self._ask(write, workers, name, offset, chunk)
                offset += max(len(chunk), 1)

    # Home

    def fetch(self, workers: Iterable[str]) -> None:
        """Bring home what has changed on ``workers``, those of the job that live. Raises OSError where one of them or
        the scheduler goes away in the middle of it; what came before that is whole."""
        for worker in workers:
            found: Listing = self._ask(listing, [worker], self._run_folder)[worker]
            news = [name for name in sorted(found) if self._known.get((worker, name)) != found[name]]
            for name in news:
                if name == "failure.json":
                    self._fetch_failure(worker)
                elif name.startswith("logs/") or (worker == self._first and not name.startswith(_APART)):
                    self._fetch_file(worker, name)
            if worker == self._first and any(name.startswith("checkpoints/") for name in news):
                self._fetch_checkpoints([name for name in found if name.endswith("/manifest.json")])
            self._known |= {(worker, name): found[name] for name in news}

    def _fetch_file(self, worker: str, name: str) -> None:
        """Replace the file at home, or write what it has grown by at its end."""
        target = self._folder / name
        temporary = target.with_name(target.name + ".tmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        size = target.stat().st_size if target.is_file() else 0
        with suppress(FileNotFoundError):  # taken away or replaced since it was listed
            there = f"{self._run_folder}/{name}"
            if size and self._ask(crc_of, [worker], there, size)[worker] == crc_of(target, size):
                with open(target, "ab") as file:
                    for chunk in self._chunks(worker, name, size):
                        file.write(chunk)
                return
            with open(temporary, "wb") as file:
                for chunk in self._chunks(worker, name):
                    file.write(chunk)
            temporary.replace(target)
        temporary.unlink(missing_ok=True)

    def _fetch_checkpoints(self, manifests: Sequence[str]) -> None:
        """The checkpoints of rank 0, what its pointers name first; each pointer once what it names is here."""
        pointers = {name: self._text(f"checkpoints/{name}") for name in ("latest", "best")}
        steps = [name.split("/")[1] for name in manifests]
        for step in dict.fromkeys([*filter(None, pointers.values()), *steps]):
            self._fetch_checkpoint(step)
        changed = [name for name, step in pointers.items() if step and step != self._pointer(name)]
        for name in changed:
            if (self._checkpoints.folder / pointers[name]).is_dir():
                write_atomically(self._checkpoints.folder / name, pointers[name] + "\n")
        if changed:
            self._checkpoints.sweep()

    def _fetch_checkpoint(self, step: str) -> None:
        final, temporary = (self._checkpoints.folder / name for name in (step, f"{step}.tmp"))
        manifest = self._text(f"checkpoints/{step}/manifest.json")
        if not manifest or manifest == _text_of(final / "manifest.json"):
            return
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with suppress(FileNotFoundError):  # swept away since it was listed
            with open(temporary / "state.pt", "wb") as file:
                for chunk in self._chunks(self._first, f"checkpoints/{step}/state.pt"):
                    file.write(chunk)
            write_atomically(temporary / "manifest.json", manifest + "\n")
            if not damage(temporary):
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)

    def _fetch_failure(self, worker: str) -> None:
        """Each rank may tell of a failure here: one that tells of more than lost peers is taken."""
        with suppress(ValueError, FileNotFoundError):  # of a file that is being written, the rest comes later
            self._failures[worker] = json.loads(b"".join(self._chunks(worker, "failure.json")))
        told = sorted(self._failures.values(), key=lambda report: str(report.get("message")).startswith(LOST_CONTACT))
        if told:
            write_atomically(self._folder / "failure.json", json.dumps(told[0], indent=1) + "\n")

    def _text(self, name: str) -> str:
        """A small file of rank 0; empty if there is none."""
        try:
            return b"".join(self._chunks(self._first, name)).decode().strip()
        except FileNotFoundError:
            return ""

    def _pointer(self, name: str) -> str:
        return _text_of(self._checkpoints.folder / name)

    def _chunks(self, worker: str, name: str, offset: int = 0) -> Iterator[bytes]:
        rest, known = False, None
        while not rest:
            answer = self._ask(read, [worker], f"{self._run_folder}/{name}", offset, known)
            chunk, rest, known = answer[worker]
            offset += len(chunk)
            yield chunk

    def _ask(self, function: Callable[..., Any], workers: Sequence[str], *words: Any) -> dict[str, Any]:
        """Its answer by worker. One that is gone is known before: to try to connect to it would take half a minute."""
        if gone := set(workers) - set(self._client.nthreads(list(workers))):
            raise ConnectionError(f"worker {min(gone)} is gone")
        answers: dict[str, Any] = self._client.run(on_disk, self._job, function, *words, workers=list(workers))
        return answers


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
