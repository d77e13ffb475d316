"""A training process from its environment to its exit code."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from harness.config import loader
from harness.config.schema import Config
from harness.distributed.launch_env import Launch, detect
from harness.distributed.meeting import telling_peers
from harness.distributed.runtime import Runtime
from harness.errors import HarnessError, plural
from harness.runs import console
from harness.training import loop
from harness.training.evaluation import final_predictions
from harness.training.exit_report import failed_early
from harness.training.reproducibility import determinism
from harness.training.run_start import RunStart, connected

log = logging.getLogger("harness")


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
            launch = detect(environ, local_rank, parent)
            console.to_terminal(launch.rank, launch.local_rank == 0)
            with telling_peers(launch):
                config = config or loader.load(path, overrides)
            determinism.require(config.train.deterministic)  # before CUDA starts
            runtime = stack.enter_context(connected(launch, config))
            if launch.rank:  # rank 0 describes the run
                log.info(
                    "joined the run: %s of %d on this machine, %s; rank 0 prints the log",
                    plural(launch.local_world_size, "rank"), launch.world_size, runtime.host, extra=console.OF_NODE,
                )  # fmt: skip
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of the user's code, too
            if config is not None and isinstance(error, HarnessError):
                error = loader.placed(error, config)
            return failed_early(launch, error)
        return run_rank(config, runtime)


def run_rank(config: Config, runtime: Runtime) -> int:
    """Train as one rank of a run; return the exit code. Every rank calls it."""
    started = RunStart(config, runtime)
    try:
        with started as run:
            started.done = loop.train(run) and final_predictions.write_for_run(run)
    except BaseException as error:
        if error is not started.error:
            raise
    return started.code
