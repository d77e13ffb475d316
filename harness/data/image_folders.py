"""The images below a folder, by the ends of their names, and which of its files are no images or copies."""

from __future__ import annotations

import filecmp
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from harness.config.places import IMAGE_STARTS, IMAGE_SUFFIXES, is_url
from harness.errors import DataError, did_you_mean, reason, remedy, require_regular_file

SUFFIXES = f"images are files whose names end with {', '.join(IMAGE_SUFFIXES)}"
_KINDS = 10  # of skipped files in a message
_FILES_AT_ONCE = 32
_END = 64  # bytes; those of images that end alike, such as PNG, include a checksum


def images_at(places: Sequence[str], skipped: Counter[str]) -> list[str]:
    """Return the images that ``places`` name, in this order: each is an image or its URL, or a folder of images, also
    deeper ones. Counts the other files by kind in ``skipped``. Raises DataError if there is no image at a place."""
    images = list[str]()
    for place in places:
        if os.path.isdir(place):
            inside = [os.path.join(place, name) for name in images_below(Path(place), skipped)]
            if not inside:
                raise DataError(f"no images{skips(skipped)}", where=place, hint=SUFFIXES)
            images += inside
        elif is_url(place) or os.path.isfile(place):
            images.append(place)
        else:
            raise DataError("there is no such image or folder", where=place, hint=did_you_mean(place))
    return images


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in ``folder``, sorted. Raises DataError, with the most similar folder if there is none."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError as error:
        hint = did_you_mean(folder, os.path.isdir) or "give the folder that has a folder of images for each class"
        raise DataError(f"the folder cannot be read: {reason(error)}", where=str(folder), hint=hint) from None
    except OSError as error:
        raise DataError(f"the folder cannot be read: {reason(error)}", where=str(folder), hint=remedy(error)) from None


def holds(kind: Callable[[], bool]) -> bool:
    """Return what ``kind`` of an entry does; False if it is a link to itself."""
    try:
        return kind()
    except OSError:
        return False


def images_below(folder: Path, skipped: Counter[str]) -> Iterator[str]:
    """Yield the paths of images below ``folder``, relative to it, sorted. Follows links. Counts other files by kind."""
    return _images_of(folder, folder, skipped, ())


def _images_of(folder: Path, root: Path, skipped: Counter[str], above: tuple[str, ...]) -> Iterator[str]:
    """Yield ``images_below`` relative to ``root``. ``above``: real paths of the folders above."""
    real_path = os.path.realpath(folder)
    if real_path in above:
        skipped["links to a folder above them"] += 1
        return
    for entry in entries(folder):
        if entry.name.startswith("."):
            skipped["hidden files"] += 1
        elif holds(entry.is_dir):
            yield from _images_of(Path(entry.path), root, skipped, (*above, real_path))
        elif not entry.name.lower().endswith(IMAGE_SUFFIXES):
            suffix = os.path.splitext(entry.name)[1].lower()
            skipped[f"{suffix} files" if suffix else "files without an extension"] += 1
        elif not holds(entry.is_file):
            skipped["broken links and special files"] += 1
        else:
            name = os.path.relpath(entry.path, root)
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                skipped["names that are not UTF-8"] += 1
            else:
                yield name


def skips(skipped: Counter[str]) -> str:
    """Return what was skipped, to end a sentence; empty if nothing was."""
    if not skipped:
        return ""
    counts = [f"{kind} ({count})" for kind, count in skipped.most_common(_KINDS)]
    more = f" and {len(skipped) - _KINDS} more kinds" if len(skipped) > _KINDS else ""
    return f"; skipped: {', '.join(counts)}{more}"


class Look(NamedTuple):
    """What a look at a file tells."""

    name: str
    doubt: str
    """Why it is no image; empty if it begins like one."""
    original: str
    """The first file with the same content; empty without one before it, and of no image."""


def looked_at(folder: Path, names: Iterable[str]) -> Iterator[Look]:
    """Yield what a look at each of ``names``, files below ``folder``, tells, in order. Opens several files at once, as
    on a network disk each takes a while, and reads only those that begin and end alike."""
    first_of, left = dict[int, str](), iter(names)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        while some := list(islice(left, 64 * _FILES_AT_ONCE)):
            for name, (doubt, key) in zip(some, pool.map(lambda name: _glance(folder, name), some), strict=True):
                first = name if doubt else first_of.setdefault(key, name)
                yield Look(name, doubt, first if first != name and _are_equal(folder / first, folder / name) else "")


def _glance(folder: Path, name: str) -> tuple[str, int]:
    """Return why a file is no image, empty if it begins like one, and a key that is the same for equal files."""
    try:
        require_regular_file(folder / name)
        with open(folder / name, "rb") as stream:
            start, size = stream.read(16), stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _END))
            key = hash((size, start, stream.read(_END)))
    except OSError as error:
        return reason(error), 0
    if any(re.match(pattern, start, re.DOTALL) for pattern in IMAGE_STARTS.values()):
        return "", key
    return "another kind of file" if start else "empty", key


def _are_equal(first: Path, second: Path) -> bool:
    """Return whether two files have the same content; False if one is gone or unreadable."""
    try:
        return filecmp.cmp(first, second, shallow=False)
    except OSError:
        return False
