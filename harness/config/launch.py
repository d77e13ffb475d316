"""The ``launch:`` section: where the ranks of an experiment run, and how many. It never changes what is trained.

Only ``harness launch`` and the engines read it, and a run of logical ranks ``threads``. ``driver.py`` takes its rank
and world size from the environment.
An engine may have settings of its own: a class ``Settings`` in ``harness/engines/NAME/settings.py``, or in the module
of an engine of the user's own. They stand under the engine's name, as in
``launch: {engine: slurm, slurm: {partition: gpu}}``; for ``my_package.my_engine`` under ``my_engine``.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

from pydantic import Field, create_model

from harness.config import plugins
from harness.config.base import Arguments, NameOf, NullIsEmpty, Positive, Seconds, Section
from harness.errors import ConfigError


class LaunchSection(Section):
    engine: Annotated[str, NameOf("engine")] = "local"
    """Launcher of the ranks: local (processes on this machine), torchrun, slurm, dask, flyte, or your own
    package.module.
    """
    nnodes: Positive = 1
    """Number of machines (nodes), such as 2."""
    nproc: Positive = 1
    """Ranks (processes) per machine, such as 4: typically one per GPU, or one per few CPU cores."""
    threads: Positive = 1
    """CPU threads per rank (OMP_NUM_THREADS), the same on any machine, since the last bits of a result depend on it.
    """
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Maximum number of restarts of a failed run, such as 3, each from its newest checkpoint. The local engine restarts
    after a loss of ranks, not after an error of the code.
    """
    interface: str | None = None
    """Network interface for communication between ranks, such as eth0; null: the one that reaches rank 0's machine."""
    grace_s: Seconds = 60.0
    """Seconds that ranks may take to write a checkpoint when they are asked to stop."""
    python: str | None = None
    """Interpreter that runs driver.py, such as /opt/venv/bin/python; null: the current one."""
    env: Annotated[dict[str, str], NullIsEmpty] = {}
    """Environment variables to set for every rank, such as {NCCL_DEBUG: INFO}; null: none."""

    @property
    def engine_settings(self) -> Any:
        """The settings of ``engine`` itself; None if it has none."""
        key = _key(self.engine)
        return getattr(self, key) if key in type(self).model_fields and not _is_common(key) else None


def _key(engine: str) -> str:
    return engine.rpartition(".")[2]


def _is_common(key: str) -> bool:
    """Return True for the name of a setting that every engine has."""
    return key in LaunchSection.model_fields


def section_class(raw: Any, launching: bool) -> type[LaunchSection]:
    """Return LaunchSection with the settings of the engine that ``raw`` names and the built-in ones that it mentions.

    An engine of the user's own is imported, and its settings are checked, only for ``launching``: the ranks, and the
    commands that read a finished run, may not have it. Raises ConfigError.
    """
    written = raw if isinstance(raw, dict) else {}
    engine = written.get("engine", "local")
    engine = engine if isinstance(engine, str) else "local"  # the schema reports the type
    key = _key(engine)
    own_class: Any = None
    if "." in engine and launching:
        own_class = _of_user(engine)
    elif "." in engine and key in written and not _is_common(key):
        own_class = Arguments
    kinds = {} if own_class is None else {key: own_class}
    built_in = plugins.names("engine settings")
    is_known = all(_is_common(name) or name in kinds or name in built_in for name in written)
    names = [name for name in built_in if name in written or name == engine or not is_known]  # maybe misspelled
    built_in_classes = {name: plugins.find("engine settings", name, f"launch.{name}") for name in names}
    return with_engines(**(built_in_classes | kinds))


@functools.cache  # so that two configurations with the same engines have the same class and can be compared
def with_engines(**kinds: Any) -> type[LaunchSection]:
    """Return LaunchSection with a section of each of these kinds, by key."""
    fields: dict[str, Any] = {}
    for key, kind in kinds.items():
        required = any(field.is_required() for field in getattr(kind, "model_fields", {}).values())
        default: Any = ... if required else {}
        fields[key] = kind, Field(default, validate_default=True, description=f"Settings of the engine {key}.")
    return create_model("LaunchSection", __base__=LaunchSection, **fields) if fields else LaunchSection


def built_in() -> dict[str, type[Section]]:
    """Return the settings of the built-in engines that have some."""
    return {name: plugins.find("engine settings", name, "launch") for name in plugins.names("engine settings")}


def _of_user(engine: str) -> type[Section] | None:
    """Return the class Settings of the user's ``engine``, if it has one. Raises ConfigError."""
    kind = getattr(plugins.find("engine", engine, "launch.engine"), "Settings", None)
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, Section)):
        raise ConfigError(
            f"Settings of {engine} is not a subclass of harness.config.base.Section",
            hint="docs/engines.md has an example",
        )
    if kind is not None and _is_common(_key(engine)):
        raise ConfigError(
            f"the settings of {engine} would be launch.{_key(engine)}, which every engine has", hint="rename the module"
        )
    return kind
