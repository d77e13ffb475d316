"""Checkpoints: written whole or not at all, refused by name when damaged, loaded without running anybody's code.

    checkpoints/step-N/state.pt       everything (plain data and tensors; loads with weights_only=True)
    checkpoints/step-N/manifest.json  size and SHA-256 of it
    checkpoints/latest, best          text files that name a step
    weights.safetensors               the best model's weights (the averaged ones, where there is an average)

A step folder is written under a temporary name, flushed to the disk and renamed; `latest` names it only then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from harness.errors import CheckpointError, first_line
from harness.runs import layout
from harness.runs.files import commit, replacing, temporary_for, write_atomically

log = logging.getLogger("harness")

FORMAT = 1
_CHUNK_BYTES = 1 << 22


class Checkpoints:
    """The checkpoints of one run folder. Only one rank calls it; see ``Run.save`` for what all ranks do."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def write(self, step: int, content: dict[str, Any]) -> None:
        """Save ``content`` as the newest checkpoint; raises CheckpointError with nothing earlier lost."""
        final = self.folder / layout.step_name(step)
        temporary = temporary_for(final)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            path = temporary / layout.STATE
            with open(path, "wb") as file:
                torch.save({"format": FORMAT, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            manifest = {"format": FORMAT, "step": step, "bytes": path.stat().st_size, "sha256": _sha256(path)}
            write_atomically(temporary / layout.MANIFEST, json.dumps(manifest) + "\n")
            if final.exists():  # damaged, or of the run's other half: what replaces it is complete
                shutil.rmtree(final)
            commit(temporary, final)
            write_atomically(self.folder / layout.LATEST, final.name + "\n")
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {_reason(error)} ({_free(self.folder)})",
                where=str(self.folder),
                hint="free some space and start the same command again: it goes on from the checkpoint before",
            ) from None
        self.sweep()

    def mark_best(self, step: int, weights: dict[str, Tensor], path: Path) -> None:
        """``step`` is the best so far: keep it, and leave its ``weights`` at ``path``."""
        # Copies, since safetensors refuses weights that share memory (tied layers).
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
        try:
            with replacing(path) as temporary:
                save_file(tensors, temporary, {"step": str(step)})
            write_atomically(self.folder / layout.BEST, layout.step_name(step) + "\n")
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"the best weights could not be written: {_reason(error)}",
                where=str(path),
                hint="free some space and start the same command again",
            ) from None
        self.sweep()

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole; a damaged one is named in the log and passed over."""
        there, named = steps(self.folder), self._named(layout.LATEST)
        # What `latest` names comes first: a folder of a higher number was abandoned by a resume from an earlier one.
        for path in sorted((there[step] for step in sorted(there, reverse=True)), key=lambda path: path != named):
            problem = damage(path)
            if not problem:
                return path
            log.warning("checkpoint refused: %s: %s", path, problem)
        return None

    def _named(self, pointer: str) -> Path | None:
        try:
            return self.folder / (self.folder / pointer).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def sweep(self) -> None:
        """Remove all but the newest ``keep`` and the best, and what a crash left half written."""
        there = steps(self.folder)
        latest, best = (
            next((step for step, path in there.items() if path == self._named(pointer)), None)
            for pointer in (layout.LATEST, layout.BEST)
        )
        for step in outdated(there, latest, best, self.keep):
            shutil.rmtree(there[step], ignore_errors=True)
        for path in self.folder.glob("*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder`` by step, whole or not."""
    found = {layout.step_number(path.name): path for path in folder.glob("*") if path.is_dir()}
    return {step: path for step, path in found.items() if step is not None}


def outdated(steps: Iterable[int], latest: int | None, best: int | None, keep: int) -> list[int]:
    """Those of the checkpoints ``steps`` that go: all but the newest ``keep``, the ``latest`` and the ``best``."""
    # Steps beyond the latest were abandoned by a resume from an earlier one: they must not take its place.
    there = sorted(steps)
    current = [step for step in there if latest not in there or step <= (latest or 0)]
    return [step for step in there if step not in (*current[-keep:], latest, best)]


def damage(path: Path) -> str:
    """What is wrong with the checkpoint folder ``path``; empty if nothing is."""
    try:
        manifest = json.loads((path / layout.MANIFEST).read_text(encoding="utf-8"))
        size, digest, form = manifest["bytes"], manifest["sha256"], manifest["format"]
    except FileNotFoundError:
        return "it has no manifest.json, so it is not a checkpoint of this harness, or not a whole one"
    except (OSError, ValueError, KeyError, TypeError):
        return "its manifest.json cannot be read"
    if form != FORMAT:
        return f"it has format {form}, this version reads {FORMAT}"
    file = path / layout.STATE
    if not file.exists():
        return "state.pt is missing"
    if file.stat().st_size != size:
        return f"state.pt is truncated: {file.stat().st_size} of {size} bytes"
    if _sha256(file) != digest:
        return "state.pt is damaged: its SHA-256 is not the one in manifest.json"
    return ""


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """The content of the checkpoint folder ``path``, on the CPU. Raises CheckpointError, naming it.

    ``mapped``: tensors are read from the file where they are used, once for all ranks of a node; copy what is to stay.
    """
    try:
        content: dict[str, Any] = torch.load(path / layout.STATE, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint cannot be read: {_reason(error)}",
            where=str(path),
            hint="name another with checkpoint.resume=FOLDER, or start anew with checkpoint.resume=never",
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            "state.pt is not a checkpoint of this harness",
            where=str(path),
            hint="name another with checkpoint.resume=FOLDER, or start anew with checkpoint.resume=never",
        )
    return content


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    except OSError as error:
        return _reason(error)


def _reason(error: BaseException) -> str:
    """What the system said, where that is behind it (torch hides a full disk behind "unexpected pos 704 vs 598")."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return first_line(error)
