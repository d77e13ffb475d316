"""Predictions that are arrays, such as masks: a file for each row, whose path is in the table of predictions.

``predictions.csv`` names files in ``predictions_files``, the folder beside it, with a folder for each column.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from harness.errors import HarnessError, listed, plural
from harness.runs.files import make_folder, replace_folder, sync, temporary_for


@dataclass(frozen=True)
class RowFiles:
    """A column of ``predictions`` with an array for each row."""

    values: Tensor | Sequence[Any]
    kind: Literal["png", "npz"] = "npz"
    """png for uint8 or bool of shape (height, width), (1, height, width) or (3, height, width), such as masks and
    images, bool becoming uint8 of 0 and 255; npz for any array, or a dictionary of arrays, such as boxes and scores."""
    named_by: str = ""
    """The column of ``known`` that names the files, / becoming _; empty: the numbers of the rows do."""

    def encoded(self, name: str, rows: Sequence[int], known: Mapping[str, Any] | None = None) -> dict[str, bytes]:
        """Return {path below the folder: content} of column ``name`` for ``rows``, in their order. ``known``: columns
        of these rows; None numbers the files in any case. Raises HarnessError."""
        what = f"the task's predictions()[{name!r}]"
        if len(self.values) != len(rows):
            found = f"{plural(len(self.values), 'array')} for {plural(len(rows), 'row')}"
            raise HarnessError(f"{what} has {found}", hint="return one per row")
        if name in ("", ".", ".."):
            raise HarnessError(f"{what} has a name that no folder can have", hint="choose another name")
        if self.kind not in ("png", "npz"):
            raise HarnessError(f"{what} is of kind {self.kind!r}", hint="use png or npz")
        values = self.values.cpu() if isinstance(self.values, Tensor) else self.values  # at once, not row by row
        encode = _png if self.kind == "png" else _npz
        folder = name.replace("/", "_")
        paths = [f"{folder}/{stem}.{self.kind}" for stem in self._stems(what, rows, known)]
        files = {path: encode(value, what) for path, value in zip(paths, values, strict=True)}
        if len(files) < len(paths):
            raise _twins(max(paths, key=paths.count))
        return files

    def _stems(self, what: str, rows: Sequence[int], known: Mapping[str, Any] | None) -> list[str]:
        if known is None or not self.named_by:
            return [f"{row:06d}" for row in rows]
        if self.named_by not in known:
            found = f"{what} is named by {self.named_by!r}, but known() has only {listed(list(known))}"
            raise HarnessError(found, hint="add the column to known(), or remove named_by")
        stems = [(text or "").replace("/", "_") for text in pa.array(known[self.named_by]).cast("string").to_pylist()]
        if "" in stems:
            found = f"{what} is named by {self.named_by!r}, which is empty in row {rows[stems.index('')]}"
            raise HarnessError(found, hint="give each row a name of its own")
        return stems


def _twins(path: str) -> HarnessError:
    hint = "name them by a column that differs in each row; in the name of a file, / becomes _"
    return HarnessError(f"two rows would write {path}, by named_by of RowFiles", hint=hint)


def folder_of(table: Path) -> Path:
    """Return the folder of the files that ``table`` names."""
    return table.with_name(f"{table.stem}_files")


class FilesFolder:
    """The folder of the files beside ``table``, under a temporary name until ``finish``.

    It replaces an earlier one. Without files, an earlier one stays: it may be the user's own."""

    def __init__(self, table: Path) -> None:
        self._path = folder_of(table)
        self._temporary = temporary_for(self._path)
        self._made: set[Path] = set()

    def add(self, files: Mapping[str, bytes]) -> None:
        if files and not self._made:
            self.discard()  # what a killed process left
        for name, content in files.items():
            path = self._temporary / name
            if path.parent not in self._made:
                make_folder(path.parent)
                self._made.add(path.parent)
            if path.exists():
                raise _twins(name)
            path.write_bytes(content)
            sync(path)

    def finish(self) -> None:
        """Give the folder its name."""
        if not self._made:
            return
        for folder in self._made:
            sync(folder)
        replace_folder(self._temporary, self._path)

    def discard(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


def read(path: Path) -> Any:
    """Return the array in ``path``, which ``RowFiles`` wrote; a dictionary of several."""
    if path.suffix == ".png":
        from harness.data import vision  # late: only images need torchvision

        image: np.ndarray = vision.torchvision("io").decode_image(str(path)).numpy()
        return image[0] if len(image) == 1 else image
    with np.load(path) as content:
        arrays = {name: content[name] for name in content.files}
    return arrays["array"] if arrays.keys() == {"array"} else arrays


def _png(value: Any, what: str) -> bytes:
    from harness.data import vision  # late: only images need torchvision

    try:
        image = given = torch.as_tensor(value).cpu()
    except (ValueError, TypeError, RuntimeError) as error:
        raise HarnessError(f"{what} is not an array of numbers: {error}", hint="return tensors or arrays") from None
    image = image.to(torch.uint8) * 255 if image.dtype == torch.bool else image
    image = image[None] if image.dim() == 2 else image
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise HarnessError(
            f"{what} has an array of {given.dtype} and shape {tuple(given.shape)}, which is no PNG",
            hint="return uint8 of shape (height, width) or (3, height, width), or use kind='npz'",
        )
    return bytes(vision.torchvision("io").encode_png(image.contiguous()).numpy())


def _npz(value: Any, what: str) -> bytes:
    if isinstance(value, Mapping) and value.keys() == {"array"}:
        what = f"{what} is a dictionary with the one key 'array', which would be read as the array itself"
        raise HarnessError(what, hint="return the array, or choose another key")
    arrays = value if isinstance(value, Mapping) else {"array": value}
    content = io.BytesIO()
    try:
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:  # np.savez refuses some names
            for name, each in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, _array(each), allow_pickle=False)
    except (ValueError, TypeError) as error:
        raise HarnessError(f"{what} is not an array of numbers: {error}", hint="return tensors or arrays") from None
    return content.getvalue()


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value  # which NumPy has not
    return np.asarray(value)
