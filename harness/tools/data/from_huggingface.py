"""Annotation tables, and image files, from a dataset of Hugging Face (the extra ``datasets``)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, DataError, first_line, plural
from harness.tools.data.table_file import require_new, write_rows

_LABELS = ("label", "labels", "target", "class")
_ENDINGS = {b"\xff\xd8": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp"}
_FILES = 10_000  # per folder of images


def write(name: str, folder: Path, splits: Sequence[str], label: str | None, force: bool) -> str:
    """Write SPLIT.csv for each of ``splits`` (all if empty) of the dataset ``name``, and its images below ``images``,
    into ``folder``; return a summary to print.

    ``name`` is a name on the Hub, or a folder that ``save_to_disk`` wrote. The columns: path if there are images, label
    if there is a ``label`` column (names of classes instead of their numbers), and all others that are text or numbers.
    """
    found = _load(name)
    chosen = list(splits) or list(found)
    if missing := [split for split in chosen if split not in found]:
        hint = f"it has {', '.join(found)}"
        raise ConfigError(
            f"{name} has no split{'s' * (len(missing) > 1)} {', '.join(missing)}", where="--split", hint=hint
        )
    folder.mkdir(parents=True, exist_ok=True)
    outs = {split: folder / f"{split}.csv" for split in chosen}
    require_new(outs.values(), force)
    lines = []
    for split, out in outs.items():
        columns, rows = _rows(found[split], folder, split, label)
        count = write_rows(out, columns, rows)
        if not count:
            raise DataError(f"split {split} of {name} is empty", where=name, hint="choose others with --split")
        lines.append(f"wrote {plural(count, 'row')} ({', '.join(columns)}) to {out}")
    return "\n".join([*lines, *([f"set {shlex.quote(f'task.root={folder}')}"] if (folder / "images").is_dir() else [])])


def _load(name: str) -> dict[str, Any]:
    """{split: its rows}. Raises ConfigError if the package is missing, DataError if the dataset cannot be loaded."""
    try:
        import datasets
    except ImportError:
        hint = "pip install 'apex-harness[datasets]'"
        raise ConfigError("this needs the datasets package, which is not installed", hint=hint) from None
    try:
        saved = any((Path(name) / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # of the network, the Hub, or the dataset
        hint = "give a name as listed on https://huggingface.co/datasets, or a folder that save_to_disk wrote"
        what = f"the dataset cannot be loaded: {type(error).__name__}: {first_line(error)}"
        raise DataError(what, where=name, hint=hint) from None
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}


def _rows(data: Any, folder: Path, split: str, label: str | None) -> tuple[list[str], Iterator[tuple[str, ...]]]:
    """(the columns of the table, its rows). Reading the rows writes the images."""
    from datasets import ClassLabel, Image, Value

    images = [name for name, kind in data.features.items() if isinstance(kind, Image)]
    classes = [name for name, kind in data.features.items() if isinstance(kind, ClassLabel)]
    plain = [name for name, kind in data.features.items() if isinstance(kind, Value | ClassLabel)]
    if label is not None and label not in plain:
        raise ConfigError(
            f"there is no column {label!r} with labels", where="--label", hint=f"the columns are {', '.join(plain)}"
        )
    label = label or next((name for name in (*_LABELS, *classes) if name in plain), None)
    for name in images[:1]:
        data = data.cast_column(name, Image(decode=False))
    others = [name for name in plain if name != label and name not in ("path", "label")]
    columns = [*(["path"] if images else []), *(["label"] if label else []), *others]
    if not columns:
        found = ", ".join(f"{name} ({kind})" for name, kind in data.features.items())
        raise DataError(f"split {split} has no images, text or numbers; it has {found}", where=split)

    def text(name: str, value: Any) -> str:
        is_class = isinstance(data.features[name], ClassLabel)
        if value is None or (is_class and value < 0):  # -1 stands for a label that is not published
            return ""
        return str(data.features[name].int2str(value) if is_class else value)

    def rows() -> Iterator[tuple[str, ...]]:
        for number, row in enumerate(data):
            path = [_image(folder, split, number, row[images[0]])] if images else []
            yield (*path, *(text(name, row[name]) for name in ([label] if label else []) + others))

    return columns, rows()


def _image(folder: Path, split: str, number: int, image: dict[str, Any] | None) -> str:
    """Write an encoded image; return its path relative to ``folder``, empty if the row has none."""
    if image is None:
        return ""
    content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
    ending = next((ending for magic, ending in _ENDINGS.items() if content.startswith(magic)), "img")
    name = f"images/{split}/{number // _FILES:04d}/{number:08d}.{ending}"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return name
