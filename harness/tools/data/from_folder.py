"""An annotation table of the images in a folder per class (the layout of torchvision's ImageFolder)."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness.data import image_folders
from harness.errors import ConfigError, DataError, first_few, plural
from harness.tools.data.table_file import require_new, write_rows

_SPLITS = {"train", "training", "val", "valid", "validation", "eval", "test", "testing"}
_NAMED = 5  # classes or files in a message


def write(folder: Path, out: Path, force: bool = False) -> str:
    """Write path and label of each image below ``folder`` to ``out``; return a summary to print.

    The label is the name of the folder on the first level; deeper folders only order images. Follows links.
    """
    classes = _folders(folder)
    require_new([out], force)
    _require_classes(folder, classes)
    skipped: Counter[str] = Counter()
    count_of_class: Counter[str] = Counter()
    wrong, copies = list[str](), list[str]()

    def names() -> Iterator[str]:
        for name in image_folders.images_below(folder, skipped):
            if os.sep in name:
                yield name
            else:
                skipped["images outside a class folder"] += 1

    def rows() -> Iterator[tuple[str, str]]:
        for name, doubt, original in image_folders.looked_at(folder, names()):
            if doubt:
                wrong.append(f"{name} ({doubt})")
            elif original:
                copies.append(f"{name} (of {original})")
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
        remedy = "remove them and write the table again, or set task.on_bad_row=skip"
        lines.append(f"warning: {plural(len(wrong), 'row')} of no image: {first_few(wrong, _NAMED)}; {remedy}")
    if copies:
        why = "a copy in the evaluation rows tests nothing, and of copies in two classes, one has a wrong label"
        remedy = f"remove them and write the table again: {why}"
        lines.append(f"warning: {plural(len(copies), 'row')} of copied images: {first_few(copies, _NAMED)}; {remedy}")
    if empty := sorted(classes - set(count_of_class)):
        lines.append(f"note: left out {plural(len(empty), 'folder')} without images: {first_few(empty, _NAMED)}")
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
