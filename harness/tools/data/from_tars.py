"""An annotation table of the images in tar archives (the layout of WebDataset), and the index of each archive."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.data import tars
from harness.errors import DataError, did_you_mean, plural, reason, remedy
from harness.runs.files import cache_folder
from harness.tools.data.from_folder import IMAGES, skips
from harness.tools.data.table_file import write_rows

_Parts = dict[str, tuple[str, int, int]]  # {ending: (name, offset, size)}


def write(place: Path, out: Path, image: str | None, label: str | None, cache_dir: Path | None) -> str:
    """Write path and label of each image in the archive ``place``, or in all archives of that folder, to
    ``out``; return a summary to print. Makes the index of each archive.

    A sample is all members with the same name up to the first dot of its last part. ``image``: the extension of the
    image, if samples have several. ``label``: the extension of the text file with the label (cls), or the key in
    KEY.json.
    """
    folder = place if place.is_dir() else place.parent
    files = sorted(folder.rglob("*.tar")) if place.is_dir() else [place]
    if not files:
        packed = [path.name for path in folder.rglob("*.tar.*")]
        hint = (
            f"decompress {packed[0]} first: members of a compressed archive cannot be read one by one" if packed else ""
        )
        raise DataError("no archives that end with .tar", where=str(place), hint=hint)
    skipped: Counter[str] = Counter()
    labeled = _has_labels(files[0], image, label)

    def rows() -> Iterator[tuple[str, ...]]:
        for file in files:
            for key, parts in _samples(file):
                if not (name := _image_of(file, key, parts, image)):
                    skipped["samples without an image"] += 1
                    continue
                path = f"{file.relative_to(folder).as_posix()}/{name}"
                yield (path, _label_of(file, key, parts, label)) if labeled else (path,)
            tars.read_index(str(file), cache_folder(cache_dir) / "tars")

    count = write_rows(out, ("path", "label") if labeled else ("path",), rows())
    if not count:
        raise DataError(f"no images in {plural(len(files), 'archive')}{skips(skipped)}", where=str(place))
    note = "" if labeled else "\nnote: the samples have no labels (KEY.cls, or a key of KEY.json with --label)"
    root = shlex.quote(f"task.root={folder}")
    return (
        f"wrote {plural(count, 'row')} from {plural(len(files), 'archive')} to {out}{skips(skipped)}{note}\nset {root}"
    )


def _samples(file: Path) -> Iterator[tuple[str, _Parts]]:
    """(key, members by their ending) of each sample: consecutive members with the same key."""
    last, parts = None, _Parts()
    for name, offset, size in _members(file):
        base = name.rpartition("/")[2]
        if base.startswith("."):
            continue
        key, ending = name[: len(name) - len(base)] + base.partition(".")[0], base.partition(".")[2].lower()
        if key != last and parts:
            yield str(last), parts
            parts = {}
        last = key
        parts[ending] = (name, offset, size)
    if parts:
        yield str(last), parts


def _members(file: Path) -> Iterator[tuple[str, int, int]]:
    try:
        yield from tars.members(str(file), str(file))
    except OSError as error:
        raise DataError(
            f"the archive cannot be read: {reason(error)}", where=str(file), hint=did_you_mean(file) or remedy(error)
        ) from None


def _image_of(file: Path, key: str, parts: _Parts, image: str | None) -> str:
    """The name of the image of a sample; "" if it has none."""
    if image is not None:
        return parts[image.lstrip(".").lower()][0] if image.lstrip(".").lower() in parts else ""
    found = [ending for ending in parts if f".{ending}".endswith(IMAGES)]
    if len(found) > 1:
        raise DataError(
            f"sample {key} has several images: {', '.join(found)}", where=str(file), hint=f"add --image {found[0]}"
        )
    return parts[found[0]][0] if found else ""


def _has_labels(file: Path, image: str | None, label: str | None) -> bool:
    """True if the first sample with an image has a label. A chosen ``label`` must exist."""
    first = next((parts for key, parts in _samples(file) if _image_of(file, key, parts, image)), _Parts())
    return label is not None or "cls" in first


def _label_of(file: Path, key: str, parts: _Parts, label: str | None) -> str:
    wanted = label or "cls"
    if wanted in parts:
        return re.sub(r"\s+", " ", _text(file, *parts[wanted])).strip()
    found: Any = None
    if label is not None and "json" in parts:
        try:
            found = json.loads(_text(file, *parts["json"]))
        except ValueError as error:
            raise DataError(f"member {parts['json'][0]} is not JSON: {error}", where=str(file)) from None
        if isinstance(found, dict) and isinstance(found.get(label), str | int):
            return str(found[label])
    keys = f"; {parts['json'][0]} has {', '.join(map(str, found))}" if isinstance(found, dict) else ""
    raise DataError(
        f"sample {key} has no label {wanted!r}; its members have the extensions {', '.join(parts)}{keys}",
        where=str(file),
        hint="choose the extension of a text member, or a key of the JSON member, with --label NAME",
    )


def _text(file: Path, name: str, offset: int, size: int) -> str:
    with open(file, "rb") as stream:
        stream.seek(offset)
        try:
            return stream.read(size).decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"member {name} is not UTF-8 text", where=str(file)) from None
