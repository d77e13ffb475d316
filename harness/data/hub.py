"""Folders and names of Hugging Face (``hf:FOLDER_OR_NAME``): their files, and their tokenizers."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.places import HUB
from harness.data.texts import SETTING, Tokenizer
from harness.errors import ConfigError, HarnessError, first_line, reason, similar_path
from harness.runs import layout
from harness.runs.files import expanded, new_folder

log = logging.getLogger("harness")

CONFIG = "config.json"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")  # of the hub: OWNER/NAME@REVISION
_SMALL = ["*.json", "*.txt", "*.model"]  # all but the weights
_WEIGHTS = (
    ["model.safetensors", "model.safetensors.index.json", "model-*.safetensors"],
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"],
)
ADAPTER = "adapter_config.json"
WHOLE = "give a whole model, as merge_and_unload().save_pretrained writes it"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def folder(name: str, where: str) -> Path:
    """Return the folder of ``hf:FOLDER_OR_NAME``; of a name, all files but the weights are downloaded into the cache of
    Hugging Face, unless they are there. Raises ConfigError."""
    location = name.removeprefix(HUB)
    path = expanded(location)
    if not path.is_dir():
        return _downloaded(location, where, _SMALL)
    if not (path / CONFIG).is_file():
        inside = sorted(file.parent for file in path.glob(f"*/{CONFIG}"))
        hint = f"did you mean {HUB}{inside[-1]}?" if inside else "give a folder that save_pretrained wrote"
        if (path / layout.CONFIG).is_file():
            export = f"harness export {location} --format huggingface --out FOLDER"
            hint = f"it is a run: to start from it, keep model.name and set model.weights={location}; or type {export}"
        if (path / ADAPTER).is_file():
            hint = f"it is an adapter of peft: {WHOLE}"
        raise ConfigError(f"the folder {path} has no {CONFIG}", where=where, hint=hint)
    return path


def require_here(name: str, where: str) -> None:
    """Raise ConfigError unless ``hf:FOLDER_OR_NAME`` is here, or may be OWNER/NAME of the hub, which is not asked."""
    location = name.removeprefix(HUB)
    if expanded(location).is_dir():
        folder(name, where)
        return
    hint, (repository, _, revision) = _nearest(location), location.partition("@")
    if _NAME.fullmatch(location):
        if "/" in repository and not hint:
            return
        with suppress(ImportError):
            from huggingface_hub import try_to_load_from_cache

            if isinstance(try_to_load_from_cache(repository, CONFIG, revision=revision or None), str):
                return
    hint = hint or f"give {HUB}FOLDER with a {CONFIG}, or {HUB}OWNER/NAME of the hub"
    raise ConfigError(f"there is no folder {location}, nor a model of this name in the cache", where=where, hint=hint)


def keep(name: str, copies: Path, renew: bool) -> None:
    """Copy the files of ``hf:FOLDER_OR_NAME`` but the weights into the folder ``copies``, unless it is there and not to
    be renewed. The run goes on without a copy that fails, with a warning."""
    if copies.is_dir() and not renew:
        return
    try:
        source = folder(name, "model.name")
        copies.parent.mkdir(exist_ok=True)
        with new_folder(copies) as temporary:
            for file in {file for pattern in _SMALL for file in source.glob(pattern)}:
                if file.is_file() and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, temporary / file.name)
            shutil.rmtree(copies, ignore_errors=True)  # the old ones, once there are new ones
    except (OSError, HarnessError) as error:
        log.warning("later commands need %s, whose files cannot be copied into the run folder: %s", name, reason(error))


def weights(name: str, where: str) -> Path:
    """Return the file with the weights of ``hf:FOLDER_OR_NAME``, or with their index. Raises ConfigError."""
    location, source = name.removeprefix(HUB), folder(name, where)
    for patterns in _WEIGHTS:
        weights_folder = source if expanded(location).is_dir() else _downloaded(location, where, patterns)
        if file := next((weights_folder / file for file in patterns[:2] if (weights_folder / file).is_file()), None):
            return file
    hint = "set model.weights=random to start from random ones, or model.weights=FILE"
    raise ConfigError(
        f"{location} has no weights: neither model.safetensors nor pytorch_model.bin", where=where, hint=hint
    )


def file(repository: str, name: str, where: str) -> Path:
    """Return the file ``name`` of ``repository``, OWNER/NAME@REVISION of the hub. Raises ConfigError."""
    path = _downloaded(repository, where, [name]) / name
    if not path.is_file():
        raise ConfigError(f"the hub's {repository} has no {name}", where=where, hint=f"set {where}=FILE")
    return path


def _downloaded(location: str, where: str, patterns: Sequence[str]) -> Path:
    """Return the folder in the cache of Hugging Face with the files ``patterns`` of a model. Raises ConfigError."""
    if not _NAME.fullmatch(location):
        hint = _nearest(location) or "give a folder with a config.json, or OWNER/NAME of the hub"
        raise ConfigError(f"there is no folder {location}", where=where, hint=hint)
    require("huggingface_hub", where)  # of transformers and of timm
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, revision = location.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(patterns)))
    except Exception as error:  # of the hub's many kinds
        offline = constants.HF_HUB_OFFLINE
        problem = f"the hub's {location} cannot be had: {first_line(error)}"
        if isinstance(error, LocalEntryNotFoundError):
            problem = f"the hub's {location} is not in the cache" if offline else "the hub cannot be reached"
        network = "HF_HUB_OFFLINE is set; unset it to download" if offline else "check the name and the network"
        of_hub = f"{network}; or type elsewhere: hf download {name} --local-dir FOLDER, and here {HUB}FOLDER"
        keys = (where, "model.name") if where == "task.tokenizer.name" else (where,)
        absolute = " ".join(f"{key}={HUB}/PATH" for key in keys)
        hint = f"of a folder that is not in {Path.cwd()}, type the whole path: {absolute}; of the hub: {of_hub}"
        raise ConfigError(
            f"there is no folder {location}, and {problem}",
            where=where,
            hint=_nearest(location) or (of_hub if "/" in location else hint),
        ) from None


def _nearest(location: str) -> str:
    """Return a hint with the folder of a model whose path is most similar to ``location``; empty if there is none."""
    nearest = similar_path(expanded(location), lambda path: (path / CONFIG).is_file())
    return f"did you mean {shlex.quote(f'{HUB}{nearest}')}?" if nearest else ""


def require(library: str, where: str) -> None:
    """Raise ConfigError if ``library``, such as peft, is not installed."""
    try:
        __import__(library)
    except ImportError:
        raise ConfigError(
            f"this needs {library}, which is not installed", where=where, hint="pip install 'apex-harness[huggingface]'"
        ) from None


class HubTokenizer(Tokenizer):
    """A tokenizer of transformers. ``inputs``: what it makes of a text, such as input_ids, for the last dimension of a
    batch."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, words = tokenizer, tokenizer.get_vocab()
        self.inputs = tuple(each for each in _INPUTS if each in {*_INPUTS[:2], *tokenizer.model_input_names})
        self.num_tokens = max(words.values()) + 1
        self.digest = _digest(tokenizer, words)
        self.learned, self.signature = {"tokenizer": self.digest}, {"last_dimension": self.inputs}
        self.known = {"tokenizer": self}
        added = tokenizer.num_special_tokens_to_add
        self.separates_pairs = added(pair=True) > added(pair=False)

    def padded(self, texts: Sequence[Sequence[str]], max_length: int, fixed: bool) -> np.ndarray:
        encoded = self.tokenizer(
            *texts, truncation=True, max_length=max_length, padding="max_length" if fixed else "longest",
            return_attention_mask=True, return_token_type_ids=_INPUTS[2] in self.inputs,
        )  # fmt: skip
        rows = np.asarray([encoded[name] for name in self.inputs], dtype=np.int64)
        if not rows.shape[2]:  # only empty texts
            rows = np.zeros((*rows.shape[:2], 1), dtype=np.int64)
            rows[0] = self.tokenizer.pad_token_id
        return np.ascontiguousarray(rows.transpose(1, 2, 0))

    def lengths(self, texts: Sequence[Sequence[str]]) -> np.ndarray:
        return np.asarray([len(ids) for ids in self.tokenizer(*texts, verbose=False)["input_ids"]], dtype=np.int64)

    def example(self, length: int) -> Tensor:
        return torch.from_numpy(self.padded([["a " * length] * 2], length, True))

    def require_tokens_of(self, model: str, name: str) -> None:
        """Compare the tokens with those of the tokenizer in the model's folder, if there is one."""
        try:
            own_tokenizer = tokenizer(model) if name != model else self
        except ConfigError:
            return
        if own_tokenizer.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(f"{name} has other tokens than {model}", where=SETTING, hint=f"set {SETTING}={model}")


def tokenizer(name: str, pairs: bool = False) -> HubTokenizer:
    """Return the tokenizer of ``hf:FOLDER_OR_NAME``. Raises ConfigError if there is none that can encode a text, or
    with ``pairs`` two."""
    require("transformers", SETTING)
    path = folder(name, SETTING)
    from transformers import AutoTokenizer

    try:
        pretrained = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        if pretrained.pad_token is None:  # as of GPT-2; the attention mask tells both apart
            pretrained.pad_token = pretrained.eos_token or pretrained.unk_token
        hub_tokenizer = HubTokenizer(pretrained)
        hub_tokenizer.padded([["a text"], ["another"]][: 1 + pairs], 16, False)
        if len(pretrained.get_vocab()) <= len(pretrained.all_special_tokens):
            raise ValueError("it has no words")
    except Exception as error:  # of many types
        raise ConfigError(
            f"there is no tokenizer in {path} that can be used: {first_line(error)}",
            where=SETTING,
            hint="give a folder with tokenizer.json or the files of its vocabulary, as tokenizer.save_pretrained "
            "writes them",
        ) from None
    return hub_tokenizer


def without_lengths(tokenizer: Any) -> Any:
    """Return the backend of the tokenizer, if it has one, without the lengths of its last call or file, which each call
    sets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def _digest(tokenizer: Any, words: dict[str, int]) -> str:
    backend = without_lengths(tokenizer)
    rules = backend.to_str() if backend is not None else json.dumps(words, sort_keys=True)
    sides = tokenizer.padding_side, tokenizer.truncation_side
    properties = [type(tokenizer).__name__, rules, tokenizer.special_tokens_map, *sides]
    return hashlib.sha256(json.dumps(properties, sort_keys=True, default=str).encode()).hexdigest()
