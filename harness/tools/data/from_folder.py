"""An annotation table of the images in a folder per class (the layout of torchvision's ImageFolder)."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from harness.config.places import IMAGE_STARTS
from harness.data import image_folders
from harness.errors import ConfigError, DataError, plural, reason
from harness.tools.data.table_file import require_new, write_rows

_SPLITS = {"train", "training", "val", "valid", "validation", "eval", "test", "testing"}
_NAMED = 5  # classes in a message
_FILES_AT_ONCE = 32


def write(folder: Path, out: Path, force: bool = False) -> str:
    """Write path and label of each image below ``folder`` to ``out``; return a summary to print.

    The label is the name of the folder on the first level; deeper folders only order images. Follows links.
    """
    classes = _folders(folder)
    require_new([out], force)
    _require_classes(folder, classes)
    skipped: Counter[str] = Counter()
    count_of_class: Counter[str] = Counter()
    wrong = list[str]()

    def names() -> Iterator[str]:
        for name in image_folders.images_below(folder, skipped):
            if os.sep in name:
                yield name
            else:
                skipped["images outside a class folder"] += 1

    def rows() -> Iterator[tuple[str, str]]:
        for name, doubt in _with_doubts(folder, names()):
            if doubt:
                wrong.append(f"{name} ({doubt})")
            label = name.partition(os.sep)[0]
            count_of_class[label] += 1
            yield name, label

    count = write_rows(out, ("path", "label"), rows())
    if not count:
        outside = skipped["images outside a class folder"]
        command = f"harness predict RUN --images {shlex.quote(str(folder))}"
        hint = f"{image_folders.SUFFIXES}, in a folder per class: {folder}/cat/1.jpg"
        hint += f"; to predict images without labels: {command}" if outside else ""
        raise DataError(f"no images in class folders{image_folders.skips(skipped)}", where=str(folder), hint=hint)
    root = shlex.quote(f"task.root={folder}")
    contents = f"{plural(count, 'row')} of {plural(len(count_of_class), 'class')}"
    lines = [f"wrote {contents} to {out}{image_folders.skips(skipped)}"]
    if any(kind.startswith(".") for kind in skipped):
        lines.append(f"note: {image_folders.SUFFIXES}")
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        remedy = "remove them and write the table again, or set task.on_bad_row=skip"
        lines.append(f"warning: {plural(len(wrong), 'row')} of no image: {', '.join(wrong[:_NAMED])}{more}; {remedy}")
    if empty := sorted(classes - set(count_of_class)):
        lines.append(f"note: left out {plural(len(empty), 'folder')} without images: {', '.join(empty[:_NAMED])}")
    if len(count_of_class) == 1:
        lines.append("note: there is only one class, so there is nothing to learn")
    split = shlex.join(["harness", "data", "split", str(out), "--eval", "0.2", "--stratify", "label"])
    init = shlex.join(["harness", "init", str(out), "--root", str(folder)])
    return "\n".join([*lines, f"next: {split}; {init}; or set {root}"])


def _folders(folder: Path) -> set[str]:
    """Return the names of the folders in ``folder``. Raises DataError."""
    names = (entry.name for entry in image_folders.entries(folder) if image_folders.holds(entry.is_dir))
    return {name for name in names if not name.startswith(".")}


def _require_classes(folder: Path, names: set[str]) -> None:
    """Raise ConfigError if these folders in ``folder`` are splits."""
    if names and {name.lower() for name in names} <= _SPLITS:
        pairs = [shlex.join([str(folder / name), f"{name}.csv"]) for name in sorted(names)]
        commands = "; ".join(f"harness data folder {pair}" for pair in pairs)
        raise ConfigError(
            f"its folders are splits, not classes: {', '.join(sorted(names))}",
            where=str(folder),
            hint=f"write a table for each: {commands}",
        )


def _with_doubts(folder: Path, names: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield each name and its doubt, with several files open at once, as on a network disk each takes a while."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        while some := list(islice(names, 64 * _FILES_AT_ONCE)):
            yield from zip(some, pool.map(lambda name: _doubt(folder, name), some), strict=True)


def _doubt(folder: Path, name: str) -> str:
    """Return why the file does not begin like an image; empty if it does."""
    try:
        with open(folder / name, "rb") as stream:
            start = stream.read(16)
    except OSError as error:
        return reason(error)
    if any(re.match(pattern, start, re.DOTALL) for pattern in IMAGE_STARTS.values()):
        return ""
    return "another kind of file" if start else "empty"
