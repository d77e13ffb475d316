"""Engine flyte: writes a workflow of one task, and runs it with flytekit on this machine.

On a cluster Flyte's own ``pyflyte run --remote`` registers and runs the same source. task.py is the body of the task.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.engines.base import Job, refuse
from harness.errors import LaunchError

FILE = "flyte_workflow.py"
EXITS = "HARNESS_FLYTE_EXITS"  # path of a file to which the task writes the rank exits for this engine
_ORPHANS_S = 30.0  # for ranks whose task was killed to notice it, write a checkpoint and end
_KILL_S = 20.0  # beyond the ranks' own grace period

_SOURCE = '''r"""Train an experiment of apex-harness on Flyte. Copy this file, edit the task's resources, and run it:

{local}
{remote}

The first command trains on this machine, in the working folder. The second trains on a cluster: its image must contain
the project, and `output` of the configuration should be a disk or a URL that outlives the pods.
"""

from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile
{elastic_import}
from harness.engines.flyte.task import Results, {body}

MACHINE = Resources({resources})


@task({task_config}
    container_image={image},  # with the project installed; not used on this machine
    requests=MACHINE,
    limits=MACHINE,
    shared_memory=True,  # for the batches of loader processes
    retries={retries},  # resume from the newest checkpoint; configuration and data errors are not retried
)
def train(config: FlyteFile, overrides: list[str]) -> Results:
    """{ranks}"""
    return {body}(config.download(), overrides)


@workflow
def experiment(config: FlyteFile, overrides: list[str] = []) -> Results:  # noqa: B006 - Flyte copies it
    """The best weights, the validation metrics of each epoch, the summary, the full record and the report."""
    return train(config=config, overrides=overrides)
'''


def render(job: Job) -> str:
    settings, machine = job.settings, job.settings.engine_settings
    several = settings.nnodes > 1
    resources = {"cpu": machine.cpu, "mem": machine.memory, "gpu": str(machine.gpu or "") or None}
    elastic = f"Elastic(nnodes={settings.nnodes}, nproc_per_node={settings.nproc}, monitor_interval=1)"
    workflow, config, *overrides = (shlex.join(pair) for pair in _inputs(job))
    words = [f"{FILE} {workflow} {config}", *overrides]
    return _SOURCE.format(
        local=" \\\n    ".join(["pyflyte run", *words]),
        remote=" \\\n    ".join(["pyflyte run --remote -p PROJECT -d DOMAIN", *words]),
        elastic_import="from flytekitplugins.kfpytorch import Elastic\n" if several else "",
        body="train_rank" if several else "train_node",
        resources=", ".join(f'{name}="{amount}"' for name, amount in resources.items() if amount),
        task_config=f"\n    task_config={elastic}," if several else "",
        image=f'"{machine.image}"' if machine.image else None,
        retries=settings.max_restarts,
        ranks="One rank, on one of the machines that the Kubeflow plugin starts."
        if several
        else "One machine, with launch.nproc ranks.",
    )


def start(job: Job) -> FlyteRun:
    remote = f"for a cluster: add --dry-run > {FILE}, then pyflyte run --remote -p PROJECT -d DOMAIN {FILE} …"
    refuse(job, "flyte on this machine", nnodes=remote, max_restarts=remote)
    if not job.settings.python and importlib.util.find_spec("flytekit") is None:
        raise LaunchError(
            "engine flyte needs flytekit, which is not installed", hint="pip install 'apex-harness[flyte]'"
        )
    return FlyteRun(job)


class FlyteRun:
    """flytekit's local runner as a separate process, with its files in a temporary folder."""

    def __init__(self, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="harness-flyte-")
        self._exits = Path(self._folder.name, "exits.json")
        page = Path(self._folder.name, FILE)
        page.write_text(render(job), encoding="utf-8")
        python = job.settings.python or sys.executable
        runner = [python, "-m", "flytekit.clis.sdk_in_container.pyflyte", "run", str(page)]
        environ = {**os.environ, "TMPDIR": self._folder.name, EXITS: str(self._exits)}
        # The runner and all its descendants inherit the reading end of a pipe. When its last reader is gone, no process
        # of the run is left; when the writing end is closed, the task knows that this process is gone.
        reading, self._lifeline = os.pipe()
        try:
            worker = Worker([*runner, *(word for words in _inputs(job) for word in words)], environ)
            self._runner = WorkerGroup({0: worker}, job.settings.grace_s + _KILL_S, stdin=reading)
        except OSError as error:
            os.close(self._lifeline)
            self._folder.cleanup()
            raise LaunchError(f"{python}: {error.strerror}", where="launch.python") from None
        finally:
            os.close(reading)

    def stop(self) -> None:
        """Send SIGTERM, which the task passes on to its ranks; the second one makes the task kill them."""
        if self._runner.num_stops:
            self._runner.send(signal.SIGTERM)
        else:
            self._runner.stop()

    def follow(self) -> EngineReport:
        code = self._runner.wait()[0]
        stopped = self._runner.num_stops > 0
        self._wait_for_orphans()
        exits = []
        try:
            exits = [RankExit.from_dict(exit) for exit in json.loads(self._exits.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):  # the runner ended before its ranks
            if code < 0 and not stopped:
                exits = [RankExit.lost(f"flytekit's local runner was killed by signal {-code}")]
        finally:
            os.close(self._lifeline)
            self._folder.cleanup()
        return EngineReport(exits, stopped)

    def _wait_for_orphans(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline, 0)  # POLLERR is always reported: the other end has no holder any more
        poll.poll(_ORPHANS_S * 1000)


def _inputs(job: Job) -> Iterator[tuple[str, ...]]:
    """Yield the words after the file, in groups that belong together."""
    yield ("experiment",)
    yield ("--config", job.path)
    if job.overrides:
        yield ("--overrides", json.dumps(job.overrides))
