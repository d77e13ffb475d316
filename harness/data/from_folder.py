"""An annotation table of the images in a folder per class (the layout of torchvision's ImageFolder)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness.data.table_file import write_rows
from harness.errors import ConfigError, DataError, reason, remedy

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif")  # that torchvision decodes
_SPLITS = {"train", "training", "val", "valid", "validation", "eval", "test", "testing"}
_NAMED = 5  # classes in a message


def write(folder: Path, out: Path) -> str:
    """Write path and label of each image below ``folder`` to ``out``; return a summary to print.

    The label is the name of the folder on the first level; deeper folders only order images. Follows links.
    """
    classes = _class_folders(folder)
    skipped: Counter[str] = Counter()
    found: Counter[str] = Counter()

    def rows() -> Iterator[tuple[str, str]]:
        for name in _images_of(folder, folder, skipped, (), top=True):
            if os.sep not in name:
                skipped["images outside a class folder"] += 1
                continue
            label = name.partition(os.sep)[0]
            found[label] += 1
            yield name, label

    count = write_rows(out, ("path", "label"), rows())
    if not count:
        hint = f"images are files whose names end with {', '.join(IMAGES)}, in a folder per class: {folder}/cat/1.jpg"
        raise DataError(f"no images in class folders{skips(skipped)}", where=str(folder), hint=hint)
    lines = [f"wrote {count} rows of {len(found)} class{'es' if len(found) > 1 else ''} to {out}{skips(skipped)}"]
    if empty := sorted(classes - set(found)):
        lines.append(f"note: no images in {len(empty)} folder(s), which are no classes: {', '.join(empty[:_NAMED])}")
    if len(found) == 1:
        lines.append("note: there is one class, so there is nothing to learn")
    return "\n".join([*lines, f"set task.root={folder}"])


def _class_folders(folder: Path) -> set[str]:
    try:
        names = {entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")}
    except OSError as error:
        raise DataError(f"the folder cannot be read: {reason(error)}", where=str(folder), hint=remedy(error)) from None
    if names and {name.lower() for name in names} <= _SPLITS:
        commands = "; ".join(f"harness data folder '{folder / name}' {name}.csv" for name in sorted(names))
        raise ConfigError(
            f"its folders are splits, not classes: {', '.join(sorted(names))}",
            where=str(folder),
            hint=f"write a table for each: {commands}",
        )
    return names


def _images_of(
    folder: Path, root: Path, skipped: Counter[str], above: tuple[str, ...], top: bool = False
) -> Iterator[str]:
    """The paths of images below ``folder`` relative to ``root``, sorted. ``above``: real paths of the folders above."""
    here = os.path.realpath(folder)
    if here in above:
        skipped["links to a folder above them"] += 1
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            skipped["hidden files"] += 1
        elif entry.is_dir():
            yield from _images_of(Path(entry.path), root, skipped, (*above, here))
        elif not entry.name.lower().endswith(IMAGES):
            skipped["files that are no images"] += 1
        elif not entry.is_file():
            skipped["broken links and special files"] += 1
        else:
            name = os.path.relpath(entry.path, root)
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                skipped["names that are not UTF-8"] += 1
            else:
                yield name


def skips(skipped: Counter[str]) -> str:
    return f"; skipped: {', '.join(f'{count} {what}' for what, count in sorted(skipped.items()))}" if skipped else ""
