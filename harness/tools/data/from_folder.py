"""An annotation table of the images in a folder per class (the layout of torchvision's ImageFolder)."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from harness.config.places import IMAGE_STARTS, IMAGE_SUFFIXES
from harness.errors import ConfigError, DataError, did_you_mean, plural, reason, remedy
from harness.tools.data.table_file import require_new, write_rows

_SPLITS = {"train", "training", "val", "valid", "validation", "eval", "test", "testing"}
_NAMED = 5  # classes in a message
_KINDS = 10  # of skipped files in a message
_SUFFIXES = f"images are files whose names end with {', '.join(IMAGE_SUFFIXES)}"
_FILES_AT_ONCE = 32


def write(folder: Path, out: Path, labels: bool = True, force: bool = False) -> str:
    """Write path and label of each image below ``folder`` to ``out``, or only the paths of all images without
    ``labels``; return a summary to print.

    The label is the name of the folder on the first level; deeper folders only order images. Follows links.
    """
    classes = _folders(folder)
    require_new([out], force)
    if labels:
        _require_classes(folder, classes)
    skipped: Counter[str] = Counter()
    found: Counter[str] = Counter()
    wrong = list[str]()

    def names() -> Iterator[str]:
        for name in _images_of(folder, folder, skipped, ()):
            label = name.partition(os.sep)[0]
            if labels and label == name:
                skipped["images outside a class folder"] += 1
                continue
            found[label] += 1
            yield name

    def rows() -> Iterator[tuple[str, ...]]:
        for name, doubt in _with_doubts(folder, names()):
            wrong.extend([f"{name} ({doubt})"] if doubt else [])
            yield (name, name.partition(os.sep)[0]) if labels else (name,)

    count = write_rows(out, ("path", "label") if labels else ("path",), rows())
    if not count:
        outside = skipped["images outside a class folder"]
        command = f"harness data folder {shlex.quote(str(folder))} {shlex.quote(str(out))} --no-labels"
        hint = _SUFFIXES
        hint += f", in a folder per class: {folder}/cat/1.jpg" if labels else ""
        hint += f"; to make a table of unlabeled images for harness predict: {command}" if outside else ""
        what = "no images in class folders" if labels else "no images"
        raise DataError(f"{what}{_skips(skipped)}", where=str(folder), hint=hint)
    root = shlex.quote(f"task.root={folder}")
    classes_found = f" of {plural(len(found), 'class')}" if labels else ""
    lines = [f"wrote {plural(count, 'row')}{classes_found} to {out}{_skips(skipped)}"]
    if any(kind.startswith(".") for kind in skipped):
        lines.append(f"note: {_SUFFIXES}")
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        remedy = "remove them and write the table again, or set task.on_bad_row=skip"
        lines.append(f"warning: {plural(len(wrong), 'row')} of no image: {', '.join(wrong[:_NAMED])}{more}; {remedy}")
    if not labels:
        return "\n".join([*lines, f"next: harness predict RUN --csv {shlex.quote(str(out))} {root}"])
    if empty := sorted(classes - set(found)):
        lines.append(f"note: left out {plural(len(empty), 'folder')} without images: {', '.join(empty[:_NAMED])}")
    if len(found) == 1:
        lines.append("note: there is only one class, so there is nothing to learn")
    split = shlex.join(["harness", "data", "split", str(out), "--eval", "0.2", "--stratify", "label"])
    init = shlex.join(["harness", "init", str(out), "--root", str(folder)])
    return "\n".join([*lines, f"next: {split}; {init}; or set {root}"])


def _folders(folder: Path) -> set[str]:
    """Return the names of the folders in ``folder``. Raises DataError."""
    return {entry.name for entry in _entries(folder) if _is(entry.is_dir) and not entry.name.startswith(".")}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in ``folder``, sorted. Raises DataError, with the most similar folder if there is none."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError as error:
        hint = did_you_mean(folder, os.path.isdir) or "give the folder that has a folder of images for each class"
        raise DataError(f"the folder cannot be read: {reason(error)}", where=str(folder), hint=hint) from None
    except OSError as error:
        raise DataError(f"the folder cannot be read: {reason(error)}", where=str(folder), hint=remedy(error)) from None


def _is(kind: Callable[[], bool]) -> bool:
    """Return what ``kind`` of an entry does; False if it is a link to itself."""
    try:
        return kind()
    except OSError:
        return False


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


def _images_of(folder: Path, root: Path, skipped: Counter[str], above: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of images below ``folder`` relative to ``root``, sorted. ``above``: real paths of the folders
    above."""
    here = os.path.realpath(folder)
    if here in above:
        skipped["links to a folder above them"] += 1
        return
    for entry in _entries(folder):
        if entry.name.startswith("."):
            skipped["hidden files"] += 1
        elif _is(entry.is_dir):
            yield from _images_of(Path(entry.path), root, skipped, (*above, here))
        elif not entry.name.lower().endswith(IMAGE_SUFFIXES):
            suffix = os.path.splitext(entry.name)[1].lower()
            skipped[f"{suffix} files" if suffix else "files without an extension"] += 1
        elif not _is(entry.is_file):
            skipped["broken links and special files"] += 1
        else:
            name = os.path.relpath(entry.path, root)
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                skipped["names that are not UTF-8"] += 1
            else:
                yield name


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


def _skips(skipped: Counter[str]) -> str:
    if not skipped:
        return ""
    shown = [f"{kind} ({count})" for kind, count in skipped.most_common(_KINDS)]
    more = f" and {len(skipped) - _KINDS} more kinds" if len(skipped) > _KINDS else ""
    return f"; skipped: {', '.join(shown)}{more}"
