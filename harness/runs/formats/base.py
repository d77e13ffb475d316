"""The interface of a checkpoint format. To add one, write a module with a class ``Format`` like whole.py.

A format turns the content of a checkpoint into files, and back. All else is the same for every format, and
``harness.runs.checkpoint`` does it: syncing and hashing the files, the manifest, the final name, verification. So
nobody's code has to be imported to tell whether a checkpoint is intact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config import plugins

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness.distributed.runtime import Runtime

    Own = Callable[[str, torch.Size], Tensor | None]
    """The tensor to fill for a key, such as this rank's shard; None: a whole one."""


class Format(ABC):
    """Writes the content of a checkpoint into a folder, and reads it.

    With ``sharded``, every rank writes its shards of the tensors, which needs fsdp and a folder that all machines
    share. Otherwise rank 0 writes whole tensors.
    """

    sharded: ClassVar[bool] = False

    @abstractmethod
    def write(self, folder: Path, content: dict[str, Any], ranks: Runtime) -> Iterable[str]:
        """Write ``content``, nested plain data and tensors, and return the names of the files that this rank wrote.

        ``ranks`` are those that call it: all of them for a ``sharded`` format, where an error must be raised on all
        ranks, else this one alone.
        """

    @abstractmethod
    def read(self, folder: Path, mapped: bool, own: Own) -> dict[str, Any]:
        """Return the content, on the CPU. Only this rank calls it, and no code in the files may run.

        ``mapped``: files may be memory-mapped, so that the ranks of a node share their pages. ``own``: for a sharded
        format, the tensors to fill instead of whole ones.
        """


def find(name: str, where: str = "checkpoint.format") -> Format:
    """Return the format ``name``. Raises ConfigError at ``where`` if there is none."""
    part: type[Format] = plugins.find("format", name, where)
    return part()
