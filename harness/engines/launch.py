"""Run one configuration on the engine it names, from its start to one report and one exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from harness.config import loader, plugins
from harness.config.base import Section
from harness.distributed.monitor import follow_until_done
from harness.engines.base import Engine, Job, plan
from harness.errors import ConfigError, LaunchError
from harness.runs import ownership
from harness.runs.outcome import ExitCollector


def main(path: str, overrides: Sequence[str], dry_run: bool, detach: bool = False) -> int:
    """Start the experiment of ``path`` on the engine of its ``launch`` section and follow it to its end.

    ``dry_run``: only print what would be started. ``detach``: submit the run and print its name there. Returns the exit
    code of the run, or 0 if it was not followed.
    """
    job = plan(path, overrides)
    engine = engine_of(job)
    job = replace(job, options=options_of(engine, job))
    if dry_run:
        print(engine.render(job), end="")
        return 0
    ownership.remember(loader.to_text(job.config))  # the ranks may write it on other machines
    if detach:
        print(_submit(job, engine))
        return 0
    collector = ExitCollector(job.folder, job.world_size, job.url)
    outcome = collector.conclude(follow_until_done(lambda: engine.start(job)))
    print(outcome.text, file=sys.stderr)
    return outcome.exit_code


def engine_of(job: Job) -> Engine:
    """The engine of ``job``, imported. Raises ConfigError."""
    name = job.settings.engine
    engine: Engine = plugins.find("engine", name, "launch.engine")
    if missing := [part for part in ("render", "start") if not callable(getattr(engine, part, None))]:
        hint = "harness.engines.base.Engine documents the interface of an engine"
        raise ConfigError(f"{name} has no function {missing[0]}", where="launch.engine", hint=hint)
    return engine


def options_of(engine: Engine, job: Job) -> Section | None:
    """``launch.options`` as the engine's own section ``Options``, if it has one. Raises ConfigError."""
    section: type[Section] | None = getattr(engine, "Options", None)
    if section is not None:
        return loader.section(section, job.settings.options, "launch.options")
    if job.settings.options:
        raise ConfigError(
            f"the engine {job.settings.engine} has no options",
            where="launch.options",
            hint="remove launch.options; the built-in engines have sections such as launch.slurm",
        )
    return None


def _submit(job: Job, engine: Engine) -> str:
    """Start ``job`` where it continues without this process; return its name there."""
    submit = getattr(engine, "submit", None)
    if submit is None:
        raise LaunchError(
            f"engine {job.settings.engine} does not support --detach: its runs stop when harness launch exits",
            where=job.path,
            hint="nohup harness launch ... &, or use an engine with a scheduler, such as slurm",
        )
    name: str = submit(job)
    return name
