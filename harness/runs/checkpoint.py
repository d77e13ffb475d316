"""One checkpoint: written completely or not at all, and verified by hash.

    checkpoints/step-N/...            the files of its format (``harness.runs.formats``), such as state.pt
    checkpoints/step-N/manifest.json  the format, and size and SHA-256 of each file; sealed with a SHA-256 of its own
    checkpoints/latest, best          text files that name a step
    weights.safetensors               the best model's weights (``harness.runs.weights_file``)

No file of a checkpoint changes once it has its name: it is written under a temporary one, synced and renamed, and only
then does `latest` name it. A run that comes to the same step again replaces the whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config import seals
from harness.errors import CheckpointError, reason, require_regular_file
from harness.runs import layout
from harness.runs.files import read_json, replace_folder, sha256, write_atomically, write_sealed

VERSION = 9  # of the manifest and of what a checkpoint contains
ADVICE = "choose another with checkpoint.resume=FOLDER, or start from scratch with checkpoint.resume=never"


def synced(file: Path) -> dict[str, Any]:
    """Return what the manifest records of ``file``, which is now safe on the disk."""
    with open(file, "rb") as written:
        os.fsync(written.fileno())
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def complete(folder: Path, step: int, format_name: str, files: dict[str, Any]) -> None:
    """Make ``folder``, in which ranks have written and synced ``files``, the checkpoint of ``step``, and the latest."""
    if missing := [name for name in files if not (folder / name).exists()]:
        raise CheckpointError(
            f"rank 0 cannot find {missing[0]}, which another rank has written", where=str(folder),
            hint="a sharded checkpoint needs a folder that all machines share: set output to one, or use "
            "checkpoint.format=whole",
        )  # fmt: skip
    write_sealed(folder / layout.MANIFEST, {"version": VERSION, "format": format_name, "step": step, "files": files})
    final = folder.with_name(layout.step_name(step))
    replace_folder(folder, final)  # if it is there: damaged, or abandoned by a resume from an earlier step
    write_atomically(final.with_name(layout.LATEST), final.name + "\n")


def steps(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in ``folder`` by step, complete or not."""
    folders = {layout.step_number(path.name): path for path in folder.glob("*") if path.is_dir()}
    return {step: path for step, path in folders.items() if step is not None}


def digest(path: Path) -> str:
    """Return the SHA-256 of the manifest of the checkpoint folder ``path``, which has those of its files; empty if it
    cannot be read."""
    try:
        return sha256(path / layout.MANIFEST)
    except OSError:
        return ""


def damage(path: Path) -> str | None:
    """Return the reason why the checkpoint folder ``path`` is unusable; None if it is intact."""
    try:
        manifest = manifest_of(path)
    except CheckpointError as error:
        return error.message
    if (version := manifest.get("version")) != VERSION:
        return (
            f"its version is {version}, but this version of the harness reads {VERSION}: use the version that wrote it"
        )
    return next(
        filter(None, (_damage_of(path / name, entry) for name, entry in manifest["files"].items())),
        None,
    )


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the sealed content of the manifest. Raises CheckpointError."""
    try:
        content = read_json(path / layout.MANIFEST)
        fields: dict[str, Any] = seals.unsealed(content)
        if fields is content:
            raise ValueError("it has no seal")
    except FileNotFoundError:
        problem = f"it has no {layout.MANIFEST}, so it is incomplete or not a checkpoint of this harness"
    except (OSError, ValueError) as error:
        problem = f"its {layout.MANIFEST} cannot be used: {reason(error)}"
    else:
        return fields
    raise CheckpointError(problem, where=str(path), hint=ADVICE)


def _damage_of(file: Path, recorded: Mapping[str, Any]) -> str | None:
    try:
        require_regular_file(file)
        if (size := file.stat().st_size) != recorded["bytes"]:
            return f"{file.name} is truncated: {size} of {recorded['bytes']} bytes"
        if sha256(file) != recorded["sha256"]:
            return f"{file.name} is damaged: its SHA-256 differs from the one in {layout.MANIFEST}"
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return f"{file.name} is missing" if missing else f"{file.name}: {error.strerror}"
    return None
