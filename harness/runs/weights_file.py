"""Files of weights: safetensors with a digest of their content. ``weights.safetensors`` of a run is one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.errors import CheckpointError, reason
from harness.runs import layout

# The key of all metadata of a safetensors file, as JSON: the library writes several keys in a random order.
_METADATA, _DIGEST = "harness", "sha256"


def with_versions(weights: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return ``weights`` with the versions that the modules of ``model`` have, for ``load_state_dict``. A file of
    tensors holds none, and a module with versions would convert weights that are current, or refuse them."""
    versioned = OrderedDict(weights)
    versioned._metadata = getattr(model.state_dict(), "_metadata", {})  # type: ignore[attr-defined]
    return versioned


def on_host(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return CPU copies of the tensors in ``weights`` that share no memory, as safetensors requires (tied layers)."""
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def save_weights(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str], work: Path) -> None:
    """Write a safetensors file in the folder ``work``, on the same disk, and move it to ``path``. Its metadata have
    ``metadata`` and a digest of the content, so that the two cannot disagree. The folder is removed at the end, and
    before, if a killed process left it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        # It first writes a file of a random name next to this one.
        text = json.dumps({**metadata, _DIGEST: _digest(tensors, metadata)}, sort_keys=True)
        save_file(tensors, work / layout.WEIGHTS, {_METADATA: text})
        os.replace(work / layout.WEIGHTS, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_weights(path: Path, of_run: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the CPU, verified by its digest. ``of_run``: it must have one, as
    every file of ``save_weights``. Raises CheckpointError."""
    subject = "the best weights" if of_run else "it"
    try:
        with safe_open(path, "pt") as file:
            metadata = weights_metadata(file)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except (OSError, SafetensorError) as error:
        raise _weights_error(path, f"{subject} cannot be read: {reason(error)}") from None
    recorded = metadata.pop(_DIGEST, None)
    if recorded is None and of_run:
        raise _weights_error(path, "the best weights have no digest: the file is damaged, or of another program")
    if recorded is not None and recorded != _digest(tensors, metadata):
        raise _weights_error(path, "the weights are damaged: their SHA-256 differs from the recorded one")
    return tensors


def weights_metadata(file: Any) -> dict[str, str]:
    """Return what ``save_weights`` recorded in the open safetensors ``file``; empty if another program wrote it, or if
    it is damaged."""
    with suppress(ValueError):
        metadata = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
        return metadata if isinstance(metadata, dict) else {}
    return {}


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of ``metadata`` and of the names, types, shapes and bytes of ``tensors``."""
    kinds = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(tensors.items())]
    digest = hashlib.sha256(json.dumps([sorted(metadata.items()), kinds]).encode())
    for name, _, _ in kinds:
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _weights_error(path: Path, message: str) -> CheckpointError:
    hint = "copy the file again; or continue the training: an evaluation with a new best result writes it again"
    return CheckpointError(message, where=str(path), hint=hint)
