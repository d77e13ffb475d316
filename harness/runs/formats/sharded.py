"""The format in which each rank writes its shards, with torch.distributed.checkpoint (DCP).

checkpoints/step-N/__R_0.distcp  the shards of rank R
checkpoints/step-N/.metadata     which file holds which part of which tensor
checkpoints/step-N/state.pt      the rest, with a mark in place of each sharded tensor
"""

from __future__ import annotations

import functools
import inspect
import pickle
import warnings
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import CheckpointError, first_line
from harness.runs.formats import base, whole

if TYPE_CHECKING:
    from torch import Tensor

    from harness.distributed.runtime import Runtime

_MARK = "sharded tensor"  # {_MARK: key} stands for a tensor
_INDEX = ".metadata"

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


class Format(whole.Format):
    """One file per rank for the tensors that fsdp has sharded, and ``state.pt`` for the rest."""

    sharded = True

    def write(self, folder: Path, content: dict[str, Any], ranks: Runtime) -> Iterable[str]:
        plain, tensors = _split(content)
        if tensors:
            _save(folder, tensors, ranks.group)
        names = [path.name for path in folder.glob(f"__{ranks.rank}_*")]
        with ranks.together("saving"):
            if ranks.rank == 0:
                names += [*super().write(folder, plain, ranks), *([_INDEX] if tensors else [])]
        return names

    def read(self, folder: Path, mapped: bool, own: base.Own) -> dict[str, Any]:
        content: dict[str, Any] = _filled(folder, super().read(folder, mapped, own), own)
        return content


def _split(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return (``tree`` with marks in place of its sharded tensors, {key: sharded tensor}). Keys join the path with
    slashes."""
    from torch.distributed.tensor import DTensor

    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, DTensor):
            tensors[path] = value
            return {_MARK: path}
        if isinstance(value, dict):
            return {key: plain(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(plain(item, f"{path}/{number}") for number, item in enumerate(value))
        return value

    return plain(tree, ""), tensors


def _save(folder: Path, tensors: dict[str, Tensor], group: Any) -> None:
    """Write this rank's shards of ``tensors``. Collective over ``group``. Raises CheckpointError on all ranks if one
    fails."""
    from torch.distributed.checkpoint import FileSystemWriter, save  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        save(tensors, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), process_group=group)
    except CheckpointException as error:  # no subclass of Exception
        failed, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"rank {failed} could not write its shards: {first_line(cause)}", where=str(folder),
            hint="run the same command again, which resumes from the newest complete checkpoint",
        ) from None  # fmt: skip


def _filled(folder: Path, content: Any, own: base.Own) -> Any:
    """Return ``content`` of a checkpoint with each mark replaced by its tensor, read from ``folder``. No
    communication."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load, load_state_dict  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = functools.cache(lambda: _metadata(folder))  # one process writes no shards, so there may be none
    tensors: dict[str, Tensor] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {_MARK}:
                key, saved = value[_MARK], metadata().state_dict_metadata[value[_MARK]]
                if not isinstance(saved, TensorStorageMetadata):
                    raise ValueError(f"{key} is not a tensor")
                template = own(key, saved.size)
                dtype = saved.properties.dtype
                tensors[key] = (
                    torch.empty(saved.size, dtype=dtype)
                    if template is None
                    else torch.empty_like(template, dtype=dtype)
                )
                return tensors[key]
            return {key: replaced(item) for key, item in value.items()}
        return type(value)(map(replaced, value)) if isinstance(value, list | tuple) else value

    content = replaced(content)
    if tensors:
        reader = FileSystemReader(folder)
        reader.read_metadata = lambda *_, **__: metadata()  # type: ignore[method-assign]  # its own could run code
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

    with open(folder / _INDEX, "rb") as file:
        loaded = _Unpickler(file).load()
    if not isinstance(loaded, Metadata):
        raise pickle.UnpicklingError(".metadata was not written by torch.distributed.checkpoint")
    return loaded


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, but a checkpoint holds only plain data")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """Stand for getattr, with which Python 3.11.2 and others pickle a member of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f".metadata asks for {name} of {kind}, but a checkpoint holds only plain data")
    return kind[name]
