"""A training process from start to exit code: environment, configuration, rendezvous, run folder, training."""

from __future__ import annotations

import logging
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from harness.config import loader
from harness.config.schema import Config
from harness.distributed import signals
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch, detect
from harness.distributed.launch_store import PeersMissing
from harness.distributed.meeting import telling_peers
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.stop import Stop, on_signals
from harness.distributed.watchdog import Watchdog, exits_without_launcher
from harness.errors import EXIT_DONE, EXIT_FAILURE, HarnessError
from harness.runs import exit_files, provenance, remote
from harness.runs.run_dir import RunFolder, cannot_write
from harness.training import build, console, determinism, loop, optim, precision, prediction_writer
from harness.training.exit_report import ExitReporter, explained, lost_peer
from harness.training.run import Run
from harness.training.task import SupportsLearned

log = logging.getLogger("harness")

_PRINT_S = 20.0  # for local rank 0 to print an early error; torch's launcher cuts it short once that has exited
_LAUNCHER_S = 3.0  # for torch's launcher to notice that a machine wants to join; it polls once per second


def main(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    local_rank: int | None,
    parent: int | None = None,
) -> int:
    """Train the experiment of ``path`` as the rank that ``environ`` describes; return the exit code.

    ``parent``: id of the process that started this one. If that is a launcher and ends, this rank ends, too.
    """
    console.to_terminal(int(rank) if (rank := environ.get("RANK", "0")).isdigit() else 0)
    launch = Launch()  # until the environment is understood; an error in it may concern this rank alone
    with ExitStack() as stack:
        try:
            launch = detect(environ, local_rank)
            console.to_terminal(launch.rank)
            with exits_without_launcher(launch, parent):
                with telling_peers(launch):
                    config = loader.load(path, overrides)
                determinism.require(config.train.deterministic)  # before CUDA starts
                runtime = stack.enter_context(
                    open_runtime(
                        launch, config.runtime.device, config.runtime.timeout_s, lambda device: facts(config, device)
                    )
                )
        except Exception as error:
            return fail_early(launch, error)
        return run_rank(config, runtime, parent)


def facts(config: Config, device: torch.device) -> list[Facts]:
    """The values that must be equal on every rank at the start. Raises ConfigError."""
    chosen = precision.choose(config.precision, device, config.needs_our_amp)
    amp: dict[str, Any] = {"amp": chosen.backend}
    wanted = (config.precision.cast_model_type, config.precision.cast_model_outputs)
    if device.type == "cuda" and (config.precision.opt_level in ("O4", "O5") or "bfloat16" in wanted):
        amp["bfloat16 of the GPU"] = torch.cuda.is_bf16_supported(including_emulation=False)
    same = "install the same Apex on every machine, or set precision.backend=harness; use GPUs with the same types"
    return [*provenance.facts(config), Facts(same, amp)]


def fail_early(launch: Launch, error: Exception) -> int:
    """Report an error before the ranks have connected. A HarnessError occurs on every local rank; only local rank 0
    prints it."""
    shown = explained(error)
    exit = RankExit(
        launch.rank, Cause.PEER_LOST if lost_peer(error) or isinstance(error, PeersMissing) else Cause.ERROR,
        shown.exit_code if isinstance(shown, HarnessError) else EXIT_FAILURE, socket.gethostname(),
        error=type(shown).__name__, message=str(shown), time=time.time(),
    )  # fmt: skip
    exit_files.write_for_torch(launch, exit)
    if not isinstance(shown, HarnessError):
        log.error("%s", "".join(traceback.format_exception(error)).rstrip())
    elif launch.local_rank == 0:
        log.error("error: %s", shown)
    elif launch.elastic:
        time.sleep(_PRINT_S)  # the launcher ends all ranks at the first exit, also local rank 0 before it has printed
    return exit.exit_code


def run_rank(config: Config, runtime: Runtime, parent: int | None = None) -> int:
    """Train as one rank of a run; return the exit code. Every rank calls it."""
    folder = remote.run_folder(config)
    stop = Stop(runtime)
    reporter = ExitReporter(runtime, stop, folder)
    run: Run | None = None
    code = EXIT_FAILURE
    watching = Watchdog(runtime, stop, parent=parent, on_blocked=reporter.blocked, step=reporter.step)
    with on_signals(stop), watching as watchdog, precision.float16_on_cpu(config.precision, runtime.device):
        try:
            prepare_folder(config, runtime, folder)
            run = reporter.run = build.build(config, runtime, folder, stop)
            announce(run)
            done = loop.train(run) and prediction_writer.write_for_run(run)
            deliver(folder, runtime, done)
            finish(run, done)
            runtime.barrier()
            code = reporter.ended(done, stop.reason)
            if not done:
                wait_for_launcher(runtime.launch, stop)
        except (Exception, SystemExit) as error:
            code = reporter.failed(error, watchdog)
        finally:
            signals.finish(code)
            if run is not None:
                run.close()
            folder.detach(runtime.rank, done=code == EXIT_DONE)
            folder.unlock()
    return code


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
    """Claim the run folder for this start, and open its logs on every rank. Collective."""
    note = runtime.patiently(
        "preparing the run folder", lambda: claim(config, runtime, folder) if runtime.rank == 0 else ""
    )
    folder.claimed = True
    start = runtime.from_first(folder.start)
    runtime.patiently("fetching the run", lambda: folder.attach(runtime.rank, start))
    with runtime.together("opening the logs"):
        try:
            if runtime.launch.local_rank == 0 < runtime.rank:
                folder.forget_end()  # without a shared disk each machine has its own folder
            console.to_file(folder.logs, runtime.rank)
        except OSError as error:
            raise cannot_write(folder.logs, error) from None
    if note:
        log.info(note)


def claim(config: Config, runtime: Runtime, folder: RunFolder) -> str:
    """Claim the folder, on rank 0; return a note for the user about an earlier run in it. That run is moved aside only
    if the new one passes a rehearsal."""
    folder.lock()
    return folder.claim(config, lambda: build.rehearse(config, runtime.world_size))


def deliver(folder: RunFolder, runtime: Runtime, done: bool) -> None:
    """Wait until all results are stored. A failed upload ends a finished run with an error; a stopped run only logs it,
    since the same command resumes from what was uploaded. Collective."""
    try:
        runtime.patiently("uploading the results", lambda: folder.wait_published() if runtime.rank == 0 else None)
    except HarnessError as error:
        if done:
            raise
        if error.origin_rank in (None, runtime.rank):
            log.error("error: %s", error)


def announce(run: Run) -> None:
    """Log what this start will train and on what, and record its provenance."""
    runtime, config = run.runtime, run.config
    card = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
    topology = runtime.gather(f"{runtime.host}: {runtime.device} ({card})")
    size = build.sizes(config, run.train_data.num_rows, runtime.world_size)
    facts = build.describe(config, run.task, size, runtime.world_size, runtime.device, run.precision.backend)
    facts |= optim.described(run.optimizer, run.module)
    facts |= {"parallel": run.parallel.strategy, "launched by": runtime.launch.by, "run folder": run.folder.where}
    for name, value in facts.items():
        log.info("%14s: %s", name, value)
    first = runtime.rank == 0
    code = runtime.patiently("asking git for commits", lambda: provenance.code(config) if first else {})
    with runtime.together("recording provenance"):
        if runtime.rank == 0:
            if not run.finished():
                run.folder.write_config()
            start = provenance.of_start(runtime, run.precision.backend, topology, code)
            if run.weights:
                start["weights"] = run.weights
            for warning in run.folder.add_start(start):
                log.warning("%s", warning)
            run.folder.learned(run.task.learned if isinstance(run.task, SupportsLearned) else {})
    if run.finished():
        log.info("nothing left to train: step %d was the last; raise train.epochs to train longer", run.state.step)


def finish(run: Run, done: bool) -> None:
    """Log the results, or how to resume."""
    state, config = run.state, run.config
    if not done:
        log.info(
            "stopped early (%s) at step %d, with a checkpoint; the same command resumes from it",
            run.stop.reason or "by another rank",
            state.step,
        )
        return
    last = state.history[-1] if state.history else {}
    shown = "  ".join(f"{key} {value:.4f}" for key, value in last.items() if key in config.task.metrics)
    log.info("validation: %s", shown)
    if state.best is not None:
        log.info("best %s %.4f at step %d", config.best_metric, state.best, state.best_step)
    steps = f"{state.skipped} skipped step{'s' if state.skipped > 1 else ''}"
    skipped = f" ({state.rows_skipped} of them in {steps})" if state.skipped else ""
    log.info(
        "throughput: %.0f rows/s in training, %d rows%s in %.1f s overall",
        run.throughput(), state.rows, skipped, run.wall_s(),
    )  # fmt: skip
    log.info("run folder: %s", run.folder.where)
