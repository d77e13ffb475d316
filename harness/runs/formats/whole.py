"""The format of one file: rank 0 writes ``state.pt``, with whole tensors, under every strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.runs import layout
from harness.runs.formats import base

if TYPE_CHECKING:
    from harness.distributed.runtime import Runtime


class Format(base.Format):
    """``torch.save`` and ``torch.load``, which are imported late: a launcher asks only for ``sharded``."""

    def write(self, folder: Path, content: dict[str, Any], ranks: Runtime) -> Iterable[str]:
        import torch

        with open(folder / layout.STATE, "wb") as file:
            torch.save(content, file)
        return [layout.STATE]

    def read(self, folder: Path, mapped: bool, own: base.Own) -> dict[str, Any]:
        import torch

        path = folder / layout.STATE
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return content
