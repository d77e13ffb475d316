"""One start of a run on one rank: meeting of the ranks, run folder, building of the run, report of its end.

with connected(launch, config) as runtime, RunStart(config, runtime) as run:
    ...  # training
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from harness.config import loader
from harness.config.places import is_url
from harness.config.schema import Config
from harness.distributed import signals
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop, on_signals
from harness.distributed.watchdog import Watchdog
from harness.errors import EXIT_DONE, EXIT_FAILURE, HarnessError
from harness.runs import console, provenance
from harness.runs.run_dir import RunFolder, cannot_write
from harness.training import build, description
from harness.training.exit_report import ExitReporter
from harness.training.optimizer import emulated_half, precision
from harness.training.run import Run

log = logging.getLogger("harness")

_LAUNCHER_S = 3.0  # for torch's launcher to notice that a machine wants to join; it polls once per second


def connected(launch: Launch, config: Config) -> AbstractContextManager[Runtime]:
    """Context with the other ranks of ``launch``, which have the same ``facts``. Collective."""
    section = config.runtime
    limits = section.timeout_s, section.work_timeout_s
    return open_runtime(launch, section.device, *limits, facts=lambda device: facts(config, device))


def facts(config: Config, device: torch.device) -> list[Facts]:
    """Return the values that must be equal on every rank at the start. Raises ConfigError."""
    chosen = precision.choose(config.precision, device, config.needs_our_amp)
    amp: dict[str, Any] = {"amp": chosen.backend}
    if device.type == "cuda" and config.precision.opt_level in ("O4", "O5"):
        amp["bfloat16 support of the GPU"] = torch.cuda.is_bf16_supported(including_emulation=False)
    hint = (
        "install the same Apex on every machine, or set precision.backend=harness; use GPUs that support the same "
        "dtypes"
    )
    return [*provenance.facts(config), Facts(hint, amp)]


class RunStart:
    """One start of a run on one rank: it claims the run folder, builds the run, and in the end reports how it ended.

    A context with the run as its value. Every rank enters it. An error, of the body too, is reported to the other
    ranks, in failure.json and, with ``shown``, on the terminal; then it leaves the context."""

    def __init__(self, config: Config, runtime: Runtime, shown: bool = True) -> None:
        self.config, self.runtime = config, runtime
        self.done = False
        """Set it in the body: False, the default, means stopped early, with a checkpoint to resume from."""
        self.code = EXIT_FAILURE
        self.error: BaseException | None = None
        self._pid = os.getpid()
        self._stop = Stop(runtime)
        self._reporter = ExitReporter(runtime, shown=shown)

    @property
    def run(self) -> Run | None:
        """The run, once it is built."""
        return self._reporter.run

    def __enter__(self) -> Run:
        config, runtime, reporter = self.config, self.runtime, self._reporter
        with ExitStack() as stack:
            stack.enter_context(on_signals(self._stop, unfinished=lambda: self.run.progress.rest() if self.run else ""))
            watching = Watchdog(runtime, self._stop, on_blocked=reporter.blocked, step=reporter.step)
            self._watchdog = stack.enter_context(watching)
            stack.callback(self._close)
            try:
                with runtime.together("finding the run folder"):
                    folder = reporter.folder = run_folder(config)
                prepare_folder(config, runtime, folder)
                stack.enter_context(emulated_half.half_on_cpu(config.precision, runtime.device))
                if config.model.compile:
                    with runtime.announced("loading the compiler"):
                        from harness.training.model import compiled  # late: few runs need it

                        stack.enter_context(compiled.fresh_compiler())
                run = reporter.run = build.build(config, runtime, folder, self._stop)
                if not folder.claimed:
                    take_over_finished(runtime, folder)
                description.announce(run)
            except BaseException as error:
                self._failed(error)
                raise
            self._contexts = stack.pop_all()
        return run

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_if_forked(error)
        with self._contexts:
            if error is not None:
                self._failed(error)
                return
            try:
                self._end()
            except BaseException as late:
                self._failed(late)
                raise

    def _end(self) -> None:
        run = self.run
        assert run is not None  # built by __enter__
        deliver(run.folder, self.runtime, self.done)
        description.conclude(run, self.done)
        self.runtime.barrier()
        self.code = self._reporter.ended(self.done, self._stop.reason)
        if not self.done:
            wait_for_launcher(self.runtime.launch, self._stop)

    def _failed(self, error: BaseException) -> None:
        """Report ``error``, unless it is how Python ends a process or a generator."""
        self._end_if_forked(error)
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            return
        if isinstance(error, HarnessError):
            loader.placed(error, self.config)
        self.error = error
        self.code = self._reporter.failed(error, self._watchdog)

    def _end_if_forked(self, error: BaseException | None) -> None:
        """End a process that the user's code has forked, as Python would. The run belongs to its parent, which goes on:
        its files, connections and locks are not for this process to close."""
        if os.getpid() == self._pid:
            return
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(code, str):
            print(code, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))

    def _close(self) -> None:
        signals.finish(self.code)
        if self.run is not None:
            self.run.close()
        if folder := self._reporter.folder:
            folder.detach(self.runtime.rank, done=self.code == EXIT_DONE)
            folder.unlock()


def run_folder(config: Config) -> RunFolder:
    """Return the folder OUTPUT/NAME. Raises ConfigError for a URL at which no run can be kept."""
    if is_url(config.output):
        from harness.runs import remote  # late: it imports fsspec, which few runs need

        return remote.run_folder(config)
    return RunFolder(Path(config.output) / config.name, config.checkpoint.keep, config.checkpoint.format)


def wait_for_launcher(launch: Launch, stop: Stop) -> None:
    """Wait a moment for this machine's launcher to send the signal that stopped a rank of another machine.

    When a machine joins, the launchers restart their ranks one after the other. A launcher whose ranks are gone before
    it signals them counts them as failed. Where no machine can join, waiting would only delay the exit, and the
    restarted pod of another machine could connect to a rank that is about to end.
    """
    if launch.may_grow and launch.world_size > launch.local_world_size:
        until = time.monotonic() + _LAUNCHER_S
        while not stop.reason and time.monotonic() < until:
            time.sleep(0.05)


def prepare_folder(config: Config, runtime: Runtime, folder: RunFolder) -> None:
    """Claim the run folder for this start, and open its logs on every rank. Collective.

    A finished run on a disk stays finished, and is not ``claimed``, until ``take_over_finished``; a finished run at a
    URL is claimed at once.
    """
    note = runtime.patiently(
        "preparing the run folder", lambda: claim(config, runtime, folder) if runtime.rank == 0 else ""
    )
    start, folder.claimed = runtime.from_first((folder.start, folder.done_at is None))
    runtime.patiently("fetching the run", lambda: folder.attach(runtime.rank, start))
    with runtime.together("opening the logs"):
        try:
            if runtime.launch.local_rank == 0 < runtime.rank and folder.claimed:
                folder.forget_end()  # without a shared disk each machine has its own folder
            console.to_file(folder.logs, runtime.rank)
        except OSError as error:
            raise cannot_write(folder.logs, error) from None
    if note:
        log.info(note)


def take_over_finished(runtime: Runtime, folder: RunFolder) -> None:
    """Claim the folder of a finished run, now that nothing keeps this start from its first step. Collective."""
    with runtime.together("taking over the run"):
        if runtime.launch.local_rank == 0:
            try:
                folder.forget_end()
            except OSError as error:
                raise cannot_write(folder.path, error) from None
    folder.claimed = True


def claim(config: Config, runtime: Runtime, folder: RunFolder) -> str:
    """Claim the folder, on rank 0; return a note for the user about an earlier run in it. That run is moved aside only
    if the new one passes a rehearsal."""
    folder.lock()
    return folder.claim(config, lambda: build.rehearse(config, runtime.world_size))


def deliver(folder: RunFolder, runtime: Runtime, done: bool) -> None:
    """Wait until all results are stored. A failed upload ends a finished run with an error; a stopped run only logs it,
    since the same command resumes from what was uploaded. Collective."""

    def work() -> None:
        if runtime.rank == 0:
            folder.wait_published()

    try:
        runtime.patiently("uploading the results", work)
    except HarnessError as error:
        if done:
            raise
        if error.origin_rank in (None, runtime.rank):
            log.error("error: %s", error)
