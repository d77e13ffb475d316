"""Engine flyte: a workflow of one task, whose source is written here, run by flytekit on this machine.

On a cluster the same source is registered and run by ``pyflyte run --remote``, which is Flyte's own tool for it. What
the task does lives in ``harness.engines.flyte.task``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness.distributed.monitor import Outcome
from harness.engines.base import Job, refuse
from harness.errors import LaunchError

FILE = "flyte_workflow.py"
OUTCOME = "HARNESS_FLYTE_OUTCOME"  # names the file in which the task tells this engine what it saw of the ranks
_POLL_S = 0.1
_ORPHANS_S = 30.0  # for ranks whose task was killed to notice it, write a checkpoint and end
_KILL_S = 20.0  # beyond the ranks' own grace period

_SOURCE = '''r"""Trains an experiment of apex-harness on Flyte. Copy this page, edit what the task asks for, and run it:

{local}
{remote}

The first trains on this machine, in the working folder. The second does on a cluster: the image holds the project, and
`output` of the configuration should lie on a disk or in a store that outlives the pods.
"""

from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile
{elastic_import}
from harness.engines.flyte.task import Results, {body}

MACHINE = Resources({resources})


@task({task_config}
    container_image={image},  # with the project in it; a run of this machine uses none
    requests=MACHINE,
    limits=MACHINE,
    shared_memory=True,  # loader processes hand their batches over in it
    retries={retries},  # from the newest checkpoint, after a stop or a failure; a wrong configuration is not retried
)
def train(config: FlyteFile, overrides: list[str]) -> Results:
    """{ranks}"""
    return {body}(config.download(), overrides)


@workflow
def experiment(config: FlyteFile, overrides: list[str] = []) -> Results:  # noqa: B006 - Flyte copies it
    """The best weights, the metrics of each epoch, the summary, the whole record and the report of an experiment."""
    return train(config=config, overrides=overrides)
'''


def render(job: Job) -> str:
    _check(job)
    settings = job.settings
    several = settings.nnodes > 1
    asked = {"cpu": settings.flyte.cpu, "mem": settings.flyte.memory, "gpu": str(settings.flyte.gpu or "") or None}
    elastic = f"Elastic(nnodes={settings.nnodes}, nproc_per_node={settings.nproc}, monitor_interval=1)"
    workflow, config, *overrides = (shlex.join(pair) for pair in _inputs(job))
    words = [f"{FILE} {workflow} {config}", *overrides]
    return _SOURCE.format(
        local=" \\\n    ".join(["pyflyte run", *words]),
        remote=" \\\n    ".join(["pyflyte run --remote -p PROJECT -d DOMAIN", *words]),
        elastic_import="from flytekitplugins.kfpytorch import Elastic\n" if several else "",
        body="train_rank" if several else "train_node",
        resources=", ".join(f'{name}="{amount}"' for name, amount in asked.items() if amount),
        task_config=f"\n    task_config={elastic}," if several else "",
        image=f'"{settings.flyte.image}"' if settings.flyte.image else None,
        retries=settings.max_restarts,
        ranks="One rank, on one of the machines that the Kubeflow plugin starts."
        if several
        else "One machine, with launch.nproc ranks of the configuration.",
    )


def start(job: Job) -> Flyte:
    _check(job)
    if job.settings.nnodes > 1:
        raise _for_a_cluster(job, f"launch.nnodes={job.settings.nnodes}: flytekit's local runner knows one machine")
    if job.settings.max_restarts:
        raise _for_a_cluster(job, f"launch.max_restarts={job.settings.max_restarts}: flytekit's local runner has none")
    if not job.settings.python and importlib.util.find_spec("flytekit") is None:
        raise LaunchError(
            "engine flyte needs flytekit, which is not installed", hint="pip install 'apex-harness[flyte]'"
        )
    return Flyte(job)


class Flyte:
    """flytekit's local runner as a process of its own, with its files in a folder that is removed afterwards."""

    def __init__(self, job: Job) -> None:
        self._grace_s = job.settings.grace_s
        self._folder = tempfile.TemporaryDirectory(prefix="harness-flyte-")
        self._deadline = float("inf")
        self._stopped = False
        self._told = Path(self._folder.name, "outcome.json")
        page = Path(self._folder.name, FILE)
        page.write_text(render(job), encoding="utf-8")
        python = job.settings.python or sys.executable
        runner = [python, "-m", "flytekit.clis.sdk_in_container.pyflyte", "run", str(page)]
        environ = {**os.environ, "TMPDIR": self._folder.name, OUTCOME: str(self._told)}
        # All that comes of the runner inherits the reading end: with its last reader nothing is left of the run, and
        # with the writing end this process is gone.
        reading, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*runner, *(word for words in _inputs(job) for word in words)],
                env=environ,
                stdin=reading,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._lifeline)
            self._folder.cleanup()
            raise LaunchError(f"{python}: {error.strerror}", where="launch.python") from None
        finally:
            os.close(reading)

    def stop(self) -> None:
        """SIGTERM, which the task passes on to its ranks; the second one it takes for the end."""
        if not self._stopped:
            self._stopped, self._deadline = True, time.monotonic() + self._grace_s + _KILL_S
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def follow(self) -> Outcome:
        while (code := self._process.poll()) is None:
            if time.monotonic() > self._deadline:
                self._process.kill()
            time.sleep(_POLL_S)
        self._wait_for_orphans()
        try:
            told = json.loads(self._told.read_text(encoding="utf-8"))
            return Outcome({int(rank): end for rank, end in told["exits"].items()}, stopped=self._stopped)
        except (OSError, ValueError, KeyError):  # it ended before its ranks did
            lost = "" if code >= 0 or self._stopped else f"flytekit's local runner died of signal {-code}"
            return Outcome(lost=lost, stopped=self._stopped)
        finally:
            os.close(self._lifeline)
            self._folder.cleanup()

    def _wait_for_orphans(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline, 0)  # POLLERR is always told: nobody holds the other end any more
        poll.poll(_ORPHANS_S * 1000)


def _check(job: Job) -> None:
    refuse(
        job, "flyte", min_nodes="Flyte retries a task whole; use launch.engine=torchrun or kubernetes",
        rendezvous="the Kubeflow plugin chooses it", node_rank="the Kubeflow plugin chooses it",
    )  # fmt: skip


def _inputs(job: Job) -> Iterator[tuple[str, ...]]:
    """The words after the file, as they belong together."""
    yield ("experiment",)
    yield ("--config", job.path)
    if job.overrides:
        yield ("--overrides", json.dumps(job.overrides))


def _for_a_cluster(job: Job, message: str) -> LaunchError:
    return LaunchError(
        message,
        where=job.path,
        hint=f"for a cluster: add --dry-run > {FILE}, then pyflyte run --remote -p PROJECT -d DOMAIN {FILE} …",
    )
