"""Run one configuration on the engine it names, from its start to one report and one exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.config import loader, plugins
from harness.distributed.monitor import follow_until_done
from harness.engines.base import Engine, Job, plan
from harness.errors import ConfigError
from harness.runs import ownership
from harness.runs.outcome import ExitCollector


def main(path: str, overrides: Sequence[str], dry_run: bool, detach: bool = False) -> int:
    """Start the experiment of ``path`` on the engine of its ``launch`` section and follow it to its end.

    ``dry_run``: only print what would be started. ``detach``: submit the run and print its name there. Returns the exit
    code of the run, or 0 if it was not followed.
    """
    job = plan(path, overrides)
    engine = engine_of(job)
    if dry_run:
        print(engine.render(job), end="")
        return 0
    # The ranks may write it on other machines, where the settings of an engine of the user's own are not checked.
    ownership.remember(loader.to_text(loader.load(path, overrides)))
    if detach:
        print(_submit(job, engine))
        return 0
    collector = ExitCollector(job.folder, job.world_size, job.url)
    outcome = collector.conclude(follow_until_done(lambda: engine.start(job)))
    print(outcome.text, file=sys.stderr)
    return outcome.exit_code


def engine_of(job: Job) -> Engine:
    """Return the engine of ``job``, imported. Raises ConfigError."""
    name = job.settings.engine
    engine: Engine = plugins.find("engine", name, "launch.engine")
    if missing := [part for part in ("render", "start") if not callable(getattr(engine, part, None))]:
        hint = "harness.engines.base.Engine documents the interface of an engine"
        raise ConfigError(f"{name} has no function {missing[0]}", where="launch.engine", hint=hint)
    return engine


def _submit(job: Job, engine: Engine) -> str:
    """Start ``job`` where it continues without this process; return its name there."""
    submit = getattr(engine, "submit", None)
    if submit is None:
        raise job.error(
            f"engine {job.settings.engine} does not support --detach: its runs stop when harness launch exits",
            "nohup harness launch ... &, or use an engine with a scheduler, such as slurm",
        )
    name: str = submit(job)
    return name
