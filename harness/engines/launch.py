"""Run one configuration on the engine it names, from its start to one report and one exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.config import plugins
from harness.distributed.monitor import attend
from harness.engines.base import Engine, Job, plan
from harness.errors import LaunchError
from harness.runs.outcome import Aftermath


def main(path: str, overrides: Sequence[str], dry_run: bool, detach: bool = False) -> int:
    """Start the experiment of ``path`` on the engine of its ``launch`` section and follow it to its end; or print what
    would be started; or hand it over and print its name there. Returns the run's exit code, 0 for one that is not
    followed."""
    job = plan(path, overrides)
    engine = engine_of(job)
    if dry_run:
        print(engine.render(job), end="")
        return 0
    if detach:
        print(_hand_over(job, engine))
        return 0
    aftermath = Aftermath(job.folder, job.world_size, job.url)
    conclusion = aftermath.conclude(attend(engine.start(job)))
    print(conclusion.text, file=sys.stderr)
    return conclusion.exit_code


def engine_of(job: Job) -> Engine:
    engine: Engine = plugins.load("engines", job.settings.engine)  # type: ignore[assignment]
    return engine


def _hand_over(job: Job, engine: Engine) -> str:
    """Start ``job`` where it goes on without this process; its name there."""
    submit = getattr(engine, "submit", None)
    if submit is None:
        raise LaunchError(
            f"engine {job.settings.engine} ends with harness launch, so --detach means nothing to it",
            where=job.path,
            hint="nohup harness launch … &, or another engine: slurm",
        )
    name: str = submit(job)
    return name
