"""A training process from its start to its exit code: environment, configuration, run folder, training, failure."""

from __future__ import annotations

import errno
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from harness.config import loader
from harness.config.schema import Config
from harness.distributed import stack
from harness.distributed.launch_env import Launch, detect
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.stop import Stop, on_signals
from harness.distributed.watchdog import Watch, unless_orphaned
from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, HarnessError, TrainingError
from harness.runs import layout, rank_exit, remote
from harness.runs.run_dir import RunFolder, cannot_write, failure_report
from harness.training import build, console, loop, prediction_writer
from harness.training.run import Run
from harness.training.task import SupportsLearned

log = logging.getLogger("harness")

_TELL_S = 20.0  # for the first rank of a node to say what is wrong; torch's launcher cuts it short when it has
_LET_GO_S = 3.0  # for torch's launcher to notice by itself that a machine wants to join; it asks once a second


def main(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    local_rank: int | None,
    parent: int | None = None,
) -> int:
    """Train the experiment of ``path`` as the rank that ``environ`` describes; return the exit code.

    ``parent`` is the process that started this one: if it is a launcher that dies, so does this rank.
    """
    console.to_terminal(int(rank) if (rank := environ.get("RANK", "0")).isdigit() else 0)
    launch = Launch()  # until the environment is understood; what is wrong with it may be so on this rank alone
    try:
        launch = detect(environ, local_rank)
        console.to_terminal(launch.rank)
        with ExitStack() as stack:
            with unless_orphaned(launch, parent):
                config = loader.load(path, overrides)
                runtime = stack.enter_context(open_runtime(launch, config.runtime.device, config.runtime.timeout_s))
            return run_rank(config, runtime, parent)
    except HarnessError as error:
        tell_launcher(launch, error.exit_code, str(error))
        # What is wrong before the ranks meet, all ranks of a node find: its first one tells.
        if launch.local_rank == 0:
            log.error("error: %s", error)
        elif launch.elastic:
            time.sleep(_TELL_S)  # the launcher ends all ranks at the first that leaves, also one that is yet to tell
        return error.exit_code


def run_rank(config: Config, runtime: Runtime, parent: int | None = None) -> int:
    """One rank's part of a run. A failure is reported before it is raised, so that the peers hear of it."""
    folder = remote.run_folder(config)
    stop = Stop(runtime)
    run: Run | None = None
    code = EXIT_FAILURE

    def last_words(
        exit_code: int, how: str, doing: str = "", reason: str = "", at: float = 0.0, everything: str = ""
    ) -> None:
        if folder.claimed:
            rank_exit.leave(folder.logs, runtime.rank, run.state.step if run else 0, exit_code, how, doing, reason)
        tell_launcher(runtime.launch, exit_code, everything or f"{how}: {reason}", at)

    def blocked(doing: str, reason: str) -> None:
        last_words(EXIT_FAILURE, "blocked", doing, reason)
        folder.detach(runtime.rank, done=False)

    with on_signals(stop), Watch(runtime, stop, parent=parent, last_words=blocked) as watch:
        try:
            prepare_folder(config, runtime, folder)
            run = build.build(config, runtime, folder, stop)
            announce(run)
            done = loop.train(run) and prediction_writer.write_for_run(run)
            deliver(folder, runtime, done)
            finish(run, done)
            runtime.barrier()
            code = EXIT_DONE if done else EXIT_STOPPED
            last_words(code, "done" if done else "stopped", reason=stop.reason)
            if not done:
                let_go(runtime.launch, stop)
        except Exception as error:
            at, doing = _since(error), stack.raised_at(error)  # the first to fail is the last to leave
            code = fail(folder, runtime, watch, run, error)
            reason, everything = str(error).strip().partition("\n")[0], "".join(traceback.format_exception(error))
            last_words(code, "failed", watch.doing or doing, reason, at, everything)
        finally:
            if run is not None:
                run.close()
            folder.detach(runtime.rank, done=code == EXIT_DONE)
            folder.unlock()
    return code


def tell_launcher(launch: Launch, exit_code: int, text: str, when: float = 0.0) -> None:
    """Leave the last words of this rank where torch's launcher looks for them."""
    if launch.error_file:
        facts = {"rank": launch.rank, "world_size": launch.world_size, "exit_code": exit_code}
        rank_exit.tell_launcher(launch.error_file, when or time.time(), text, **facts)


def let_go(launch: Launch, stop: Stop) -> None:
    """Wait a moment for the signal that made a rank of another machine stop, for this machine's launcher may be about
    to send it too: a machine that joins makes every launcher start its ranks anew, one after the other, and one whose
    ranks are gone before that takes them for failed."""
    if launch.elastic and launch.world_size > launch.local_world_size:
        until = time.monotonic() + _LET_GO_S
        while not stop.reason and time.monotonic() < until:
            time.sleep(0.05)


def prepare_folder(config: Config, runtime: Runtime, folder: RunFolder) -> None:
    """The run folder as this start's, on every rank. Collective."""
    told = runtime.patiently(
        "preparing the run folder", lambda: claim(config, runtime, folder) if runtime.rank == 0 else ""
    )
    folder.claimed = True
    start = runtime.from_first(folder.start)
    runtime.patiently("fetching the run", lambda: folder.attach(runtime.rank, start))
    with runtime.together("opening the logs"):
        try:
            if runtime.launch.local_rank == 0 < runtime.rank:
                folder.forget_end()  # another machine has a folder of its own where the disk is not shared
            console.to_file(folder.logs, runtime.rank)
        except OSError as error:
            raise cannot_write(folder.logs, error) from None
    if told:
        log.info(told)


def claim(config: Config, runtime: Runtime, folder: RunFolder) -> str:
    """Take the folder for this start, on rank 0; what to tell the user of what was there. A run is moved aside only for
    one that can begin."""
    folder.lock()
    return folder.claim(config, lambda: build.rehearse(config, runtime.world_size))


def deliver(folder: RunFolder, runtime: Runtime, done: bool) -> None:
    """Wait until everything is where the run is kept. A run that was stopped before its end only tells that something
    did not arrive: the same command goes on from what did. Collective."""
    try:
        runtime.patiently("uploading the results", lambda: folder.wait_published() if runtime.rank == 0 else None)
    except HarnessError as error:
        if done:
            raise
        if error.told_by in (None, runtime.rank):
            log.error("error: %s", error)


def announce(run: Run) -> None:
    """Say what is about to happen, and record on what."""
    runtime, config = run.runtime, run.config
    card = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
    topology = runtime.gather(f"{runtime.host}: {runtime.device} ({card})")
    size = build.sizes(config, run.train_data.num_rows, runtime.world_size)
    facts = build.describe(config, run.task, size, runtime.world_size, runtime.device, run.precision.backend)
    facts |= {"parallel": run.parallel.strategy, "launched by": runtime.launch.by, "run folder": run.folder.where}
    for name, value in facts.items():
        log.info("%14s: %s", name, value)
    with runtime.together("recording provenance"):
        if runtime.rank == 0:
            run.folder.provenance(runtime, run.precision.backend, topology)
            run.folder.learned(run.task.learned if isinstance(run.task, SupportsLearned) else {})
    if run.finished():
        log.info("nothing left to train: step %d was the last; a larger train.epochs goes on with it", run.state.step)


def finish(run: Run, done: bool) -> None:
    """The last lines: what came out, or how to go on."""
    state, config = run.state, run.config
    if not done:
        log.info(
            "stopped early (%s) at step %d, with a checkpoint; the same command goes on from it",
            run.stop.reason or "a peer was",
            state.step,
        )
        return
    last = state.history[-1] if state.history else {}
    shown = "  ".join(f"{key} {value:.4f}" for key, value in last.items() if key in config.task.metrics)
    log.info("held-out: %s", shown)
    if state.best is not None:
        log.info("best %s %.4f at step %d", config.best_metric, state.best, state.best_step)
    log.info(
        "throughput: %.0f rows/s in training, %d rows in %.1f s in all", run.throughput(), state.rows, run.wall_s()
    )
    log.info("run folder: %s", run.folder.where)


def fail(folder: RunFolder, runtime: Runtime, watch: Watch, run: Run | None, error: Exception) -> int:
    """Report ``error`` once: in failure.json by the rank that failed first, on its terminal, in every rank's log."""
    runtime.failed = True
    if isinstance(error, HarnessError) and error.told_by not in (None, runtime.rank):
        watch.acknowledge()
        return error.exit_code  # raised by all ranks together; the one whose error it is tells it
    shown = _explained(error)
    report = failure_report(runtime, run.state.step if run else 0, shown, traceback.format_exception(error))
    known = watch.report(report)
    written = folder.failure(known or report) if folder.claimed else known or report
    first = known or written  # where the ranks cannot talk any more, the file decides
    if first["rank"] != runtime.rank:
        log.info("ended, since rank %s failed; %s tells why", first["rank"], f"{folder.where}/{layout.FAILURE}")
        return int(first["exit_code"])
    if isinstance(shown, HarnessError):
        log.error("error: %s", shown)
        log.debug("%s", traceback.format_exc())
    else:
        log.error("%s", "".join(traceback.format_exception(error)).rstrip())
    watch.linger()
    return int(report["exit_code"])


def _since(error: Exception) -> float:
    """Now, as torch's launcher is told. It counts whole seconds: a consequence must not look as early as its cause."""
    return time.time() + bool(_lost_peer(error))


def _explained(error: Exception) -> Exception:
    """``error``, or what it means to a user where its own words do not say so."""
    if lost := _lost_peer(error):
        return TrainingError(
            f"{rank_exit.LOST_CONTACT}: {lost}",
            hint="the log of the rank that died tells more; one that was killed from outside says nothing",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return TrainingError(
            f"a file could not be written: {error.strerror}",
            where=str(error.filename or ""),
            hint="mend that and start the same command again: it goes on from the last checkpoint",
        )
    return error


def _lost_peer(error: Exception) -> str:
    """What a collective says when a peer is gone; empty for any other error."""
    text = str(error)
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Timed out",
        "timed out",
        "Broken pipe",
        "Connection refused",
        "NCCL",
    )
    is_collective = isinstance(error, torch.distributed.DistError) or "gloo" in text.lower()
    return text.strip().splitlines()[0] if is_collective and any(sign in text for sign in signs) else ""


__all__ = ["Launch", "main", "run_rank"]
