"""The files of a job on one worker's disk, as a ``harness.runs.storage.Store``.

Requests go through the scheduler while the ranks train, large files in chunks. Torch is not imported, since the second
half of this module runs on the workers.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.engines.dask import worker as on_worker
from harness.runs.files import commit, replacing, temporary_for
from harness.runs.storage import LocalStore, Progress, no_progress

CHUNK_BYTES = 8 << 20


class WorkerStore:
    """``folder`` of the job's scratch folder on ``worker``. Methods raise OSError once the worker is gone."""

    def __init__(self, client: Any, job: str, worker: str, folder: str) -> None:
        self._client, self._job, self._worker, self._folder = client, job, worker, folder
        self.where = f"{worker}:{folder}"

    def files(self) -> dict[str, str]:
        found: dict[str, str] = self._ask(LocalStore.files)
        return found

    def read(self, name: str) -> str:
        return str(self._ask(LocalStore.read, name))

    def write(self, name: str, text: str) -> None:
        self._ask(LocalStore.write, name, text)

    def remove(self, names: Iterable[str]) -> None:
        self._ask(LocalStore.remove, list(names))

    def get(self, name: str, target: Path, progress: Progress = no_progress) -> None:
        """Replace ``target``, or append to it what the file has grown by since the last call."""
        target.parent.mkdir(parents=True, exist_ok=True)
        here, size = LocalStore(target.parent), target.stat().st_size if target.is_file() else 0
        if size and self._ask(crc_of_start, name, size) == crc_of_start(here, target.name, size):
            with open(target, "ab") as file:
                file.writelines(self._chunks(name, size))
            return
        with replacing(target) as temporary, open(temporary, "wb") as file:
            file.writelines(self._chunks(name))

    def put(self, source: Path, name: str, progress: Progress = no_progress) -> None:
        with open(source, "rb") as file:
            size, offset = os.fstat(file.fileno()).st_size, 0
            while offset < size or offset == 0:
                chunk = file.read(CHUNK_BYTES)
                self._ask(write_chunk, name, offset, chunk, offset + len(chunk) >= size)
                offset += max(len(chunk), 1)

    def _chunks(self, name: str, offset: int = 0) -> Iterator[bytes]:
        inode, more = None, True
        while more:
            chunk, more, inode = self._ask(read_chunk, name, offset, inode)
            offset += len(chunk)
            yield chunk

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # Connecting to a worker that is gone would take half a minute.
        if self._worker not in self._client.nthreads([self._worker]):
            raise ConnectionError(f"worker {self._worker} is gone")
        words = (self._job, self._folder, function, *arguments)
        return self._client.run(call, *words, workers=[self._worker])[self._worker]


# On the worker


async def call(job: str, folder: str, function: Callable[..., Any], *arguments: Any, dask_worker: Any) -> Any:
    """``function(store, *arguments)`` for the job's ``folder``, in a thread. A restarted worker has no files."""
    store = LocalStore(on_worker.scratch_of(job, dask_worker) / folder)
    return await asyncio.to_thread(function, store, *arguments)


def read_chunk(store: LocalStore, name: str, offset: int, inode: int | None) -> tuple[bytes, bool, int]:
    """(bytes from ``offset`` on, whether more follow, inode). Pass the inode of the previous call: FileNotFoundError is
    raised if the file was replaced since."""
    with open(store.folder / name, "rb") as file:
        found = os.fstat(file.fileno()).st_ino
        if inode not in (None, found):
            raise FileNotFoundError(f"{name} was replaced")
        file.seek(offset)
        content = file.read(CHUNK_BYTES)
        return content, bool(file.read(1)), found


def write_chunk(store: LocalStore, name: str, offset: int, content: bytes, last: bool) -> None:
    """Write ``content`` at ``offset``; with the ``last`` chunk the file gets its name."""
    target = store.folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary_for(target), "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(content)
    if last:
        commit(temporary_for(target), target)


def crc_of_start(store: LocalStore, name: str, size: int) -> int:
    """CRC-32 of the first ``size`` bytes; -1, which is none, if the file is shorter."""
    value = 0
    with open(store.folder / name, "rb") as file:
        while size > 0 and (chunk := file.read(min(size, CHUNK_BYTES))):
            value, size = zlib.crc32(chunk, value), size - len(chunk)
    return value if size == 0 else -1
