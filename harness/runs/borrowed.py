"""Checkpoints from elsewhere: of another run, which ``checkpoint.resume`` names, or at a URL."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.config.places import is_url
from harness.config.schema import Config
from harness.errors import CheckpointError, ConfigError, did_you_mean
from harness.runs import layout
from harness.runs.checkpoint import damage
from harness.runs.fetch import made_once
from harness.runs.storage import LocalStore, copy_run, working_folder
from harness.runs.url_store import UrlStore


def borrow(config: Config) -> Path:
    """Return the local folder of the checkpoint that ``checkpoint.resume`` names; one at a URL is downloaded. Raises
    ConfigError if there is none, CheckpointError if it is damaged."""
    source = config.checkpoint.resume
    if is_url(source):
        path = working_folder(source, config.data.cache_dir, "borrowed")
        problem = _borrow(UrlStore(source), path)
    else:
        require_folder(config)
        path = Path(source)
        problem = damage(path)
    if problem:
        raise CheckpointError(problem, where=source, hint="choose another, or use checkpoint.resume=auto")
    return path


def require_folder(config: Config) -> None:
    """Raise ConfigError if ``checkpoint.resume`` names a local folder that does not exist."""
    source = config.checkpoint.named
    if source is None or is_url(source) or os.path.isdir(source):
        return
    hint = did_you_mean(source, os.path.isdir) or (
        "give a checkpoint folder, such as runs/digits/checkpoints/step-100, or use auto or never"
    )
    raise ConfigError(f"there is no checkpoint folder {source}", where="checkpoint.resume", hint=hint)


def _borrow(store: UrlStore, target: Path) -> str | None:
    with made_once(target):
        manifest = store.read(layout.MANIFEST)
        if not manifest:
            raise ConfigError(
                "there is no checkpoint there", where=store.where,
                hint="give a checkpoint, such as s3://BUCKET/runs/NAME/checkpoints/step-100",
            )  # fmt: skip
        if LocalStore(target).read(layout.MANIFEST) == manifest and damage(target) is None:
            return None
        return download(store, target)


def download(checkpoint: UrlStore, target: Path) -> str | None:
    """Copy ``checkpoint`` to the folder ``target``; return the reason why it is unusable, None if it is intact."""
    shutil.rmtree(target, ignore_errors=True)
    copy_run(checkpoint, LocalStore(target), checkpoint.files())
    return damage(target)
