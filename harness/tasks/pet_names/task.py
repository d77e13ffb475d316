"""Data, model, loss and metrics of the task ``pet_names``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.data.names import ALPHABET
from harness.errors import DataError, plural
from harness.tasks.pet_names.coded import BLANK_CODE, CodeRows, read, split, whole, windows
from harness.tasks.pet_names.config import Task
from harness.training.task import BaseTask, Batch, ModelSection, Pairs, model_builder


def open_data(task: Task, seed: int, cache_dir: Path | None) -> PetNames:
    """Read and split the names of ``task.names``. Raises DataError."""
    hint = "type: harness data pet_names data/pet_names, or set task.names to a text file with one name per line"
    names, num_skipped = read(Path(task.names), hint)
    train, validation = split(names)
    if not train or not validation:
        raise DataError(
            f"too few distinct names for a training and a validation set: {len(set(names))}",
            where=task.names,
            hint=hint,
        )
    train = list(dict.fromkeys(train))
    return PetNames(task, train, validation, num_skipped, _rows(task, train), _rows(task, validation))


def _rows(task: Task, names: Sequence[str]) -> NameRows:
    return NameRows(whole(names) if task.rows == "names" else windows(names, task.window))


def context(task: Task, prefixes: Tensor) -> Tensor:
    """Return the model's input for predicting what follows ``prefixes``, int64 (batch, characters so far, possibly
    0)."""
    if task.rows == "names":
        return functional.pad(prefixes, (1, 0), value=BLANK_CODE)
    return functional.pad(prefixes, (task.window, 0), value=BLANK_CODE)[:, -task.window :]


def build_model(task: Task, section: ModelSection) -> nn.Module:
    """Build the model, which does not depend on the names. Raises ConfigError."""
    example = torch.full((2, task.window), BLANK_CODE)
    arguments, outputs = {"num_characters": len(ALPHABET)}, (task.window, len(ALPHABET))
    return model_builder.build(section.name, section.args, arguments, example, outputs)


@dataclass(frozen=True)
class NameRows:
    """Rows of codes as a dataset: inputs uint8 (batch, positions), targets int64 (batch, positions), one code later."""

    rows: CodeRows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        codes = torch.from_numpy(self.rows.codes(rows))
        return Batch(codes[:, :-1].contiguous(), codes[:, 1:].long(), rows)


@dataclass(frozen=True)
class PetNames(BaseTask):
    """The opened task. ``eval_names`` are all different, and none of them is in ``train_names``."""

    options: Task
    train_names: Sequence[str]
    eval_names: Sequence[str]
    num_skipped: int
    train: NameRows
    eval: NameRows

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "train names": len(self.train_names),
            "eval names": len(self.eval_names),
            "train rows": len(self.train),
            "eval rows": len(self.eval),
            "characters": len(ALPHABET),
        }

    @property
    def notes(self) -> list[str]:
        if not self.num_skipped:
            return []
        return [
            f"{self.options.names}: skipped {plural(self.num_skipped, 'line')} with characters other than "
            "a-z, space, - and ."
        ]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join([*self.train_names, "", *self.eval_names]).encode()).hexdigest()

    def model(self, section: ModelSection) -> nn.Module:
        return build_model(self.options, section)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return uint8 codes (batch, positions) as int64."""
        return inputs.long()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return nats per position of a window, or per character of a name, of logits (batch, positions, characters).

        Names are divided by the mean length over all names, not over the batch. The loss is then a mean over rows, and
        the gradient of a step does not depend on how its rows are spread over ranks and micro-batches.
        """
        nats = _nats(outputs, targets)
        if self.options.rows == "windows":
            return nats.mean()
        return (nats * (targets != BLANK_CODE)).sum() / (len(targets) * self._mean_length)

    @cached_property
    def _mean_length(self) -> float:
        return sum(len(name) + 1 for name in self.train_names) / len(self.train_names)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        nats, hits = _nats(outputs, targets), outputs.argmax(2) == targets
        window = self.options.window
        if self.options.rows == "windows":
            real = torch.zeros_like(hits)
            real[:, -1] = True  # in a window only the last character is new
            times, num_positions = torch.ones_like(targets), torch.ones_like(targets).sum()
        else:
            real = targets != BLANK_CODE
            # In how many windows of its name a character is a target: one for each character from it to the stop.
            times = (real.flip(1).cumsum(1).flip(1) * real).clamp(max=window)
            num_positions = real.sum() * window
        num_real = real.sum()
        return {
            "char_loss": ((nats * real).sum(), num_real),
            "window_loss": ((nats * times).sum(), num_positions),
            "char_accuracy": ((hits & real).sum(), num_real),
        }

    @property
    def signature(self) -> dict[str, Any]:
        before = f"the last {self.options.window} characters" if self.options.rows == "windows" else "all characters"
        return {
            "input": "codes",
            "output": "logits",
            "classes": list(ALPHABET),
            "preprocessing": {
                "code": "the index of a character in classes; * pads the start of a name, + ends it",
                "context": f"int64 (batch, positions): {before} before the one to predict, whose logits are at the "
                "last position",
            },
        }


def _nats(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return -log(probability) of each target, float32 (batch, positions)."""
    # Flat, because over a second dimension torch has no deterministic implementation on CUDA.
    nats = functional.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)
