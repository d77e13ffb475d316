"""Parts that all engines share: the job to start, and the protocol that an engine module implements."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.config import loader, plugins
from harness.config.launch import LaunchSection
from harness.config.places import is_url
from harness.config.schema import Config
from harness.distributed.machine import usable_cores
from harness.distributed.monitor import LaunchedRun
from harness.errors import ConfigError, LaunchError, plural
from harness.runs.storage import working_folder

RANGES = {"nnodes": "min_nodes", "nproc": "min_ranks"}
"""By setting of ``launch``, that of an engine which can do with fewer: the MIN of ``--nnodes MIN:MAX``."""


@dataclass(frozen=True)
class Job:
    """An experiment to launch: the words of the command line and the configuration that they resolve to."""

    config: Config
    path: str
    """The YAML, as typed."""
    overrides: tuple[str, ...] = ()
    """``key=value`` words, as typed, and those of options such as --nproc."""

    @property
    def settings(self) -> LaunchSection:
        return self.config.launch

    @property
    def folder(self) -> Path:
        """The run folder; for a run that is kept at a URL, this machine's working copy."""
        if self.url:
            return working_folder(self.url, self.config.data.cache_dir)
        return Path(self.config.output) / self.config.name

    @property
    def url(self) -> str:
        """The URL of the run; empty if it is kept in ``folder``."""
        return f"{self.config.output.rstrip('/')}/{self.config.name}" if is_url(self.config.output) else ""

    @property
    def world_size(self) -> int:
        """The number of ranks when all machines take part."""
        return self.settings.nnodes * self.settings.nproc

    def command(self) -> list[str]:
        """Return the command of each rank, on this machine and on those that share its disk."""
        return [self.settings.python or sys.executable, *train_command(), "-c", self.path, *self.overrides]

    def error(self, message: str, hint: str) -> LaunchError:
        """Return an error of the settings in the YAML."""
        return LaunchError(message, where=self.path, hint=hint)

    def environ(self) -> dict[str, str]:
        """Return the environment variables of every rank, without those of the launch environment."""
        settings = self.settings
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if settings.interface else ()
        return {
            "OMP_NUM_THREADS": str(settings.threads),
            **{name: str(settings.interface) for name in names},
            **settings.env,
        }


def plan(path: str, overrides: Sequence[str]) -> Job:
    """Return the job of ``path``. Before any rank is started, raises ConfigError with all errors of the configuration,
    and LaunchError for MIN:MAX with a MIN that is more than MAX."""
    job = Job(loader.load(path, overrides, launching=True), path, tuple(overrides))
    num_ranks = job.config.parallel.logical_ranks or job.world_size
    if misfit := job.config.batch.misfit(num_ranks):
        cores = usable_cores() if job.settings.engine == "local" else num_ranks
        few = f" (this machine has {plural(cores, 'core')})" if num_ranks > cores else ""
        raise ConfigError(f"{misfit[0]}{few}", where="batch.global", hint=misfit[1])
    fewest = {name: getattr(job.settings.engine_settings, least, None) for name, least in RANGES.items()}
    for name, number in fewest.items():
        if (number or 0) > (most := getattr(job.settings, name)):
            own_setting = f"launch.{job.settings.engine.rpartition('.')[2]}.{RANGES[name]}={number}"
            message = f"{own_setting} is more than launch.{name}={most}"
            raise job.error(message, f"use --{name} MIN:MAX, which sets both")
    if not any(fewest.values()):  # otherwise fewer may be started
        strategy = plugins.find("strategy", job.config.parallel.strategy, "parallel.strategy")
        strategy.check_world(job.config.parallel, job.world_size)
    if job.config.checkpoint.resume == "never" and job.settings.max_restarts and job.settings.engine != "slurm":
        raise ConfigError(
            f"with launch.max_restarts={job.settings.max_restarts}, never would apply to each restart, which would "
            "begin at step 0",
            where="checkpoint.resume",
            hint="give the new run another name with name=NAME, or remove launch.max_restarts",
        )
    return job


def train_command(working: str = "") -> list[str]:
    """Return the arguments of python that train: ``driver.py`` of the clone at ``working`` (default: the working
    folder) or of the clone that the package is in, else ``-m harness train``, which an installed wheel has too. Another
    ``driver.py`` is a script of the user."""
    for folder in (Path(working), Path(__file__).resolve().parents[2]):
        driver = folder / "driver.py"
        if driver.is_file() and b"from harness.__main__ import command" in driver.read_bytes():
            return [str(driver)]
    return ["-m", "harness", "train"]


class Engine(Protocol):
    """A module ``harness/engines/NAME.py`` or ``NAME/engine.py``, found by its name.

    Settings of its own are a class ``Settings`` (harness.config.launch), in ``job.settings.engine_settings``.
    An engine whose runs continue without this process also has ``submit(job) -> str`` for --detach, which starts the
    run and returns its name there. One that starts ranks here has ``ON_THIS_MACHINE = True``, for --nproc auto.
    """

    @staticmethod
    def render(job: Job) -> str:
        """Return the commands or files that ``start`` would run or submit, as text. Raises LaunchError for settings
        that are missing or that do not apply to this engine."""
        ...

    @staticmethod
    def start(job: Job) -> LaunchedRun:
        """Start the run, or raise LaunchError and leave nothing behind."""
        ...


def refuse(job: Job, engine: str, **reasons: str) -> None:
    """Raise LaunchError with the hint for the first keyword that is a ``launch`` setting without its default value."""
    default = LaunchSection()
    for name, hint in reasons.items():
        value = getattr(job.settings, name)
        if value != getattr(default, name):
            raise job.error(f"launch.{name}={value} does not apply to engine {engine}", hint)


def shell(command: Sequence[str], environ: dict[str, str]) -> str:
    """Return ``command`` with its variables, as typed in a shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
    return " ".join([*words, shlex.join(command)])
