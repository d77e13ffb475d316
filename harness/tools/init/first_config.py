"""The configuration that ``harness init`` writes: what the annotations seem to hold, and settings to start with.

Every guess is a line of YAML with its reason as a comment, so that a wrong one is seen and corrected in the file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.places import HUB, JPEG_SUFFIXES, is_url
from harness.data.table.source import kind_of, locate
from harness.errors import ConfigError, DataError, reason, remedy
from harness.tools.init import columns, images
from harness.tools.init.columns import Annotations, Guess, comment, plain

_EVAL = ("eval", "val", "valid", "validation", "dev", "test")
_LORA = "model.lora.r=8 optimizer.lr=5e-4"  # LoRA takes a larger lr
_SMALL = 64  # up to here a small network is enough


def write(sources: Sequence[str], out: Path | None, model: str | None = None, root: str | None = None) -> str:
    """Write the configuration of ``model`` for ``sources``, (training file, validation file) or what leads to them, to
    ``out``; return a text with the next commands. ``root``: of the paths of images. Raises ConfigError, also if ``out``
    exists, and DataError."""
    if model and not model.startswith(HUB) and (Path(model) / "config.json").is_file():
        hint = f"did you mean --model {shlex.quote(HUB + model)}?"
        raise ConfigError("this folder is a model of Hugging Face", where=f"--model {model}", hint=hint)
    if model and model.startswith(HUB):
        from harness.data import hub  # late: as torch, which it imports

        hub.require_here(model, "--model")
    train, evaluation = (columns.read(source) for source in _pair(sources))
    name = _name(out.stem) if out else _data_name(train.source)
    out = out or Path(f"{name}.yaml")
    if missing := train.columns.keys() - evaluation.columns.keys():
        raise DataError(
            f"it has no {'columns' if len(missing) > 1 else 'column'} {', '.join(sorted(missing))}",
            where=evaluation.source,
            hint=f"add every column that {train.source} has",
        )
    lines, file = list(_task(train, evaluation, model, root)), shlex.quote(str(out))
    text = _TEXT.format(
        train=comment(train.described), eval=comment(evaluation.described), out=comment(file), name=plain(name),
        precision=_precision(), task="\n".join(map(str, lines)),
    )  # fmt: skip
    try:
        with open(out, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        hint = f"remove it, or write another file: --out {shlex.quote(str(out.with_stem(out.stem + '-new')))}"
        raise ConfigError("this file already exists and will not be overwritten", where=str(out), hint=hint) from None
    except OSError as error:
        raise ConfigError(f"cannot write: {reason(error)}", where=str(out), hint=remedy(error)) from None
    wrong = [f"warning: {str(line).lstrip()}" for line in lines if isinstance(line, Guess) and line.doubt]
    if len(sources) < 2 and re.search("(?<![a-z])test(?![a-z])", Path(evaluation.source).name):
        split = f"rm {file}; harness data split {shlex.quote(train.source)} --eval 0.1"
        wrong.insert(
            0, f"warning: {evaluation.source} will choose the best weights; for other rows than test rows: {split}"
        )
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
    paths = [str(_in_folder(Path(source))) if not is_url(source) else source for source in sources or ["."]]
    if len(paths) == 2:
        return paths[0], paths[1]
    train = Path(paths[0])
    if not is_url(paths[0]) and train.is_file():
        part = re.sub(r"(\.csv|\.csv\.gz|\.parquet)$", r".train\1", train.name, flags=re.IGNORECASE)
        for first in (train.with_name(part), train):  # the split of harness data split comes first
            for word in _EVAL:
                counterpart = first.with_name(re.sub("train(ing)?(?!.*train)", word, first.name))
                if counterpart != first and counterpart.is_file() and first.is_file():
                    return str(first), str(counterpart)
    locate(paths[0])  # raises DataError if there is none
    file = shlex.quote(paths[0])
    if paths[0].endswith((".yaml", ".yml")):
        hint = f"check it: harness check -c {file}; for a new one, use harness init TRAIN.csv EVAL.csv"
        raise ConfigError("this is a configuration, not a table", where=paths[0], hint=hint)
    if not is_url(paths[0]):
        kind_of(train, paths[0])  # raises DataError if it is no table
    raise ConfigError(
        "there is no file with validation rows next to it",
        where=paths[0],
        hint=f"set some aside: harness data split {file} --eval 0.1; or harness init {file} EVAL.csv",
    )


def _in_folder(path: Path) -> Path:
    """Return ``path``, or the training file in it if it is a folder. Raises ConfigError if there is none."""
    if not path.is_dir():
        return path
    tables = [file for file in sorted(path.iterdir()) if file.suffix in (".csv", ".parquet", ".gz") and file.is_file()]
    if train := [file for file in tables if re.match("train", file.name)]:
        return train[0]
    if len(train := [file for file in tables if ".train." in file.name]) == 1:  # as harness data split names it
        return train[0]
    command = shlex.join(["harness", "data", "folder", str(path), f"{path.resolve().name}.csv"])
    raise ConfigError(
        "this folder has no table whose name begins with train", where=str(path),
        hint=f"use harness init TRAIN.csv; of images in a folder per class, write one first: {command}",
    )  # fmt: skip


def _data_name(source: str) -> str:
    """Return a name for the run: that of the data's folder, or of the file without "train"."""
    stem = re.sub(r"[-_.]?train(ing)?[-_.]?", "", Path(source).name.split(".")[0])
    return _name(stem or Path(source).resolve().parent.name)


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_-") or "run"


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


def _task(train: Annotations, evaluation: Annotations, model: str | None, root: str | None) -> Iterator[str | Guess]:
    """Yield the lines of YAML below ``extends``. Raises ConfigError."""
    files = f"  train_csv: {plain(train.source)}\n  eval_csv: {plain(evaluation.source)}"
    if path := columns.path_column(train):
        yield from _images(train, files, *path, model, root)
    elif texts := columns.text_columns(train):
        if root is not None:
            hint = "remove --root, which is for the paths of images"
            raise ConfigError("this table has texts and no paths of images", where=train.source, hint=hint)
        yield from _texts(train, evaluation, files, texts, model)
    else:
        raise ConfigError(
            "no column contains image paths (.jpg, .png, .webp, .gif, .tif, .bmp) or text of several words; the "
            f"columns are {', '.join(train.columns)}",
            where=train.source,
            hint="add the file name extension if the values lack it; for other kinds of data see docs/add_a_task.md",
        )
    of_hub = model is not None and model.startswith(HUB)
    batch = 1 << (max(2, min(16 if of_hub else 64, train.num_rows // 8)).bit_length() - 1)
    yield f"batch: {{global: {batch}}}  # rows per step over all ranks; larger batches make better use of a GPU"
    yield "data: {shard: global}  # the same batches on any number of ranks"
    lr = 5.0e-5 if of_hub else 0.001
    yield f"optimizer: {{name: adamw, lr: {plain(lr)}, weight_decay: 0.01}}  # lr is the first setting to tune"
    yield f"schedule: {{name: cosine, warmup: {'10%' if of_hub else 1}}}"
    epochs = "5, clip_norm: 1.0" if of_hub else 10 if train.num_rows > 5000 else 20
    yield f"train: {{epochs: {epochs}, deterministic: true}}  # false: faster on a GPU, but no exact resume"
    if of_hub:
        yield '#   and in train, to stop early: patience: 3, evaluate_every: "500 steps"'
    yield "# parallel: {logical_ranks: 4, delay_allreduce: true}  # same bits on 1 to 4 processes: docs/same_bits.md"


def _images(
    train: Annotations, files: str, path_column: str, reason: str, model: str | None, given_root: str | None
) -> Iterator[str | Guess]:
    """Yield the lines for the images whose paths are in ``path_column``, relative to the folder ``given_root``."""
    labels = columns.labels(train, [path_column])
    folder, root = images.root(train, path_column, given_root)
    paths = train.columns[path_column]
    size, gray, shorter, why_size = images.image_size(folder, paths)
    if fixed_size := _image_size(model):
        size, why_size = fixed_size, f"[height, width] of the images that {model} takes"
    unread = size is None and not root.doubt
    sides = plain(list(size or (images.TYPICAL, images.TYPICAL)))
    small = size is not None and max(size) <= _SMALL
    yield f"task:\n  name: image_csv  # an image and a label per row\n{files}"
    yield root
    yield Guess(f"path_column: {plain(path_column)}", reason)
    yield labels
    yield Guess(f"image_size: {sides}", f"{images.WRONG * unread}{why_size}", unread)
    if size and shorter >= 2 * max(size) and any(path.lower().endswith(JPEG_SUFFIXES) for path in paths):
        yield "  decode: reduced  # decodes large JPEGs faster, to slightly different pixels than full, the default"
    crop = f"{{RandomResizedCrop: {{size: {sides}, scale: [0.5, 1]}}}}"
    yield f"  # transforms: {{train: [{crop}, RandomHorizontalFlip]}}  # augmentation, against overfitting"
    yield "  # on_bad_row: skip  # leaves out missing and damaged images, which are an error otherwise"
    if gray and small and model is None:
        yield "  color: gray  # the images have one channel; torchvision models need rgb"
    if model is not None:
        if _content(model, "config.json").get("num_channels") == 1:
            yield "  color: gray  # the model takes one channel"
        processor = _content(model, "preprocessor_config.json")
        for key in ("mean", "std"):
            if values := processor.get(f"image_{key}"):
                yield f"  {key}: {plain(values)}  # of the images that the model was trained on"
        yield _model(model)
    elif small:
        yield "model: {name: small_cnn}  # for small images; resnet18 and other torchvision models work, too"
    else:
        yield "model: {name: resnet18}  # weights: DEFAULT starts from published weights, which it downloads"


def _texts(
    train: Annotations, evaluation: Annotations, files: str, texts: dict[str, float], model: str | None
) -> Iterator[str | Guess]:
    """Yield the lines for ``texts``, one column or two that are a pair, each with its words per row."""
    labels = columns.labels(train, texts)
    of_hub, names = model is not None and model.startswith(HUB), list(texts)
    used = names if of_hub else [max(texts, key=texts.__getitem__)]  # others take one column
    reason = f"{' and '.join(f'{texts[name]:.1f}' for name in used)} words per row"
    if len(used) < len(names):
        unused = ", ".join(name for name in names if name not in used)
        reason += f"; not used: {unused}: for both texts of a pair, add --model {HUB}FOLDER_OR_NAME to harness init"
    kind = "a text pair" if len(used) > 1 else "a text"
    yield f"task:\n  name: text_csv  # {kind} and a label per row\n{files}"
    yield Guess(f"text_column: {plain(used if len(used) > 1 else used[0])}", reason, doubt=len(used) < len(names))
    yield labels
    if of_hub:
        letters = max(map(sum, zip(*(map(len, train.columns[name]) for name in used), strict=True)))
        length = min(_positions(str(model)), max(16, 1 << (letters // 3 + 2).bit_length()))
        tokenizer = {"name": model, "max_length": length}
        yield f"  tokenizer: {plain(tokenizer)}  # tokens per row at most; the rest is cut off"
    if model is not None:
        yield _model(model)
        return
    model_name = f"{HUB}FOLDER_OR_NAME"
    again = shlex.join(["harness", "init", train.source, evaluation.source, "--model"])
    yield "model: {name: text_cnn}"
    yield f"# {_model(model_name)}"
    tokenizer_name = "tokenizer for the pair" if len(names) > 1 else "tokenizer"
    yield f"#   and its {tokenizer_name} are written by: {comment(again)} {model_name}"


def _positions(model: str) -> int:
    """Return how many tokens ``model``, hf:FOLDER_OR_NAME, takes, at most 512; 512 if it is not in a folder here."""
    positions = _content(model, "config.json").get("max_position_embeddings")
    return min(512, positions) if isinstance(positions, int) else 512


def _image_size(model: str | None) -> tuple[int, int] | None:
    """Return the (height, width) that ``model`` takes; None if it is no folder of Hugging Face here that says so."""
    size = _content(model, "config.json").get("image_size")
    processor = _content(model, "preprocessor_config.json")
    size = size or processor.get("crop_size") or processor.get("size")
    if isinstance(size, dict):
        size = [size.get(side, size.get("shortest_edge")) for side in ("height", "width")]
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _content(model: str | None, file: str) -> dict[str, Any]:
    """Return the content of a JSON ``file`` of ``model``; empty if it is not hf:FOLDER with such a file."""
    with suppress(OSError, RuntimeError, ValueError):
        if model and model.startswith(HUB):
            content = json.loads((Path(model.removeprefix(HUB)).expanduser() / file).read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
    return {}


def _model(name: str) -> str:
    """Return the line for the model ``name``."""
    note = f"  # all weights; with small matrices (LoRA), to save memory: {_LORA}" if name.startswith(HUB) else ""
    return f"model: {{name: {plain(name)}}}{note}"
