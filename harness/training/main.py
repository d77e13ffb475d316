"""A training process from start to exit code: environment, configuration, rendezvous, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from harness.config import loader
from harness.config.schema import Config
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch, detect
from harness.distributed.meeting import telling_peers
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.watchdog import exits_without_launcher
from harness.runs import provenance
from harness.training import console, determinism, loop
from harness.training.evaluation import predictions
from harness.training.exit_report import failed_early
from harness.training.optimizer import precision
from harness.training.start import RunStart


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
            return failed_early(launch, error)
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
