"""The configuration that ``harness init`` writes: what the annotations seem to hold, and settings to start with.

Every guess is a line of YAML with its reason as a comment, so that a wrong one is seen and corrected in the file.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.config.places import HUB, IMAGE_SUFFIXES, is_url
from harness.data.table.source import kind_of, locate, reader_of
from harness.errors import ConfigError, DataError, plural, reason, remedy

_ROWS = 100_000  # looked at, from the start of a file
_PATHS = 50  # looked for in the folders that may be the root
_FOLDERS = 50  # that may be the root
_IMAGES = 32  # decoded
_EVAL = ("eval", "val", "valid", "validation", "dev", "test")
_PATH_NAMES = ("path", "image", "file", "filename", "img", "filepath", "image_path")
_LABEL_NAMES = ("label", "class", "target", "category", "y", "labels", "tags", "classes")
# Columns that hold a box: four numbers, none of which is a class.
_BOXES = (
    ("xmin", "ymin", "xmax", "ymax"), ("x_min", "y_min", "x_max", "y_max"), ("x1", "y1", "x2", "y2"),
    ("left", "top", "right", "bottom"), ("left", "top", "width", "height"), ("x", "y", "width", "height"),
    ("x", "y", "w", "h"), ("cx", "cy", "w", "h"), ("x_center", "y_center", "width", "height"),
)  # fmt: skip
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_PACKED = re.compile(rf"[\[(]?\s*{_NUMBER.pattern}([\s,;]+{_NUMBER.pattern}){{3}}\s*[\])]?")
_WRONG = "correct it: "  # starts the comment of a guess that cannot be right
_UNUSED = "not used: "  # starts the part of a comment about a column of texts that the model does not read
_TYPICAL = 224  # height and width of images that most published models were trained on
_WITHOUT_GPU = 96  # a fifth of the pixels, and of the time
_LORA = "model.lora.r=8 optimizer.lr=5e-4"  # LoRA takes a larger lr
_SMALL = 64  # up to here a small network is enough


@dataclass(frozen=True)
class Annotations:
    """The first rows of an annotation file, as text by column."""

    source: str
    columns: dict[str, list[str]]
    more: bool
    """There are more rows than were looked at."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def described(self) -> str:
        return f"{self.source} ({'more than ' if self.more else ''}{plural(self.num_rows, 'row')})"


def write(sources: Sequence[str], out: Path | None, model: str | None = None) -> str:
    """Write the configuration of ``model`` for ``sources``, (training file, validation file) or what leads to them, to
    ``out``; return a text with the next commands. Raises ConfigError, also if ``out`` exists, and DataError."""
    if model and not model.startswith(HUB) and (Path(model) / "config.json").is_file():
        hint = f"did you mean --model {shlex.quote(HUB + model)}?"
        raise ConfigError("this folder is a model of Hugging Face", where=f"--model {model}", hint=hint)
    train, evaluation = (_read(source) for source in _pair(sources))
    name = _name(train.source)
    out = out or Path(f"{name}.yaml")
    if missing := train.columns.keys() - evaluation.columns.keys():
        raise DataError(
            f"it has no {'columns' if len(missing) > 1 else 'column'} {', '.join(sorted(missing))}",
            where=evaluation.source,
            hint=f"add every column that {train.source} has",
        )
    lines, file = list(_task(train, evaluation, model)), shlex.quote(str(out))
    text = _TEXT.format(
        train=train.described, eval=evaluation.described, out=file, name=_plain(name),
        precision=_precision(), task="\n".join(lines),
    )  # fmt: skip
    try:
        with open(out, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        hint = f"remove it, or write another file: --out {shlex.quote(str(out.with_stem(out.stem + '-new')))}"
        raise ConfigError("this file already exists and will not be overwritten", where=str(out), hint=hint) from None
    except OSError as error:
        raise ConfigError(f"cannot write: {reason(error)}", where=str(out), hint=remedy(error)) from None
    wrong = [f"warning: {line.lstrip()}" for line in lines if f"# {_WRONG}" in line or f"; {_UNUSED}" in line]
    commands = [f"  harness {verb} -c {file}" for verb in ("check", "train")]
    if model and model.startswith(HUB):
        commands += ["it trains all weights; LoRA, with its larger lr, takes less memory:"]
        commands += [f"  harness train -c {file} {_LORA}"]
    return "\n".join([text, f"wrote {out}; now check it:", *commands, *wrong])


_TEXT = """\
# Written by harness init from {train}
# and {eval}. Correct any wrong guesses, then run:
#   harness check -c {out}
#   harness train -c {out}
# harness settings WORD explains the settings with this word in their name or text.
name: {name}  # the run folder is runs/{name}
{precision}
{task}
"""


def _pair(sources: Sequence[str]) -> tuple[str, str]:
    """Return the training and the validation file."""
    if len(sources) > 2:
        raise ConfigError(f"expected at most 2 files, found {len(sources)}", hint="use harness init TRAIN.csv EVAL.csv")
    given = [str(_in_folder(Path(source))) if not is_url(source) else source for source in sources or ["."]]
    if len(given) == 2:
        return given[0], given[1]
    train = Path(given[0])
    if not is_url(given[0]) and train.is_file():
        part = re.sub(r"(\.csv|\.csv\.gz|\.parquet)$", r".train\1", train.name, flags=re.IGNORECASE)
        for first in (train.with_name(part), train):  # the split of harness data split comes first
            for word in _EVAL:
                other = first.with_name(re.sub("train(ing)?(?!.*train)", word, first.name))
                if other != first and other.is_file() and first.is_file():
                    return str(first), str(other)
    locate(given[0])  # raises DataError if there is none
    file = shlex.quote(given[0])
    raise ConfigError(
        "there is no file with validation rows next to it",
        where=given[0],
        hint=f"set some aside: harness data split {file} --eval 0.1; or harness init {file} EVAL.csv",
    )


def _in_folder(path: Path) -> Path:
    """Return ``path``, or the training file in it if it is a folder. Raises ConfigError if there is none."""
    if not path.is_dir():
        return path
    found = [file for file in sorted(path.iterdir()) if file.suffix in (".csv", ".parquet", ".gz") and file.is_file()]
    if train := [file for file in found if re.match("train", file.name)]:
        return train[0]
    if len(train := [file for file in found if ".train." in file.name]) == 1:  # as harness data split names it
        return train[0]
    command = shlex.join(["harness", "data", "folder", str(path), f"{path.resolve().name}.csv"])
    raise ConfigError(
        "this folder has no table whose name begins with train", where=str(path),
        hint=f"use harness init TRAIN.csv; of images in a folder per class, write one first: {command}",
    )  # fmt: skip


def _read(source: str) -> Annotations:
    """Return the first rows of ``source``. Raises DataError."""
    found = locate(source)
    if found.is_remote:
        raise ConfigError(
            "this is a URL", where=source, hint="download the file first; the YAML file can still use the URL"
        )
    path = Path(found.identity)
    reader = reader_of(kind_of(path, source))
    names = reader.read_header(path, source)
    columns: dict[str, list[str]] = {name: [] for name in names}
    count, more = 0, False
    for batch in reader.read_batches(path, source, names):
        if more := count >= _ROWS:
            break
        count += batch.num_rows
        for name in names:
            columns[name] += batch.column(name).to_pylist()
    if not count:
        raise DataError("the file has a header and no rows", where=source)
    return Annotations(source, columns, more)


def _name(source: str) -> str:
    """Return a name for the run: that of the data's folder, or of the file without "train"."""
    stem = re.sub(r"[-_.]?train(ing)?[-_.]?", "", Path(source).name.split(".")[0])
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem or Path(source).resolve().parent.name).strip("_-") or "run"


def _plain(value: object) -> str:
    """Return ``value`` as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _precision() -> str:
    """Return the lines that choose what this machine computes fast, with the reason."""
    import torch  # late: its import takes seconds, and errors come before

    from harness.apex.on_cpu.half_kernels import has_bfloat16

    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "extends: preset:modern  # bfloat16, which this GPU computes; preset:apex-2019: float16"
        return "extends: preset:apex-2019  # float16: this GPU has no bfloat16; those since Ampere: preset:modern"
    if has_bfloat16():
        return "extends: preset:modern  # bfloat16, which this CPU computes"
    return (
        "extends: preset:modern  # bfloat16, for GPUs since Ampere; preset:apex-2019: float16\n"
        "precision: {opt_level: O0}  # float32: this CPU has no bfloat16; on a GPU, remove this line"
    )


def _task(train: Annotations, evaluation: Annotations, model: str | None) -> Iterator[str]:
    """Yield the lines of YAML below ``extends``. Raises ConfigError."""
    files = f"  train_csv: {_plain(train.source)}\n  eval_csv: {_plain(evaluation.source)}"
    if path := _path_column(train):
        yield from _images(train, files, *path, model)
    elif texts := _text_columns(train):
        yield from _texts(train, evaluation, files, texts, model)
    else:
        raise ConfigError(
            "no column contains image paths (.jpg, .png, .webp, .gif) or text of several words; the columns are "
            f"{', '.join(train.columns)}",
            where=train.source,
            hint="add the file name extension if the values lack it; for other kinds of data see docs/add_a_task.md",
        )
    batch = 1 << (max(2, min(64, train.num_rows // 8)).bit_length() - 1)
    yield f"batch: {{global: {batch}}}  # rows per step over all ranks; larger batches make better use of a GPU"
    yield "data: {shard: global}  # the same batches on any number of ranks"
    of_hub = model is not None and model.startswith(HUB)
    lr = 5.0e-5 if of_hub else 0.001
    yield f"optimizer: {{name: adamw, lr: {_plain(lr)}, weight_decay: 0.01}}  # lr is the first setting to tune"
    yield "schedule: {name: cosine, warmup: 1}"
    epochs = 5 if of_hub else 10 if train.num_rows > 5000 else 20
    yield f"train: {{epochs: {epochs}, deterministic: true}}  # false: faster on a GPU, but no exact resume"
    yield "# parallel: {logical_ranks: 4, delay_allreduce: true}  # same bits on 1 to 4 processes: docs/same_bits.md"


def _images(train: Annotations, files: str, path_column: str, why_path: str, model: str | None) -> Iterator[str]:
    """Yield the lines for the images whose paths are in ``path_column``."""
    labels, why_labels = _labels(train, [path_column])
    root, why_root = _root(train, path_column)
    size, gray, why_size = _image_size(root, train.columns[path_column])
    if size is None and not why_root.startswith(_WRONG):
        why_size = f"{_WRONG}{why_size}"
    small = (max(size) if size else _TYPICAL) <= _SMALL
    yield f"task:\n  name: image_csv  # an image and a label per row\n{files}"
    yield f"  root: {_plain(root)}  # {why_root}"
    yield f"  path_column: {_plain(path_column)}  # {why_path}"
    yield f"  {labels}  # {why_labels}"
    yield f"  image_size: {_plain(list(size) if size else [_TYPICAL, _TYPICAL])}  # {why_size}"
    crop = f"{{RandomResizedCrop: {{size: {_plain(list(size) if size else [_TYPICAL, _TYPICAL])}, scale: [0.5, 1]}}}}"
    yield f"  # transforms: {{train: [{crop}, RandomHorizontalFlip]}}  # augmentation, against overfitting"
    if gray and small and model is None:
        yield "  color: gray  # the images have one channel; torchvision models need rgb"
    if model is not None:
        yield _model(model)
    elif small:
        yield "model: {name: small_cnn}  # for small images; resnet18 and other torchvision models work, too"
    else:
        yield "model: {name: resnet18}  # weights: DEFAULT starts from published weights, which it downloads"


def _texts(
    train: Annotations, evaluation: Annotations, files: str, texts: dict[str, float], model: str | None
) -> Iterator[str]:
    """Yield the lines for ``texts``, one column or two that are a pair, each with its words per row."""
    labels, why_labels = _labels(train, texts)
    of_hub, names = model is not None and model.startswith(HUB), list(texts)
    taken = names if of_hub else [max(texts, key=texts.__getitem__)]  # others take one column
    why = f"{' and '.join(f'{texts[name]:.1f}' for name in taken)} words per row"
    if len(taken) < len(names):
        left = ", ".join(name for name in names if name not in taken)
        why += f"; {_UNUSED}{left}: for both texts of a pair, add --model {HUB}FOLDER_OR_NAME to harness init"
    kind = "a text pair" if len(taken) > 1 else "a text"
    yield f"task:\n  name: text_csv  # {kind} and a label per row\n{files}"
    yield f"  text_column: {_plain(taken if len(taken) > 1 else taken[0])}  # {why}"
    yield f"  {labels}  # {why_labels}"
    if of_hub:
        letters = max(map(sum, zip(*(map(len, train.columns[name]) for name in taken), strict=True)))
        length = min(_positions(str(model)), max(16, 1 << (letters // 3 + 2).bit_length()))
        tokenizer = {"name": model, "max_length": length}
        yield f"  tokenizer: {_plain(tokenizer)}  # tokens per row at most; the rest is cut off"
    if model is not None:
        yield _model(model)
        return
    place = f"{HUB}FOLDER_OR_NAME"
    again = shlex.join(["harness", "init", train.source, evaluation.source, "--model"])
    yield "model: {name: text_cnn}"
    yield f"# {_model(place)}"
    tokenizer_name = "tokenizer for the pair" if len(names) > 1 else "tokenizer"
    yield f"#   and its {tokenizer_name} are written by: {again} {place}"


def _positions(model: str) -> int:
    """Return how many tokens ``model``, hf:FOLDER_OR_NAME, takes, at most 512; 512 if it is not in a folder here."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        content = json.loads((Path(model.removeprefix(HUB)) / "config.json").read_text(encoding="utf-8"))
        return min(512, int(content.get("max_position_embeddings", 512)))
    return 512


def _model(name: str) -> str:
    """Return the line for the model ``name``."""
    why = f"  # all weights; with small matrices (LoRA), to save memory: {_LORA}" if name.startswith(HUB) else ""
    return f"model: {{name: {_plain(name)}}}{why}"


def _path_column(rows: Annotations) -> tuple[str, str] | None:
    """Return the column with the paths of images, and why; None if there is none."""
    counts = {
        name: sum(value.lower().endswith(IMAGE_SUFFIXES) for value in values) for name, values in rows.columns.items()
    }
    best = max(counts, key=lambda name: (counts[name], name.lower() in _PATH_NAMES))
    if counts[best] <= rows.num_rows / 2:
        return None
    return best, f"{counts[best]} of {rows.num_rows} values end with the extension of an image file"


def _text_columns(rows: Annotations) -> dict[str, float]:
    """Return the column with the most words per row, or two that look like a pair, with these numbers of words; none if
    no column has two words per row."""
    columns = rows.columns
    words = {name: sum(len(value.split()) for value in values) / rows.num_rows for name, values in columns.items()}
    pair = [
        name
        for name, values in columns.items()
        if words[name] >= 2
        and len(set(values)) > rows.num_rows / 10  # a label is in more rows
        and name.lower() not in _LABEL_NAMES
        and _kind(values, False) in ("", "classes")
    ]
    labels = (_kind(values, name.lower() in _LABEL_NAMES) for name, values in columns.items() if name not in pair)
    if len(pair) == 2 and any(labels):
        return {name: words[name] for name in pair}
    best = max(words, key=words.__getitem__)
    return {best: words[best]} if words[best] >= 2 else {}


def _labels(rows: Annotations, inputs: Collection[str]) -> tuple[str, str]:
    """Return the setting for the column with the labels as YAML, and why, with what else there is. Raises
    ConfigError."""
    others = {name: values for name, values in rows.columns.items() if name not in inputs}
    packed = [name for name, values in others.items() if "box" in name.lower() and all(map(_PACKED.fullmatch, values))]
    box = _box(others)
    found = {
        name: kind
        for name, values in others.items()
        if name not in (*box, *packed) and (kind := _kind(values, name.lower() in _LABEL_NAMES))
    }
    counts = {name: len(set(values)) for name, values in others.items()}
    shown = {name: f"{name} ({plural(counts[name], 'value')})" for name in others}
    if not found and box:
        why = f"the numbers of a box, one per image{_rest(shown, box)}"
        return f"labels: {{kind: regression, column: {_plain(list(box))}}}", why
    if not found:
        raise ConfigError(
            f"no column looks like labels; columns other than {', '.join(inputs)}: "
            f"{', '.join(shown.values()) or 'none'}; {plural(rows.num_rows, 'row')}",
            where=rows.source,
            hint=f"the four numbers in {packed[0]} need a column each, such as xmin, ymin, xmax and ymax"
            if packed
            else "add a column such as label that holds one class, several labels or a number in each row",
        )
    names = list(rows.columns)
    best = min(found, key=lambda name: (
        _LABEL_NAMES.index(name.lower()) if name.lower() in _LABEL_NAMES else len(_LABEL_NAMES),
        found[name] != "classes", names.index(name) < max(map(names.index, inputs)), names.index(name),
    ))  # fmt: skip
    rest = _rest(shown, [best])
    if found[best] == "numbers":
        values = [float(value) for value in others[best]]
        why = f"numbers from {min(values):g} to {max(values):g}"
        return f"labels: {{kind: regression, column: {_plain(best)}}}", f"{why}{rest}".replace("\n", " ")
    separator = "" if found[best] == "classes" else found[best]
    labels = sorted({label for value in others[best] for label in (value.split(separator) if separator else [value])})
    few = ", ".join(_plain(label) for label in labels[:3]) + (", ..." if len(labels) > 3 else "")
    if separator:
        setting = f"labels: {{column: {_plain(best)}, separator: {_plain(separator)}}}"
        return setting, f"several of {len(labels)} labels per row: {few}{rest}".replace("\n", " ")
    return f"label_column: {_plain(best)}", f"{len(labels)} classes: {few}{rest}".replace("\n", " ")


def _box(columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the four of ``columns`` that hold the box of an image, as they are written; none without."""
    spelled = {name.lower(): name for name in columns}
    for box in _BOXES:
        names = tuple(spelled[part] for part in box if part in spelled)
        if len(names) == len(box) and all(_NUMBER.fullmatch(value) for name in names for value in columns[name]):
            return names
    return ()


def _rest(shown: Mapping[str, str], used: Collection[str]) -> str:
    """Return the end of a reason: the columns that are not ``used``."""
    return f"; other columns: {', '.join(text for name, text in shown.items() if name not in used) or 'none'}"


def _kind(values: Sequence[str], named: bool) -> str:
    """Return the likely content of a column: ``classes``, ``numbers``, the separator of several labels per row, or
    nothing. ``named``: it has the name of a label."""
    distinct = set(values)
    for separator in ("|", ";", ","):
        several = [value for value in values if separator in value]
        labels = {label for value in distinct for label in value.split(separator)}
        if (
            len(several) > len(values) / 20
            and len(labels) < max(3, len(values) / 2)
            and len(labels) < len(distinct) + 2
        ):
            return separator
    if all(map(_NUMBER.fullmatch, distinct)) and (
        any("." in value for value in distinct) or (named and len(distinct) > max(20, len(values) / 2))
    ):
        return "numbers"
    return "classes" if 2 <= len(distinct) <= max(2, len(values) / 2) else ""


def _root(rows: Annotations, path_column: str) -> tuple[str, str]:
    """Return the folder below which most of the first paths exist, and how many."""
    from harness.data.image_files import ImageFiles  # late: imports torch, which takes seconds, and errors come before

    paths, folder = rows.columns[path_column][:_PATHS], Path(rows.source).parent
    below = [path for path in sorted(folder.iterdir()) if path.is_dir()][:_FOLDERS]
    files = ImageFiles("")
    found = {place: sum(files.is_below(str(place), path) for path in paths) for place in (folder, Path(), *below)}
    best = max(found, key=lambda place: found[place])
    if found[best]:
        return str(best), f"{found[best]} of the first {len(paths)} paths exist below this folder"
    return str(folder), f"{_WRONG}none of the first {len(paths)} paths, such as {paths[0]}, exists here"


def _image_size(root: str, paths: Sequence[str]) -> tuple[tuple[int, int] | None, bool, str]:
    """Return ((height, width) to train with, or None if no image can be read; whether all have one channel; why)."""
    import torch

    from harness.data.image_files import ImageFiles
    from harness.data.vision import decode

    most, why = (_TYPICAL, "") if torch.cuda.is_available() else (_WITHOUT_GPU, f"; {_TYPICAL} on a GPU")
    files, shapes = ImageFiles(root), []
    for path in paths[:: -(-len(paths) // _IMAGES)]:
        try:
            if files.is_below(root, path):
                shapes.append(tuple(decode(files.read(path)).shape[-3:]))
        except (OSError, RuntimeError, DataError):
            continue
    if not shapes:
        return None, False, "[height, width]; no image could be read"
    heights, widths = sorted(shape[1] for shape in shapes), sorted(shape[2] for shape in shapes)
    seen = f"{heights[0]}x{widths[0]}"
    gray = all(shape[0] == 1 for shape in shapes)
    if heights[0] == heights[-1] and widths[0] == widths[-1]:
        size = (heights[0], widths[0])
        if max(size) <= most:
            return size, gray, f"[height, width] of the {plural(len(shapes), 'image')} examined"
    else:
        seen += f" to {heights[-1]}x{widths[-1]}"
    shorter = int(statistics.median(min(shape[1:]) for shape in shapes))
    side = most if shorter >= most else max(32, shorter // 32 * 32)
    if side == most:
        seen += why
    return (side, side), gray, f"[height, width]; {plural(len(shapes), 'image')} examined, {seen}"
