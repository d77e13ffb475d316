"""The run folder of ranks that share no disk with the client: sent to the workers, fetched while it grows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.engines.dask import worker as on_worker
from harness.runs import layout
from harness.runs.checkpoint import damage
from harness.runs.checkpoints import Checkpoints
from harness.runs.files import replacing
from harness.runs.storage import LocalStore, copy_run

_OF_CLIENT = (layout.CONFIG, layout.FAILURE)  # not fetched: a failure is judged from the exit records


class RunFiles:
    """Copies between the run folder of ``checkpoints`` and the folder of each worker. ``ranks``: the ranks of each
    worker, rank 0's worker first.

    ``copy_run`` keeps the client's folder resumable at any moment, even if the client is killed.
    """

    def __init__(
        self, client: Any, checkpoints: Checkpoints, folders: Mapping[str, str], ranks: Mapping[str, Sequence[int]]
    ) -> None:
        self._checkpoints, self._ranks = checkpoints, ranks
        self._local = LocalStore(checkpoints.folder.parent)
        self._first = next(iter(ranks))
        self._stores = {worker: WorkerStore(client, worker, folder) for worker, folder in folders.items()}
        self._copied: dict[str, dict[str, str]] = {worker: {} for worker in ranks}

    def send(self) -> None:
        """Copy what a resume needs: the newest checkpoint to all workers, each rank's log to its worker, the rest to
        rank 0's. Raises OSError."""
        newest, best, files = self._checkpoints.newest(), self._checkpoints.named(layout.BEST), self._local.files()
        without = (layout.FAILURE,) if newest else _OF_CLIENT  # a resume reads the recipe of the run's config.yaml
        for worker, store in self._stores.items():
            pointers = {layout.LATEST: newest.name} if newest else {}
            if best and worker == self._first:
                pointers[layout.BEST] = best
            copy_run(self._local, store, self._chosen(worker, files, pointers, without), pointers)

    def fetch(self, workers: Iterable[str]) -> None:
        """Copy what has changed on ``workers`` to the client. Raises OSError if one of them goes away meanwhile."""
        for worker in workers:
            store = self._stores[worker]
            pointers = {}
            for pointer in (layout.BEST, layout.LATEST) if worker == self._first else ():
                if name := store.read(f"{layout.CHECKPOINTS}/{pointer}").strip():
                    pointers[pointer] = name
            files = store.files()  # after the pointers: what they name is complete
            chosen = self._chosen(worker, files, pointers, _OF_CLIENT)
            copy_run(store, self._local, chosen, pointers, self._copied[worker], problem=self._damage)
            if pointers:
                for step in {*pointers.values()}:  # one that was removed there while it was copied
                    if not (self._checkpoints.folder / step / layout.MANIFEST).exists():
                        shutil.rmtree(self._checkpoints.folder / step, ignore_errors=True)
                self._checkpoints.sweep()

    def _chosen(
        self, worker: str, files: Mapping[str, str], pointers: Mapping[str, str], without: Sequence[str]
    ) -> dict[str, str]:
        """Return the files to copy to or from ``worker``: its ranks' logs, the checkpoints that ``pointers`` name, and
        for rank 0's worker all else except ``without``."""
        logs = {name for rank in self._ranks[worker] for name in (layout.rank_log(rank), layout.rank_exit(rank))}

        def fits(name: str) -> bool:
            top, _, rest = name.partition("/")
            if top == layout.CHECKPOINTS:
                return rest.partition("/")[0] in pointers.values()
            return rest in logs if top == layout.LOGS else worker == self._first and name not in without

        return {name: mark for name, mark in files.items() if fits(name)}

    def _damage(self, step: str) -> str | None:
        return damage(self._checkpoints.folder / step)


class WorkerStore:
    """``folder`` on ``worker``, as a ``harness.runs.storage.Store``. Requests go through the scheduler, large files in
    chunks. Methods raise OSError once the worker is gone."""

    def __init__(self, client: Any, worker: str, folder: str) -> None:
        self._client, self._worker, self._folder = client, worker, folder
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

    def get(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, open(temporary, "wb") as file:
            file.writelines(self._chunks(name))

    def put(self, source: Path, name: str) -> None:
        with open(source, "rb") as file:
            size, offset = os.fstat(file.fileno()).st_size, 0
            while offset < size or offset == 0:
                chunk = file.read(on_worker.CHUNK_BYTES)
                self._ask(on_worker.write_chunk, name, offset, chunk, offset + len(chunk) >= size)
                offset += max(len(chunk), 1)

    def _chunks(self, name: str) -> Iterator[bytes]:
        offset, inode, more = 0, None, True
        while more:
            chunk, more, inode = self._ask(on_worker.read_chunk, name, offset, inode)
            offset += len(chunk)
            yield chunk

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # Connecting to a worker that is gone would take half a minute.
        if self._worker not in self._client.nthreads([self._worker]):
            raise ConnectionError(f"worker {self._worker} is gone")
        answers = self._client.run(on_worker.call, self._folder, function, *arguments, workers=[self._worker])
        return answers[self._worker]
