"""The folder and the size of the images of an annotation file."""

from __future__ import annotations

import itertools
import os
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

from harness.config.places import is_url
from harness.errors import ConfigError, DataError, plural
from harness.tools.init.columns import Annotations, Guess, plain

TYPICAL = 224  # height and width of images that most published models were trained on
_WITHOUT_GPU = 96  # a fifth of the pixels, and of the time
_PATHS = 50  # looked for in the folders that may be the root
_FOLDERS = 50  # that may be the root
_IMAGES = 32  # decoded
WRONG = "correct it: "  # starts the reason of a guess that cannot be right


def root(rows: Annotations, path_column: str, given_root: str | None) -> tuple[str, Guess]:
    """Return the folder ``given_root``, or the nearest below which most of the first paths exist, and the setting.
    Raises ConfigError if several are equally near."""
    from harness.data.image_files import ImageFiles  # late: imports torch, which takes seconds, and errors come before

    paths, folder, files = rows.columns[path_column][:_PATHS], Path(rows.source).parent, ImageFiles("")
    above = Path(os.path.normpath(folder / ".."))
    most, fit = 0, list[str]()
    for places in ([given_root],) if given_root else ((folder,), (Path(), *_folders_in(folder)), _folders_in(above)):
        num_below = {str(place): sum(files.is_below(str(place), path) for path in paths) for place in places}
        if (most_here := max(num_below.values(), default=0)) > most:
            most, fit = most_here, [place for place, count in num_below.items() if count == most_here]
        if most == len(paths):
            break
    folders = {os.path.realpath(ImageFiles(place).locate(paths[0])): place for place in fit}
    if len(folders) > 1:
        raise ConfigError(
            f"its paths exist below several folders: {', '.join(folders.values())}",
            where=rows.source,
            hint=f"say which: add --root {shlex.quote(fit[0])} to the command",
        )
    best = fit[0] if fit else given_root or str(folder)
    nearest = "" if given_root else ", the nearest such"
    reason = f"{most} of the first {len(paths)} paths exist below this folder{nearest}"
    if not most:
        reason = f"{WRONG}none of the first {len(paths)} paths, such as {paths[0]}, exists here"
    return best, Guess(f"root: {plain(best)}", "not looked at" if is_url(best) else reason, doubt=not most)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            paths = (entry.path for entry in entries if entry.is_dir())
            return [Path(path) for path in sorted(itertools.islice(paths, _FOLDERS))]
    except OSError:
        return []


def image_size(root: str, paths: Sequence[str]) -> tuple[tuple[int, int] | None, bool, int, str]:
    """Return ((height, width) to train with, or None if no image can be read; whether all have one channel; the typical
    shorter side; why)."""
    import torch

    from harness.data.image_files import ImageFiles
    from harness.data.vision import decode

    most, without_gpu = (TYPICAL, "") if torch.cuda.is_available() else (_WITHOUT_GPU, f"; {TYPICAL} on a GPU")
    files, shapes = ImageFiles(root), []
    for path in paths[:: -(-len(paths) // _IMAGES)]:
        try:
            if files.is_below(root, path):
                shapes.append(tuple(decode(files.read(path)).shape[-3:]))
        except (OSError, RuntimeError, DataError):
            continue
    if not shapes:
        return None, False, 0, "[height, width]; no image could be read"
    heights, widths = sorted(shape[1] for shape in shapes), sorted(shape[2] for shape in shapes)
    sizes = f"{heights[0]}x{widths[0]}"
    gray = all(shape[0] == 1 for shape in shapes)
    shorter = int(statistics.median(min(shape[1:]) for shape in shapes))
    if heights[0] == heights[-1] and widths[0] == widths[-1]:
        size = (heights[0], widths[0])
        if max(size) <= most:
            return size, gray, shorter, f"[height, width] of the {plural(len(shapes), 'image')} examined"
    else:
        sizes += f" to {heights[-1]}x{widths[-1]}"
    side = most if shorter >= most else max(32, shorter // 32 * 32)
    if side == most:
        sizes += without_gpu
    return (side, side), gray, shorter, f"[height, width]; {plural(len(shapes), 'image')} examined, {sizes}"
