"""A run that is to be started somewhere: its configuration, the command of a rank and the variables all ranks get.

And what an engine is: a module of this folder with ``render`` and ``start``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.config import loader
from harness.config.base import Section
from harness.config.launch import LaunchSection
from harness.config.schema import Config
from harness.distributed.monitor import Started
from harness.errors import ConfigError, LaunchError
from harness.runs.files import is_url
from harness.runs.storage import working_folder


@dataclass(frozen=True)
class Job:
    """An experiment, as the command line named it and as it was resolved."""

    config: Config
    path: str
    """The YAML, as typed."""
    overrides: tuple[str, ...] = ()
    """``key=value`` words, as typed; what options such as --nproc say is among them."""
    options: Section | None = None
    """``launch.options`` as the engine's own ``Options``, if it has such a class."""

    @property
    def settings(self) -> LaunchSection:
        return self.config.launch

    @property
    def folder(self) -> Path:
        """The run folder, as seen from the working folder; of a run that is kept at a URL, where this machine works on
        it if it does."""
        if self.url:
            return working_folder(self.url, self.config.data.cache_dir)
        return Path(self.config.output) / self.config.name

    @property
    def url(self) -> str:
        """Where the run is kept, if that is a URL."""
        return f"{self.config.output.rstrip('/')}/{self.config.name}" if is_url(self.config.output) else ""

    @property
    def world_size(self) -> int:
        """Ranks when every machine takes part."""
        return self.settings.nnodes * self.settings.nproc

    def command(self) -> list[str]:
        """What runs once a rank, on the machine that harness launch runs on and on those that share its disk."""
        return [self.settings.python or sys.executable, str(driver()), "-c", self.path, *self.overrides]

    def environ(self) -> dict[str, str]:
        """What every rank gets beside its place among its peers."""
        settings = self.settings
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if settings.interface else ()
        return {
            "OMP_NUM_THREADS": str(settings.threads),
            **{name: str(settings.interface) for name in names},
            **settings.env,
        }


def plan(path: str, overrides: Sequence[str]) -> Job:
    """The job of ``path``; raises ConfigError with all that is wrong in it, before any rank is started."""
    job = Job(loader.load(path, overrides), path, tuple(overrides))
    is_range = (job.settings.min_nodes or job.settings.nnodes) < job.settings.nnodes  # which its engine looks at
    if not is_range and (misfit := job.config.batch.misfit(job.world_size)):
        raise ConfigError(misfit[0], where="batch.global", hint=misfit[1])
    return job


def driver(working: str = "") -> Path:
    """``driver.py`` of the folder ``working``, which is this process's by default, else the one beside the package."""
    for folder in (Path(working), Path(__file__).resolve().parents[2]):
        if (folder / "driver.py").is_file():
            return folder / "driver.py"
    raise LaunchError(
        "driver.py is neither in the working folder nor beside the harness package",
        where=str(Path(working).absolute()),
        hint="run it in a clone of the project, or copy the project's driver.py here",
    )


class Engine(Protocol):
    """A module of this folder. One whose runs go on without us also has ``submit(job) -> str``, for --detach: it starts
    the run and returns its name there."""

    @staticmethod
    def render(job: Job) -> str:
        """Exactly what ``start`` would run or submit, as text; nothing happens. Raises LaunchError for settings that
        this engine has no use for or cannot do without."""
        ...

    @staticmethod
    def start(job: Job) -> Started:
        """Start the run, or raise LaunchError with nothing left behind."""
        ...


def refuse(job: Job, engine: str, **reasons: str) -> None:
    """Raise LaunchError where a setting of ``launch``, named by keyword with a hint, is set and means nothing here."""
    default = LaunchSection()
    for name, hint in reasons.items():
        value = getattr(job.settings, name)
        if value != getattr(default, name):
            raise LaunchError(f"launch.{name}={value} means nothing to engine {engine}", where=job.path, hint=hint)


def shell(command: Sequence[str], environ: dict[str, str]) -> str:
    """``command`` as one would type it, a continuation line for each group of words."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
    return " ".join([*words, shlex.join(command)])
