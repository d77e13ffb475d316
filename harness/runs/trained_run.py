"""A trained run, for commands that use its model: its configuration, its best weights, and what its task learned.

Torch is imported where weights are read: an error in the configuration is shown before.
"""

from __future__ import annotations

import filecmp
import importlib.util
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import loader, merge
from harness.config.places import HUB
from harness.config.schema import Config
from harness.config.trees import flatten
from harness.config.trust import require_harmless
from harness.errors import CheckpointError, ConfigError, plural, reason
from harness.runs import layout, ownership, reader
from harness.runs.files import expanded, read_json, read_sealed, sha256

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("harness")

KEPT = ("model.name", "task.tokenizer.name")
"""The settings whose files of Hugging Face are copied into the run folder."""


def configuration(run: Path, overrides: Sequence[str], trust: bool = False, written_at: str | None = None) -> Config:
    """Return the configuration of the run folder ``run``, with ``overrides``; ``written_at``: see ``loader.load``.

    Raises ConfigError if ``run`` is not a run, has no weights yet, or is not this user's own and does more than set
    values, such as to name a model of its own; ``trust`` allows that.
    """
    if not (run / layout.CONFIG).is_file():
        what = "this is not a run folder: it has no config.yaml" if run.exists() else "there is no such folder"
        raise ConfigError(what, where=str(run), hint=reader.run_hint(run))
    if not weights(run).is_file():
        raise reader.lacking(
            reader.read(run),
            "weights",
            "harness train writes them at its first evaluation, at the end of an epoch; in a training loop of "
            "your own, call harness.training.checkpointing.keep_best(run)",
        )
    if not trust and not ownership.is_own(run):
        require_harmless(run / layout.CONFIG, overrides)
        overrides = ["data.cache_dir=null", *overrides]  # the user, not the run, decides where files are written
    config = loader.load(run / layout.CONFIG, overrides, written_at)
    elsewhere = _of_start(run, config)
    return loader.load(run / layout.CONFIG, [*elsewhere, *overrides], written_at) if elsewhere else config


def _of_start(run: Path, config: Config) -> list[str]:
    """Return overrides with the whole path of each folder of Hugging Face that is not in the working folder, but in the
    one in which ``run`` was started, or else of its copy in ``run``."""
    try:
        start = Path(read_json(run / layout.PROVENANCE)[-1]["folder"])
    except (OSError, ValueError, TypeError, LookupError):
        return []
    found = _copies(run, config)
    for key, place in places_of_hub(config).items():
        if not expanded(place).is_dir() and (start / place).is_dir():
            found[key] = start / place
    return merge.typed({key: f"{HUB}{there}" for key, there in found.items()})


def _copies(run: Path, config: Config) -> dict[str, Path]:
    """Return the copies in ``run``, by their settings, of the folders of Hugging Face that are neither in the working
    folder nor in the cache."""
    places = {key: place for key, place in places_of_hub(config).items() if key in KEPT}
    found = {key: run.absolute() / layout.of_hub(place) for key, place in places.items()}
    gone = {key for key, place in places.items() if not (expanded(place).is_dir() or _in_cache(place))}
    return {key: copy for key, copy in found.items() if key in gone and copy.is_dir()}


def with_copies(config: Config, run: Path) -> Config:
    """Return ``config`` with the copies in the folder of its ``run``, which has a checkpoint, of folders of Hugging
    Face that are gone: a resume needs only their small files."""

    def changed(section: Any, keys: list[str], value: str) -> Any:
        first, *rest = keys
        value = changed(getattr(section, first), rest, value) if rest else value
        return section.model_copy(update={first: value})

    for key, copy in _copies(run, config).items():
        log.info("%s: there is no folder %s; resuming from the copy %s", key, places_of_hub(config)[key], copy)
        config = changed(config, key.split("."), f"{HUB}{copy}")
    return config


def moved(run: Path, starts: Sequence[Mapping[str, Any]], was: object, now: object) -> bool:
    """Return whether two values of a setting of KEPT name folders of Hugging Face with the same files, by the copy in
    ``run`` of the first and the digest of the weights it started from, which the second may lack. ``starts``: its
    provenance.json, empty if its weights are not from there."""
    copy, there = (run / layout.of_hub(str(was).removeprefix(HUB)), expanded(str(now).removeprefix(HUB)))
    files = [file.name for file in copy.iterdir()] if copy.is_dir() and str(now).startswith(HUB) else []
    if not files or filecmp.cmpfiles(copy, there, files, shallow=False)[0] != files:
        return False
    of_start: dict[str, Any] = next((start["weights"] for start in starts if "weights" in start), {})
    weights = sorted(there.glob("model.safetensors*")) or sorted(there.glob("pytorch_model.bin*"))
    return not of_start or not weights or sha256(weights[0]) == of_start["sha256"]


def _in_cache(place: str) -> bool:
    """Return whether the cache of Hugging Face has ``place``, a name of the hub."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name, _, revision = place.partition("@")
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str)
    except HFValidationError:  # a path
        return False


def places_of_hub(config: Config) -> dict[str, str]:
    """Return the folders and names of Hugging Face in ``config``, by their settings."""
    named = {key: str(value) for key, value in flatten(loader.as_tree(config)).items() if str(value).startswith(HUB)}
    return {key: value.removeprefix(HUB) for key, value in named.items()}


def kept_places(config: Config) -> set[str]:
    """Return the folders and names of Hugging Face whose files are copied into the run folder."""
    return {place for key, place in places_of_hub(config).items() if key in KEPT}


def paths_of_task(config: Config) -> list[str]:
    """Return the files and folders that the task of ``config`` may read, by the texts among its options."""
    options = flatten(config.task.model_dump(mode="json"))
    return [value for value in options.values() if isinstance(value, str)]


def weights(run: Path) -> Path:
    """Return the file of the best weights."""
    return run / layout.WEIGHTS


def best(run: Path) -> dict[str, Tensor]:
    """Return the best weights of ``run``, on the CPU, verified. Raises CheckpointError."""
    from harness.runs.weights_file import load_weights

    return load_weights(weights(run))


def unfinished(run: Path, config: Config) -> str:
    """Return how far a run is that has not finished, and of which step its best weights are, in words; empty if it has
    finished, or if its files do not tell."""
    from safetensors import SafetensorError, safe_open

    from harness.runs.weights_file import weights_metadata

    try:
        summary = read_sealed(run / layout.SUMMARY)
        if summary["finished"] is not False:
            return ""
        with safe_open(weights(run), "pt") as file:
            of = int(weights_metadata(file)["step"])
        lengths = ("epoch", config.train.epochs), ("step", config.train.max_steps)
        done = [f"{int(summary[unit])} of {plural(total, unit)}" for unit, total in lengths if total]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError):
        return ""
    return f"the run is not finished, its newest evaluation was after {' and '.join(done)}: weights of step {of}"


def warn_if_unfinished(run: Path, config: Config) -> None:
    """Warn, before a use of the best weights, that a later evaluation may find better ones."""
    if told := unfinished(run, config):
        log.warning("%s: %s", run, told)


def learned(run: Path) -> dict[str, Any]:
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


def load(model: nn.Module, best: dict[str, Tensor], run: Path) -> None:
    """Load the weights into ``model``. Raises CheckpointError if they do not fit, or are infinite or NaN where those of
    ``model`` are not (a mask of -inf may be)."""
    from harness.runs.weights_file import with_versions

    new = model.state_dict()
    if bad := [name for name, value in best.items() if not _finite(value) and name in new and _finite(new[name])]:
        raise CheckpointError(
            f"the weights are infinite or NaN in {bad[0]} ({len(bad)} of {len(best)} tensors): the training diverged",
            where=str(weights(run)),
            hint="its predictions would be meaningless; train again, for example with a lower optimizer.lr",
        )
    try:
        model.load_state_dict(with_versions(best, model))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights do not fit this model: {str(error).strip().splitlines()[-1].strip()}",
            where=str(weights(run)),
            hint="use the model and task settings that it was trained with",
        ) from None


def _finite(value: Any) -> bool:
    return not hasattr(value, "isfinite") or bool(value.isfinite().all())  # the extra state of a module may be anything
