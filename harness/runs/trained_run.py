"""A trained run, for commands that use its model: its configuration, its best weights, and what its task learned.

Torch is imported where weights are read: an error in the configuration is shown before.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import loader
from harness.config.schema import Config
from harness.config.trees import flatten
from harness.config.trust import require_harmless
from harness.errors import CheckpointError, ConfigError, plural, reason
from harness.runs import hints, hub_copies, layout, ownership, reader
from harness.runs.files import read_sealed

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("harness")


def configuration(run: Path, overrides: Sequence[str], trust: bool = False, written_at: str | None = None) -> Config:
    """Return the configuration of the run folder ``run``, with ``overrides``; ``written_at``: see ``loader.load``.

    Raises ConfigError if ``run`` is not a run, has no weights yet, or is not this user's own and does more than set
    values, such as to name a model of its own; ``trust`` allows that.
    """
    if not (run / layout.CONFIG).is_file():
        problem = "this is not a run folder: it has no config.yaml" if run.exists() else "there is no such folder"
        raise ConfigError(problem, where=str(run), hint=hints.run_hint(run))
    if not weights_path(run).is_file():
        raise reader.read(run).lacking(
            "weights",
            "harness train writes them at its first evaluation, at the end of an epoch; in a training loop of "
            "your own, call harness.training.checkpoints.checkpointing.keep_best(run)",
        )
    if not trust and not ownership.is_own(run):
        require_harmless(run / layout.CONFIG, overrides)
        overrides = ["data.cache_dir=null", *overrides]  # the user, not the run, decides where files are written
    config = loader.load(run / layout.CONFIG, overrides, written_at)
    elsewhere = hub_copies.of_start(run, config)
    return loader.load(run / layout.CONFIG, [*elsewhere, *overrides], written_at) if elsewhere else config


def texts_of_task(config: Config) -> list[str]:
    """Return the texts among the options of the task of ``config``: any may name a file or folder that it reads."""
    options = flatten(config.task.model_dump(mode="json"))
    return [value for value in options.values() if isinstance(value, str)]


def weights_path(run: Path) -> Path:
    """Return the file of the best weights."""
    return run / layout.WEIGHTS


def best_weights(run: Path) -> dict[str, Tensor]:
    """Return the best weights of ``run``, on the CPU, verified. Raises CheckpointError."""
    from harness.runs.weights_file import load_weights

    return load_weights(weights_path(run))


def unfinished(run: Path, config: Config) -> str:
    """Return how far a run is that has not finished, and of which step its best weights are, in words; empty if it has
    finished, or if its files do not tell."""
    from safetensors import SafetensorError, safe_open

    from harness.runs.weights_file import weights_metadata

    try:
        summary = read_sealed(run / layout.SUMMARY)
        if summary["finished"] is not False:
            return ""
        with safe_open(weights_path(run), "pt") as file:
            of = int(weights_metadata(file)["step"])
        lengths = ("epoch", config.train.epochs), ("step", config.train.max_steps)
        done = [f"{int(summary[unit])} of {plural(total, unit)}" for unit, total in lengths if total]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError):
        return ""
    return f"the run is not finished, its newest evaluation was after {' and '.join(done)}: weights of step {of}"


def warn_if_unfinished(run: Path, config: Config) -> None:
    """Warn, before a use of the best weights, that a later evaluation may find better ones."""
    if warning := unfinished(run, config):
        log.warning("%s: %s", run, warning)


def task_facts(run: Path) -> dict[str, Any]:
    """Return what the task recorded about its training data. Raises ConfigError if they cannot be read."""
    try:
        facts = read_sealed(run / layout.TASK)
        if not isinstance(facts, dict):
            raise ValueError(f"it holds a value of type {type(facts).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the task's record of its training data cannot be read: {reason(error)}",
            where=str(run / layout.TASK),
            hint=f"start the run again to write the file: harness train -c {shlex.quote(str(run / layout.CONFIG))}",
        ) from None
    return facts


def load_into(model: nn.Module, best: dict[str, Tensor], run: Path) -> None:
    """Load the weights into ``model``. Raises CheckpointError if they do not fit, or are infinite or NaN where those of
    ``model`` are not (a mask of -inf may be)."""
    from harness.runs.weights_file import with_versions

    new = model.state_dict()
    if bad := [name for name, value in best.items() if not _finite(value) and name in new and _finite(new[name])]:
        raise CheckpointError(
            f"the weights are infinite or NaN in {bad[0]} ({len(bad)} of {len(best)} tensors): the training diverged",
            where=str(weights_path(run)),
            hint="its predictions would be meaningless; train again, for example with a lower optimizer.lr",
        )
    try:
        model.load_state_dict(with_versions(best, model))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights do not fit this model: {str(error).strip().splitlines()[-1].strip()}",
            where=str(weights_path(run)),
            hint="use the model and task settings that it was trained with",
        ) from None


def _finite(value: Any) -> bool:
    return not hasattr(value, "isfinite") or bool(value.isfinite().all())  # the extra state of a module may be anything
