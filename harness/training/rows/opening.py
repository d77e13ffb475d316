"""Opens the data of a task on every rank, looks for files that its rows name, and copies those that are far away."""

from __future__ import annotations

import inspect
import math
from functools import partial
from pathlib import Path
from typing import cast

from harness.config.schema import Config, TaskSection
from harness.data.shards import bounds
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError, DataError, did_you_mean, place_of
from harness.runs.metrics_table import RESERVED
from harness.training.task import BaseTask, OpenedTask, SupportsFileCheck, SupportsFileCopies

FILES_S = 2.0  # for a look at the files that the rows name


def open_task(config: Config, runtime: Runtime, files_s: float | None = FILES_S) -> OpenedTask:
    """Open the task's data, look ``files_s`` seconds for missing files (None: not at all), and check that the data is
    the same on every rank. Collective."""
    work = partial(open_on_rank, config, runtime.rank, runtime.world_size, files_s)
    task = runtime.patiently("opening the data", work)
    runtime.all_equal(
        task.fingerprint,
        "the content of the annotations",
        "give every machine the same files; one may have changed while the run started",
    )
    return task


def copy_files(config: Config, task: OpenedTask, runtime: Runtime, train: bool = True) -> None:
    """Copy the files that this rank's rows need and that loader workers would wait for, such as archives behind URLs.
    Without ``train``, only the rows for evaluation count. Collective."""
    if not isinstance(task, SupportsFileCopies):
        return

    def of_rank(num_rows: int) -> range:
        return range(*bounds(num_rows, runtime.rank, runtime.world_size))

    num_train = len(task.train) if train else 0
    rows = of_rank(num_train) if config.data.shard == "contiguous" else range(num_train)
    work = partial(task.copy_files, rows, of_rank(len(task.eval)), runtime.rank)
    runtime.patiently("copying the files of the data", work, math.inf)  # a download without progress ends by itself


def open_on_rank(config: Config, rank: int = 0, world_size: int = 1, files_s: float | None = FILES_S) -> OpenedTask:
    """Do as ``open_task``, but without the other ranks. Raises ConfigError if a metric has the name of a log field."""
    if reserved := sorted(RESERVED.intersection(config.task.metrics)):
        message = f"the metric {reserved[0]} would overwrite {reserved[0]} of the log lines"
        raise ConfigError(message, where="task.metrics", hint="give it another name, such as {name: ..., key: my_cost}")
    task = open_data(config.task, config.seed, Path(config.data.cache_dir) if config.data.cache_dir else None)
    if files_s is not None:
        require_files(task, rank, world_size, files_s)
    return task


def require_files(task: OpenedTask, rank: int, world_size: int, limit_s: float = FILES_S) -> None:
    """Raise DataError if files of this rank's rows are missing, as far as they can be looked up in ``limit_s`` s."""
    if isinstance(task, SupportsFileCheck):
        task.require_files(rank, world_size, limit_s)


def open_data(section: TaskSection, seed: int, cache_dir: Path | None) -> OpenedTask:
    """Open the data of the task. Raises DataError if a file that the section names is missing, ConfigError if what
    ``Task.open`` returns lacks a member of OpenedTask, or one of its datasets a method."""
    try:
        opened = section.open(seed, cache_dir)
    except FileNotFoundError as error:
        paths = [str(value) for value in vars(section).values() if isinstance(value, str | Path)]
        if not error.filename or (name := str(error.filename)) not in paths:
            raise
        raise DataError("no such file", where=name, hint=did_you_mean(name)) from error
    members = [member for member in vars(OpenedTask) if not member.startswith("_")]
    members += ["known"] if hasattr(opened, "predictions") else []
    missing = [member for member in members if inspect.getattr_static(opened, member, None) is None]
    if missing:
        kind = type(opened).__name__
        raise ConfigError(
            f"Task.open of {section.name} returns an object of type {kind} without {', '.join(missing)}",
            where=place_of(type(opened)) or "task.name",
            hint="set train and eval in __init__, and write loss"
            if isinstance(opened, BaseTask)
            else "inherit from harness.training.task.BaseTask, which has defaults, and see docs/add_a_task.md",
        )
    for split in ("train", "eval"):
        _require_dataset(section, split, getattr(opened, split))
    return cast(OpenedTask, opened)


def _require_dataset(section: TaskSection, split: str, dataset: object) -> None:
    kind = type(dataset)
    has = {"__len__()": hasattr(kind, "__len__"), "batch(rows, epoch)": callable(getattr(dataset, "batch", None))}
    if not all(has.values()):
        raise ConfigError(
            f"{split} of the task {section.name} is of type {kind.__name__}, which has no "
            f"{' and no '.join(method for method, is_there in has.items() if not is_there)}",
            where=place_of(kind) or "task.name",
            hint="a dataset has __len__(), the number of all rows, and batch(rows, epoch), which returns a Batch; "
            "docs/add_a_task.md and harness/data/arrays.py have an example",
        )
