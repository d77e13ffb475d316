"""Start a model from given weights (``model.weights``): published ones, a file, a URL, or a run of this harness.

Rank 0 reads them; the other ranks get them from it. A run that resumes takes its weights from its checkpoint instead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from harness.config.places import HUB, is_url
from harness.config.schema import Config
from harness.data import hub
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError, ConfigError, did_you_mean, first_line, similar
from harness.runs import checkpoint, layout, reader
from harness.runs.files import expanded, sha256
from harness.runs.weights_file import load_weights, with_versions
from harness.training.model import lora, model_builder, module_names
from harness.training.model.libraries.base import KEY, PRETRAINED, WeightsFile, downloaded

log = logging.getLogger("harness")

_FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
# Where training scripts keep a state dict in a file, the one to use first: timm also prefers the moving average.
_NESTED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "state_dict", "model_state_dict", "model", "net")
_MAX_LISTED = 5


def start(model: nn.Module, config: Config, runtime: Runtime, checkpoints: Path, task: object) -> dict[str, Any]:
    """Load ``model.weights`` into ``model`` (on the CPU) on rank 0; return what was loaded, for provenance, on every
    rank. Empty if the run is about to resume. Collective; call ``sharding.replicate`` next.

    Raises ConfigError if the weights cannot be had or do not fit.
    """

    def loaded() -> dict[str, Any]:
        if runtime.rank or config.checkpoint.named or checkpoint.steps(checkpoints):
            return {}
        loading = load(model, config, task)
        log.info("%14s: %s", "weights", loading["summary"])
        if loading["warning"]:
            log.warning("%s", loading["warning"])
        return loading

    return runtime.from_first(runtime.patiently("reading the weights to start from", loaded))


def load(model: nn.Module, config: Config, task: object = None) -> dict[str, Any]:
    """Load ``model.weights`` into ``model``; return the source, its SHA-256, and a summary and a warning for the user.

    Raises ConfigError if a weight is missing, unexpected (unless ``model.strict`` is false) or has another shape. The
    last layer may have another number of outputs, or other classes than the opened ``task``: it keeps its initial
    values. Those of the same classes are put in the order of the task.
    """
    section = config.model
    assert section.start_weights is not None
    source = find(section.start_weights, section.name)
    weights, part = _matched(source.read(model) if source.read else read(source), model, source)
    own_state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    heads, note = _other_head(weights, own_state, model)
    if not heads:
        heads, note = _by_classes(weights, model, source.classes, getattr(task, "signature", {}).get("classes", ()))
    # Of a folder of Hugging Face the last layers may be new.
    may_lack = section.name.startswith(HUB) and section.start_weights in (*PRETRAINED, section.name)
    missing = [name for name in own_state if name not in weights and module_names.LORA not in name]
    unexpected = [name for name in weights if name not in own_state]
    expected = {name: value for name, value in own_state.items() if name in weights or module_names.LORA not in name}
    _require_fit(weights, expected, heads, section.strict and not may_lack, source)
    usable = {name: value for name, value in weights.items() if name in own_state and name not in heads}
    if bad := [
        name for name, value in usable.items() if not value.isfinite().all() and own_state[name].isfinite().all()
    ]:
        raise ConfigError(
            f"the weights are infinite or NaN in {bad[0]} ({len(bad)} of {len(usable)} tensors)",
            where=f"{KEY}: {source.name}", hint="use other weights: the training that wrote these diverged",
        )  # fmt: skip
    model.load_state_dict(with_versions(usable, model), strict=False)
    lora.start_norms(model, usable)
    new = [name for name in own_state if module_names.LORA in name and name not in usable]
    summary = f"{source.name}{part}, {len(usable)} of {len(own_state) - len(new)} tensors"
    if heads:
        summary += f"; the last layer ({_listed(heads)}) is not loaded but newly initialized"
    summary += note
    if missing:
        summary += f"; not in the file, so newly initialized: {_listed(missing)}"
        params = dict(model.named_parameters())
        if frozen := [name for name in missing if name in params and not params[name].requires_grad]:
            summary += f" (of which {_listed(frozen)} stay so: they are frozen)"
    if unexpected:
        summary += f"; in the file only: {_listed(unexpected)}"
    if new:
        summary += f"; {len(new)} new LoRA matrices"
    warning = _other_statistics(source, config.task)
    if new and section.name.startswith(HUB) and not may_lack:
        warning = f"its matrices are for the weights of {source.name}: harness export --format peft, which takes those "
        warning += f"of {section.name} below them, will refuse the run unless they are the same"
    return {"source": source.name, "sha256": sha256(source.path), "summary": summary, "warning": warning}


def find(weights: str, model: str) -> WeightsFile:
    """Return the file of ``weights``, downloaded if necessary. Raises ConfigError."""
    return located(weights, model)()


def located(weights: str, model: str) -> Callable[[], WeightsFile]:
    """Return what gets the file of ``weights``. Raises ConfigError for a name that needs no download to be refused."""
    if model.startswith(HUB) and (weights in PRETRAINED or weights.startswith(HUB)):
        return _published(weights, model)
    if weights.startswith(HUB):
        return lambda: WeightsFile(weights, hub.weights(weights, KEY))
    if is_url(weights):
        return lambda: WeightsFile(weights, downloaded(weights, Path(urlsplit(weights).path).name))
    path = expanded(weights)
    if path.is_dir():
        if (path / hub.CONFIG).is_file():
            hint = f"did you mean {KEY}={HUB}{weights}?"
            raise ConfigError(f"{path} is a folder of Hugging Face", where=KEY, hint=hint)
        if (path / hub.ADAPTER).is_file():
            hint = f"{hub.WHOLE}, with {KEY}={HUB}FOLDER; or the run that the adapter is of"
            raise ConfigError(f"{path} is an adapter of peft, without the weights below it", where=KEY, hint=hint)
        path /= layout.WEIGHTS
    if path.is_file():
        return lambda: WeightsFile(weights, path, _of_run(path.parent) if path.name == layout.WEIGHTS else None)
    if path.suffix in _FILES or "/" in weights:
        hint = did_you_mean(path) or (
            "give a weights file, a run folder, a URL, or DEFAULT for a model's published weights"
        )
        raise ConfigError(f"no such file: {path}", where=KEY, hint=hint)
    return _published(weights, model)


def _of_run(folder: Path) -> tuple[Any, Any] | None:
    """Return task.mean and task.std of the run in ``folder``; None if its task has no such settings."""
    task = reader.read(folder).config.get("task")
    if not isinstance(task, dict) or not {"mean", "std"} <= task.keys():
        return None
    return (task["mean"], task["std"]) if all(isinstance(task[key], list | None) for key in ("mean", "std")) else None


def _published(weights: str, model: str) -> Callable[[], WeightsFile]:
    """Return what gets the weights that the library of ``model`` publishes. Raises ConfigError."""
    if library := model_builder.library_of(model):
        return library.published(weights, model)
    raise ConfigError(
        f"model {model} has no published weights, and {weights} is not a file",
        where=KEY, hint="give a weights file, a run folder, or a URL",
    )  # fmt: skip


def read(source: WeightsFile) -> Mapping[str, Any]:
    """Return the content of a file of weights. Raises ConfigError, also for a file that could run code."""
    try:
        if source.path.suffix == ".safetensors":
            return load_weights(source.path, of_run=False)
        content = torch.load(source.path, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise ConfigError(error.message, where=f"{KEY}: {source.name}", hint="copy or download it again") from None
    except Exception as error:
        message = f"it cannot be read: {first_line(error)}"
        hint = "use a .safetensors file, or one that torch.save wrote"
        if "weights_only" in str(error):
            message = "it is damaged, or it holds more than tensors and plain data and could run code"
            hint = "if you trust it, write its weights to another file: torch.save(model.state_dict(), FILE)"
        raise ConfigError(message, where=f"{KEY}: {source.name}", hint=hint) from None
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"it holds an object of type {type(content).__name__}, not a dictionary of weights",
            where=f"{KEY}: {source.name}", hint="write it with torch.save(model.state_dict(), FILE)",
        )  # fmt: skip
    return content


def _matched(content: Mapping[str, Any], model: nn.Module, source: WeightsFile) -> tuple[dict[str, Tensor], str]:
    """Return (the state dict in ``content`` by the names of ``model``, where it was, and the prefix that was replaced).

    Wrappers such as DDP and torch.compile put a prefix before every name; a network may be a part of the file, or of
    ``model``. So the prefix is replaced with which the most names and shapes agree.
    """
    part = next((key for key in _NESTED if _has_tensors(content.get(key))), None)
    weights = {key: value for key, value in (content[part] if part else content).items() if isinstance(value, Tensor)}
    own_state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    own_state |= {name.replace(lora.BASE_LAYER, "."): value for name, value in own_state.items()}  # names before LoRA
    file_prefix, own_prefix = _prefixes(weights, own_state)
    moved = {name: own_prefix + name.removeprefix(file_prefix) for name in weights if name.startswith(file_prefix)}
    if file_prefix or own_prefix:
        weights.pop("n_averaged", None)  # of torch's AveragedModel
        weights = {moved[name] if moved.get(name) in own_state else name: value for name, value in weights.items()}
    adapted = {name.replace(lora.BASE_LAYER, "."): name for name in model.state_dict() if lora.BASE_LAYER in name}
    weights = {adapted.get(name, name): value for name, value in weights.items()}
    if not own_state.keys() & weights.keys():
        names = _listed(list(weights)) if weights else f"no tensors; its keys are {_listed(list(map(str, content)))}"
        raise ConfigError(
            f"it contains none of this model's weights: it has {names}", where=f"{KEY}: {source.name}",
            hint=f"this model has {_listed(list(own_state))}; check model.name and model.args",
        )  # fmt: skip
    notes = [part if part and "ema" in part else "", f"{file_prefix}* as {own_prefix}*" if own_prefix else ""]
    return weights, "".join(f" ({note})" for note in notes if note)


def _prefixes(weights: Mapping[str, Tensor], own_state: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return (prefix in the file, what stands for it in the model) with which the most names of ``weights`` are in
    ``own_state``, with the same shape; both empty if the names as they are agree best."""
    ends: dict[str, list[str]] = {}
    for name in own_state:
        for end in _ends(name):
            ends.setdefault(end, []).append(name)
    votes = Counter({("", ""): 0})
    for name, value in weights.items():
        shared = next((end for end in _ends(name) if end in ends), "")
        for candidate in ends.get(shared, ()):
            if own_state[candidate].shape == value.shape:
                votes[name.removesuffix(shared), candidate.removesuffix(shared)] += 1
    return votes.most_common(1)[0][0]  # of equally many, the names as they are


def _ends(name: str) -> Iterator[str]:
    """Yield ``a.b.c``, ``b.c``, ``c``."""
    while name:
        yield name
        name = name.partition(".")[2]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _other_head(weights: dict[str, Tensor], own_state: dict[str, Tensor], model: nn.Module) -> tuple[list[str], str]:
    """Return (the names of a last layer with another number of outputs, what the user is told of them)."""
    last = next(reversed([name.rpartition(".")[0] for name, _ in model.named_parameters()]), "")
    heads = {
        name: (len(weights[name]), len(own_state[name])) for name in own_state
        if name in weights and weights[name].shape != own_state[name].shape
        and weights[name].dim() and own_state[name].dim() and weights[name].shape[1:] == own_state[name].shape[1:]
        and _gives_outputs(model, name.rpartition(".")[0], last)
    }  # fmt: skip
    if len(set(heads.values())) != 1:
        return [], ""
    num_in_file, num_here = next(iter(heads.values()))
    return [*heads], f": {num_in_file} outputs in the file, {num_here} here"


def _by_classes(
    weights: dict[str, Tensor], model: nn.Module, classes: Sequence[str], labels: Sequence[str | int]
) -> tuple[list[str], str]:
    """Put the outputs of the last layers in ``weights``, which are for ``classes``, in the order of ``labels``. Return
    (the names of these layers if the classes are others, what the user is told)."""
    file_classes, own_classes = list(classes), [*map(str, labels)]
    if file_classes == own_classes or len(file_classes) != len(own_classes):
        return [], ""
    last, order = lora.last_layers(model), {label: index for index, label in enumerate(file_classes)}
    rows = (len(own_classes),)
    heads = [name for name in weights if weights[name].shape[:1] == rows and module_names.is_within(name, last)]
    if order.keys() == {*own_classes}:
        weights |= {name: weights[name][[order[label] for label in own_classes]] for name in heads}
        return [], f"; its classes {_listed(file_classes)} are put in the order {_listed(own_classes)}" if heads else ""
    if own_classes == [*map(str, range(len(own_classes)))]:
        return [], f"; its classes {_listed(file_classes)} are taken for {_listed(own_classes)}" if heads else ""
    return heads, f": the classes are {_listed(file_classes)} in the file, {_listed(own_classes)} here"


def _gives_outputs(model: nn.Module, layer: str, last: str) -> bool:
    """Return True if the size of ``layer`` is a number of outputs, and not of the words or places in a table.
    ``last``: the last layer with parameters."""
    module = model.get_submodule(layer)
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or (layer == last and not table)


def _require_fit(
    weights: Mapping[str, Tensor],
    own_state: Mapping[str, Tensor],
    heads: Collection[str],
    strict: bool,
    source: WeightsFile,
) -> None:
    """Raise ConfigError if weights other than ``heads`` differ in their shape, or, if ``strict``, in their names."""
    unexpected = [name for name in weights if name not in own_state]
    lines, has_shapes = list[str](), False
    for name, value in own_state.items():
        if name not in weights:
            nearest = similar(name, unexpected) if len(lines) < _MAX_LISTED else None
            lines.append(f"missing: {name}" + (f" (the file has {nearest})" if nearest else ""))
            unexpected = [name for name in unexpected if name != nearest]
        elif name not in heads and weights[name].shape != value.shape:
            lines.append(f"{name}: {tuple(weights[name].shape)} in the file, {tuple(value.shape)} here")
            has_shapes = True
    if not (has_shapes or (strict and (lines or unexpected))):
        return
    fitting = len(own_state) - len(lines)
    message = f"{fitting} of this model's {len(own_state)} weights are in the file with the same name and shape"
    hint = "check model.name and model.args; "
    if 2 * fitting < len(own_state):
        hint = "it seems to be of another model: set model.name and model.args to those that it was trained with, or "
        hint += "give weights of this one"
    elif has_shapes:
        hint += "only the last layer may have a different number of outputs"
    else:
        hint += "or set model.strict=false to initialize what is missing"
    lines += [f"unexpected: {name}" for name in unexpected]
    raise ConfigError("\n  ".join([message, *_shortened(lines)]), where=f"{KEY}: {source.name}", hint=hint)


def _other_statistics(source: WeightsFile, task: Any) -> str:
    """Return a warning if the weights expect images of another mean and standard deviation than ``task`` makes."""
    if source.statistics is None or not {"mean", "std"} <= type(task).model_fields.keys():
        return ""
    null = [0.5] * getattr(task, "channels", 0)  # what null stands for in image_csv
    mean, std = (list(values or null) for values in source.statistics)
    if [mean, std] == [list(task.mean or null), list(task.std or null)]:
        return ""
    return f"these weights expect images normalized with different statistics: set task.mean={mean} task.std={std}"


def _listed(names: list[str]) -> str:
    return ", ".join(_shortened(names))


def _shortened(lines: list[str]) -> list[str]:
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return [*lines[:_MAX_LISTED], *more]
