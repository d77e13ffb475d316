"""The tensors of a sharded checkpoint: one file per rank, written and read with torch.distributed.checkpoint (DCP).

    checkpoints/step-N/__R_0.distcp  the shards of rank R
    checkpoints/step-N/.metadata     which file holds which part of which tensor

``state.pt`` holds the rest of the checkpoint, with ``Mark`` dictionaries in place of these tensors.
"""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.errors import CheckpointError, first_line, reason, remedy
from harness.runs.files import sha256

MARK = "sharded tensor"  # {MARK: key} stands for a tensor
Files = dict[str, dict[str, Any]]
"""{file name: its bytes and SHA-256}."""
Own = Callable[[str, torch.Size], "Tensor | None"]
"""The tensor to fill for a key, such as this rank's shard; None: a whole one."""

# What DCP's metadata consists of. It is a pickle, and a checkpoint must not run code.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    **dict.fromkeys(("pathlib", "pathlib._local"), {"PosixPath"}),
    "torch": {"Size", "device", "float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8",
              "bool", "complex64", "complex128"},
    "torch.serialization": {"_get_layout"},
    "torch._C": {"_MemoryFormat"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write this rank's shards of ``tensors`` (DTensors) into ``folder``, synced. Collective over ``group``. Raises
    CheckpointError on all ranks if one fails."""
    from torch.distributed.checkpoint import FileSystemWriter, save  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder, single_file_per_rank=True), process_group=group)
    except CheckpointException as error:  # no subclass of Exception
        failed, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"rank {failed} could not write its shards: {first_line(cause)}", where=str(folder),
            hint="run the same command again, which resumes from the newest complete checkpoint",
        ) from None  # fmt: skip


def written(folder: Path, rank: int) -> Files:
    """The files that ``rank`` has written into ``folder``. Raises CheckpointError."""
    try:
        mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
        return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in mine}
    except OSError as error:
        raise CheckpointError(
            f"rank {rank} could not read its shards again: {reason(error)}", where=str(folder),
            hint=remedy(error, "run the same command again, which resumes from the newest complete checkpoint"),
        ) from None  # fmt: skip


def filled(folder: Path, content: Any, own: Own) -> Any:
    """``content`` of a checkpoint with each mark replaced by its tensor, read from ``folder``. No communication."""
    from torch.distributed.checkpoint import FileSystemReader, load, load_state_dict  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _metadata(folder)
    stored = metadata.state_dict_metadata
    tensors: dict[str, Tensor] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {MARK}:
                key, found = value[MARK], stored[value[MARK]]
                if not isinstance(found, TensorStorageMetadata):
                    raise ValueError(f"{key} is not a tensor")
                mine = own(key, found.size)
                dtype = found.properties.dtype
                tensors[key] = (
                    torch.empty(found.size, dtype=dtype) if mine is None else torch.empty_like(mine, dtype=dtype)
                )
                return tensors[key]
            return {key: replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    content = replaced(content)
    if tensors:
        reader = FileSystemReader(folder)
        reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # its own could run code
        with warnings.catch_warnings():  # that this is one process, as it should be
            warnings.simplefilter("ignore", UserWarning)
            if "no_dist" in inspect.signature(load).parameters:
                load(tensors, storage_reader=reader, no_dist=True)
            else:  # in older versions of torch, only a deprecated name has it
                warnings.simplefilter("ignore", FutureWarning)
                load_state_dict(tensors, reader, no_dist=True)
    return content


def _metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    with open(folder / ".metadata", "rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(".metadata was not written by torch.distributed.checkpoint")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, but a checkpoint holds only plain data")
        return super().find_class(module, name)
