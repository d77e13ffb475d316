"""Loader processes: how batches and errors reach the rank, which signals they obey, and how they end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from harness.data.batch import Batch
from harness.distributed.threads import thread
from harness.errors import ConfigError, HarnessError, TrainingError, WorkerKilled, first_line, portable, users_line

SHARED_MEMORY = "/dev/shm"
PREFETCH = 2  # batches that each worker keeps ready
MORE_SHARED_MEMORY = (
    f"give {SHARED_MEMORY} more space (docker run --shm-size=8g; in Kubernetes, an emptyDir with medium: Memory), "
    "lower the batch size or data.num_workers, or set data.num_workers=0, which needs no shared memory"
)
MIB = 2**20
_POLL_S = 0.5  # between two calls of ``while_waiting``
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_DEATHS = {
    signal.SIGKILL: (
        "sent by the OOM killer, a user or a scheduler",
        "see dmesg; lower data.num_workers or the batch size",
    ),
    signal.SIGBUS: (f"usually because {SHARED_MEMORY} is full", MORE_SHARED_MEMORY),
}
_CRASH = ("a crash in a library that the dataset uses", "set data.num_workers=0 to see where it happens")


class WorkerTraceback(Exception):
    """The formatted traceback of a loader worker, to be printed as the cause of its error, or in place of the error's
    own. ``errors.users_line`` reads its ``users_line``."""

    def __init__(self, trace: list[str], users_line: str) -> None:
        super().__init__("\n" + "".join(trace))
        self.worker_trace, self.users_line = trace, users_line


@dataclass(frozen=True)
class LoadError:
    """An exception of a dataset, on its way to the rank. Torch would wrap its text in a traceback."""

    error: Exception
    trace: list[str]
    users_line: str

    @classmethod
    def of(cls, error: Exception) -> LoadError:
        return cls(portable(error), traceback.format_exception(error), users_line(error))

    def reraise(self) -> NoReturn:
        """Raise the exception. Only one that is not a HarnessError needs the traceback of the worker, as its cause."""
        if isinstance(self.error, HarnessError):
            raise self.error from None
        raise self.error from WorkerTraceback(self.trace, self.users_line)


@dataclass(frozen=True)
class PickledResult:
    """A batch or an error, pickled by the worker itself.

    Torch pickles in a thread, which drops what it cannot pickle or find shared memory for, and the rank would wait
    forever.
    """

    content: bytes

    def received(self) -> Batch | LoadError:
        result: Batch | LoadError = pickle.loads(self.content)
        return result

    def pin_memory(self) -> Batch | LoadError:
        result = self.received()
        return result.pin_memory() if isinstance(result, Batch) else result


def pickle_result(result: Batch | LoadError) -> PickledResult:
    """Return ``result`` pickled, or the error for which it cannot be."""
    try:
        return PickledResult(bytes(ForkingPickler.dumps(result)))
    except Exception as error:
        return PickledResult(bytes(ForkingPickler.dumps(LoadError.of(_unsendable(result, error)))))


def _unsendable(result: Batch | LoadError, error: Exception) -> Exception:
    """Return the error of a rank whose worker could not send ``result`` because of ``error``."""
    if isinstance(result, Batch) and "shared memory" in str(error):
        return _without_space(result, error)
    message = f"a batch of the dataset cannot be sent to the rank: {error}"
    if "AF_UNIX" in str(error):  # of a socket in the folder for temporary files
        return TrainingError(message, hint="export TMPDIR=/tmp, or set data.num_workers=0")
    return RuntimeError(message).with_traceback(error.__traceback__)


def _without_space(batch: Batch, error: Exception) -> TrainingError:
    """Return the error for ``batch``, with its size and the space that there is."""
    num_bytes = batch.inputs.nbytes + batch.targets.nbytes
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
        space = f"{usage.free / MIB:.1f} of {usage.total / MIB:.1f} MiB are free"
    except OSError as missing:
        space = str(missing)
    return TrainingError(
        f"a loader worker could not put a batch of {num_bytes / MIB:.1f} MiB into shared memory: {first_line(error)}",
        where=f"{SHARED_MEMORY} ({space})",
        hint=MORE_SHARED_MEMORY,
    )


def require_shared_memory(batch_bytes: float, num_workers: int, num_ranks: int) -> None:
    """Raise ConfigError if ``num_ranks`` ranks on this machine cannot keep all batches of their workers, of
    ``batch_bytes`` bytes each, in shared memory."""
    num_bytes = batch_bytes * num_ranks * (num_workers * PREFETCH + 1)  # and the batch that the rank works on
    if not num_workers or not os.path.isdir(SHARED_MEMORY):
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    if usage.free < num_bytes:
        raise ConfigError(
            f"the loader workers of this machine need up to {num_bytes / MIB:.1f} MiB in {SHARED_MEMORY}, which has "
            f"{usage.free / MIB:.1f} of {usage.total / MIB:.1f} MiB free",
            where=f"data.num_workers={num_workers}",
            hint=MORE_SHARED_MEMORY,
        )


class WatchedDataLoader(DataLoader[Any]):
    """A DataLoader that calls ``while_waiting`` twice per second while its workers deliver nothing. It may raise."""

    while_waiting: Callable[[], None]

    def _get_iterator(self) -> Any:
        return _WatchedIterator(self) if self.num_workers else super()._get_iterator()


class _WatchedIterator(_MultiProcessingDataLoaderIter):
    def __init__(self, loader: WatchedDataLoader) -> None:
        self._while_waiting = loader.while_waiting
        self._packed: SimpleQueue[PickledResult | None] = SimpleQueue()
        self._unpacked: SimpleQueue[Batch | LoadError | Exception] = SimpleQueue()
        # Workers inherit the mask: until in_loader_worker has run in one, a signal to all processes would end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *_IGNORED})
        try:
            super().__init__(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # In a thread: unpacking asks the worker for its shared memory, and waits forever for one that is frozen.
        thread(self._unpack, "harness-unpack").start()

    def _try_get_data(self, timeout: float = _POLL_S) -> tuple[bool, Any]:
        success, indexed_result = super()._try_get_data(_POLL_S)
        if not success:
            self._while_waiting()
        elif isinstance(indexed_result, tuple) and isinstance(indexed_result[1], PickledResult):
            self._packed.put(indexed_result[1])  # even if the batch is no longer needed: this frees its memory
            indexed_result = (indexed_result[0], self._next_unpacked())
        return success, indexed_result

    def _next_unpacked(self) -> Batch | LoadError:
        while True:
            try:
                result = self._unpacked.get(timeout=_POLL_S)
            except Empty:
                self._while_waiting()
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def _unpack(self) -> None:
        while (packed := self._packed.get()) is not None:
            try:
                self._unpacked.put(packed.received())
            except Exception as error:
                self._unpacked.put(error)

    def _shutdown_workers(self) -> None:
        self._packed.put(None)
        if not hasattr(self, "_workers_status"):  # which is set when all workers have started
            return
        super()._shutdown_workers()
        for worker in self._workers:
            if worker.is_alive():  # frozen, so SIGTERM waits; this process would wait for it at its exit
                worker.kill()

    def kill_workers(self) -> None:
        """Kill the processes. Torch would wait 5 s for each that is blocked."""
        if self._worker_pids_set:  # otherwise torch raises an error for each that dies
            _remove_worker_pids(id(self))
            self._worker_pids_set = False
        for worker in self._workers:
            worker.kill()


def worker_death(error: Exception, workers: Sequence[BaseProcess] = ()) -> TrainingError | None:
    """Return the error of a rank whose loader worker died, if torch raised ``error`` for it; None for other errors.

    Torch notices while it waits for a batch, or by a signal, which raises its error at any place.
    """
    lost = re.match(r"DataLoader worker \(pid(?:\(s\))? (\d+).*?\) (?:is killed by signal: (.*?)\.|exited)", str(error))
    if isinstance(error, OSError | EOFError):  # a connection to a worker that is about to be gone
        for worker in workers:
            with suppress(RuntimeError):  # torch's own, by a signal
                worker.join(_POLL_S)
    codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
    if lost is None and not codes:
        return None
    killed_by = next((each for each in signal.Signals if lost and signal.strsignal(each) == lost[2]), None)
    killed_by = killed_by or next((signal.Signals(-code) for code in codes if code < 0), None)
    if killed_by is None:
        code = f" with exit code {codes[0]}" if codes else ""
        ending = f"exited{code}"
        cause, hint = "the dataset, or a library that it uses, ended the process", _CRASH[1]
    else:
        ending = f"was killed by {killed_by.name}"
        cause, hint = _DEATHS.get(killed_by, _CRASH)
    kind = WorkerKilled if killed_by is signal.SIGKILL else TrainingError
    return kind(f"a loader worker{f' (process {lost[1]})' if lost else ''} {ending}: {cause}", hint=hint)


def in_loader_worker(_: int) -> None:
    """Set up the signals of a loader process so that only its parent ends it.

    Launchers and schedulers signal every process of a rank. If a loader died of the signal, the rank would fail while
    it writes its checkpoint. So Ctrl-C, SIGHUP and SIGUSR1 are ignored, and SIGTERM is, too, unless the parent sent it.
    Programs that a dataset starts inherit this and outlive the signal, too: a dataset must end them with ``kill()``.
    When the parent is killed, a loader exits within a second: until then it holds the parent's connections open, and no
    peer notices the loss.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if sys.platform == "linux" and rank is not None:  # other systems do not report the sender of a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = os.getppid()
        thread(lambda: _exit_with(rank, parent), "harness-signals").start()


def _exit_with(rank: BaseProcess, parent_pid: int) -> None:
    # With the start method forkserver, the parent process is a server that lives as long as this process.
    while rank.is_alive() and os.getppid() == parent_pid:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)
