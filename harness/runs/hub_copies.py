"""The folders and names of Hugging Face in a configuration, and the copies of their files in a run folder."""

from __future__ import annotations

import filecmp
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config import loader, merge
from harness.config.places import HUB
from harness.config.schema import Config
from harness.config.trees import flatten
from harness.runs import layout
from harness.runs.files import expanded, read_json, sha256

log = logging.getLogger("harness")

KEPT = ("model.name", "task.tokenizer.name")
"""The settings whose files of Hugging Face are copied into the run folder."""


def of_start(run: Path, config: Config) -> list[str]:
    """Return overrides with the whole path of each folder of Hugging Face that is not in the working folder, but in the
    one in which ``run`` was started, or else of its copy in ``run``."""
    try:
        start = Path(read_json(run / layout.PROVENANCE)[-1]["folder"])
    except (OSError, ValueError, TypeError, LookupError):
        return []
    folders = _copies(run, config)
    for key, name in places_of_hub(config).items():
        if not expanded(name).is_dir() and (start / name).is_dir():
            folders[key] = start / name
    return merge.typed({key: f"{HUB}{folder}" for key, folder in folders.items()})


def _copies(run: Path, config: Config) -> dict[str, Path]:
    """Return the copies in ``run``, by their settings, of the folders of Hugging Face that are neither in the working
    folder nor in the cache."""
    places = {key: name for key, name in places_of_hub(config).items() if key in KEPT}
    copies = {key: run.absolute() / layout.of_hub(name) for key, name in places.items()}
    missing = {key for key, name in places.items() if not (expanded(name).is_dir() or _in_cache(name))}
    return {key: copy for key, copy in copies.items() if key in missing and copy.is_dir()}


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


def is_same_folder(run: Path, starts: Sequence[Mapping[str, Any]], was: object, now: object) -> bool:
    """Return whether two values of a setting of KEPT name folders of Hugging Face with the same files, by the copy in
    ``run`` of the first and the digest of the weights it started from, which the second may lack. ``starts``: its
    provenance.json, empty if its weights are not from there."""
    copy, folder = (run / layout.of_hub(str(was).removeprefix(HUB)), expanded(str(now).removeprefix(HUB)))
    files = [file.name for file in copy.iterdir()] if copy.is_dir() and str(now).startswith(HUB) else []
    if not files or filecmp.cmpfiles(copy, folder, files, shallow=False)[0] != files:
        return False
    of_start: dict[str, Any] = next((start["weights"] for start in starts if "weights" in start), {})
    weights = sorted(folder.glob("model.safetensors*")) or sorted(folder.glob("pytorch_model.bin*"))
    return not of_start or not weights or sha256(weights[0]) == of_start["sha256"]


def _in_cache(location: str) -> bool:
    """Return whether the cache of Hugging Face has ``location``, a name of the hub."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name, _, revision = location.partition("@")
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str)
    except HFValidationError:  # a path
        return False


def places_of_hub(config: Config) -> dict[str, str]:
    """Return the folders and names of Hugging Face in ``config``, by their settings."""
    values = {key: str(value) for key, value in flatten(loader.as_tree(config)).items() if str(value).startswith(HUB)}
    return {key: value.removeprefix(HUB) for key, value in values.items()}


def kept_places(config: Config) -> set[str]:
    """Return the folders and names of Hugging Face whose files are copied into the run folder."""
    return {name for key, name in places_of_hub(config).items() if key in KEPT}
