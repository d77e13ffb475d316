"""A training process from start to exit code: environment, configuration, rendezvous, training."""

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
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch, detect
from harness.distributed.meeting import telling_peers
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.store import PeersMissing
from harness.distributed.watchdog import exits_without_launcher
from harness.errors import EXIT_FAILURE, HarnessError, readable
from harness.runs import exit_files, provenance
from harness.training import console, determinism, loop, precision, predictions
from harness.training.exit_report import explained, lost_peer
from harness.training.start import RunStart

log = logging.getLogger("harness")

_PRINT_S = 20.0  # for local rank 0 to print an early error; torch's launcher cuts it short once that has exited


def main(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    local_rank: int | None,
    parent: int | None = None,
    config: Config | None = None,
) -> int:
    """Train the experiment of ``path`` as the rank that ``environ`` describes; return the exit code.

    ``parent``: id of the process that started this one. If that is a launcher and ends, this rank ends, too.
    ``config``: that of ``path`` and ``overrides``, if it was loaded before.
    """
    console.to_terminal(int(rank) if (rank := environ.get("RANK", "0")).isdigit() else 0)
    launch = Launch()  # until the environment is understood; an error in it may concern this rank alone
    with ExitStack() as stack:
        try:
            launch = detect(environ, local_rank)
            console.to_terminal(launch.rank)
            with exits_without_launcher(launch, parent):
                with telling_peers(launch):
                    config = config or loader.load(path, overrides)
                determinism.require(config.train.deterministic)  # before CUDA starts
                runtime = stack.enter_context(
                    open_runtime(
                        launch,
                        config.runtime.device,
                        config.runtime.timeout_s,
                        config.runtime.work_timeout_s,
                        facts=lambda device: facts(config, device),
                    )  # fmt: skip
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of the user's code, too
            return fail_early(launch, error)
        return run_rank(config, runtime, parent)


def facts(config: Config, device: torch.device) -> list[Facts]:
    """The values that must be equal on every rank at the start. Raises ConfigError."""
    chosen = precision.choose(config.precision, device, config.needs_our_amp)
    amp: dict[str, Any] = {"amp": chosen.backend}
    if device.type == "cuda" and config.precision.opt_level in ("O4", "O5"):
        amp["bfloat16 support of the GPU"] = torch.cuda.is_bf16_supported(including_emulation=False)
    same = (
        "install the same Apex on every machine, or set precision.backend=harness; use GPUs that support the same "
        "dtypes"
    )
    return [*provenance.facts(config), Facts(same, amp)]


def fail_early(launch: Launch, error: BaseException) -> int:
    """Report an error before the ranks have connected. A HarnessError occurs on every local rank; only local rank 0
    prints it, and a rank that may have been started without one."""
    error = readable(error)
    shown = explained(error)
    exit = RankExit(
        launch.rank, Cause.PEER_LOST if lost_peer(error) or isinstance(error, PeersMissing) else Cause.ERROR,
        shown.exit_code if isinstance(shown, HarnessError) else EXIT_FAILURE, socket.gethostname(),
        error=type(shown).__name__, message=str(shown), time=time.time(),
    )  # fmt: skip
    exit_files.write_for_torch(launch, exit)
    if not isinstance(shown, HarnessError):
        log.error("%s", "".join(traceback.format_exception(error)).rstrip())
    elif launch.local_rank == 0 or (shown.unmet and not launch.supervised):
        log.error("error: %s", shown)
    elif launch.elastic:
        time.sleep(_PRINT_S)  # the launcher ends all ranks at the first exit, also local rank 0 before it has printed
    return exit.exit_code


def run_rank(config: Config, runtime: Runtime, parent: int | None = None) -> int:
    """Train as one rank of a run; return the exit code. Every rank calls it."""
    started = RunStart(config, runtime, parent)
    try:
        with started as run:
            started.done = loop.train(run) and predictions.write_for_run(run)
    except BaseException as error:
        if error is not started.error:
            raise
    return started.code
