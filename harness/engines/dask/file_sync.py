"""The run folder of ranks that share no disk with the client: sent to the workers at the start, fetched while it grows.

``copy_run`` keeps the client's folder resumable at any moment, even if the client is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.engines.dask.store import WorkerStore
from harness.runs import layout
from harness.runs.checkpoint import Checkpoints, damage
from harness.runs.storage import LocalStore, copy_run

BORROWED = "borrowed"  # in a job's scratch folder: the checkpoint of another run that this one starts from
_OF_CLIENT = (layout.CONFIG, layout.FAILURE)  # not fetched: a failure is judged from the exit records


class FileSync:
    """Copies between the run folder ``checkpoints.folder`` is in and those of the workers. ``ranks``: the ranks of each
    worker, rank 0's worker first."""

    def __init__(self, client: Any, job: str, checkpoints: Checkpoints, ranks: Mapping[str, Sequence[int]]) -> None:
        self._checkpoints, self._ranks = checkpoints, ranks
        self._local = LocalStore(checkpoints.folder.parent)
        self._first = next(iter(ranks))
        folder = f"output/{self._local.folder.name}"
        self._stores = {worker: WorkerStore(client, job, worker, folder) for worker in ranks}
        self._borrowed = {worker: WorkerStore(client, job, worker, BORROWED) for worker in ranks}
        self._copied: dict[str, dict[str, str]] = {worker: {} for worker in ranks}

    def send(self, borrowed: Path | None) -> None:
        """Copy what a resume needs: the newest checkpoint to all workers, each rank's log to its worker, the rest to
        rank 0's. ``borrowed``: a checkpoint of another run, for a run without its own. Raises OSError."""
        newest, best, files = self._checkpoints.newest(), self._checkpoints.named(layout.BEST), self._local.files()
        without = (layout.FAILURE,) if newest else _OF_CLIENT  # a resume reads the recipe of the run's config.yaml
        for worker, store in self._stores.items():
            pointers = {layout.LATEST: newest.name} if newest else {}
            if best and worker == self._first:
                pointers[layout.BEST] = best
            copy_run(self._local, store, self._chosen(worker, files, pointers, without), pointers)
            if newest is None and borrowed is not None:
                source = LocalStore(borrowed)
                copy_run(source, self._borrowed[worker], source.files())

    def fetch(self, workers: Iterable[str]) -> None:
        """Copy what has changed on ``workers`` to the client. Raises OSError if one of them goes away meanwhile."""
        for worker in workers:
            store = self._stores[worker]
            pointers = {}
            for pointer in (layout.BEST, layout.LATEST) if worker == self._first else ():
                if name := store.read(f"{layout.CHECKPOINTS}/{pointer}").strip():
                    pointers[pointer] = name
            files = store.files()  # after the pointers: what they name is complete
            copied = self._copied[worker]
            chosen = self._chosen(worker, files, pointers, _OF_CLIENT)
            copy_run(store, self._local, chosen, pointers, copied, problem=self._damage)
            if pointers:
                self._checkpoints.sweep()

    def _chosen(
        self, worker: str, files: Mapping[str, str], pointers: Mapping[str, str], without: Sequence[str]
    ) -> dict[str, str]:
        """The files to copy to or from ``worker``: its ranks' logs, the checkpoints that ``pointers`` name, and for
        rank 0's worker all else except ``without``."""
        logs = {f"{layout.LOGS}/{layout.rank_log(rank)}" for rank in self._ranks[worker]}
        logs |= {f"{layout.LOGS}/{layout.rank_exit(rank)}" for rank in self._ranks[worker]}
        chosen = {}
        for name, mark in files.items():
            top, _, rest = name.partition("/")
            if top == layout.CHECKPOINTS:
                fits = rest.partition("/")[0] in pointers.values()
            elif top == layout.LOGS:
                fits = name in logs
            else:
                fits = worker == self._first and name not in without
            if fits:
                chosen[name] = mark
        return chosen

    def _damage(self, step: str) -> str:
        return damage(self._checkpoints.folder / step)
