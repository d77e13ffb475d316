"""The names of ``pet_names``, opened: rows of codes, model, loss and metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.config.schema import ModelSection
from harness.data.images import Batch
from harness.data.names import ALPHABET, BLANK_CODE, Rows, read, split, whole, windows
from harness.errors import ConfigError, DataError
from harness.training import metrics, models

if TYPE_CHECKING:
    from harness.tasks.pet_names.config import Task


def split_by_name(task: Task) -> PetNames:
    """The names of ``task.names``. Raises DataError."""
    how = "type: harness data pet_names data/pet_names, or name a text file with a name a line as task.names"
    found, num_skipped = read(Path(task.names), how)
    train, held_out = split(found)
    if not train or not held_out:
        raise DataError(
            f"{len(set(found))} different names are too few to train on nine in ten and hold out the rest",
            where=task.names,
            hint=how,
        )
    return PetNames(task, train if task.repeats else list(dict.fromkeys(train)), held_out, num_skipped)


def context(task: Task, prefixes: Tensor) -> Tensor:
    """What the model reads to predict what follows ``prefixes``, int64 (batch, characters so far, maybe none)."""
    if task.rows == "names":
        return functional.pad(prefixes, (1, 0), value=BLANK_CODE)
    return functional.pad(prefixes, (task.window, 0), value=BLANK_CODE)[:, -task.window :]


def build_model(task: Task, section: ModelSection) -> nn.Module:
    """The model, whatever the names are."""
    example = torch.full((2, task.window), BLANK_CODE)
    model = models.build(section.name, section.args, {"num_characters": len(ALPHABET)}, example)
    with torch.no_grad():
        shape = tuple(model(example).shape)
    if shape != (*example.shape, len(ALPHABET)):
        raise ConfigError(
            f"model {section.name} yields {shape} of {tuple(example.shape)} characters, "
            f"not {len(ALPHABET)} logits for each",
            where="model.name",
            hint="use char_lstm or char_gru, or a model of your own that takes num_characters",
        )
    return model


@dataclass(frozen=True)
class NameRows:
    """Rows of codes as a dataset: uint8 (batch, positions) in, int64 (batch, positions) of what comes next."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        codes = torch.from_numpy(self.rows.codes(rows))
        return Batch(codes[:, :-1].contiguous(), codes[:, 1:].long(), rows, [])


@dataclass(frozen=True)
class PetNames:
    """The opened task. ``trained`` and ``held_out`` are the names; the second are all different, and not trained."""

    options: Task
    trained: Sequence[str]
    held_out: Sequence[str]
    num_skipped: int

    @cached_property
    def train(self) -> NameRows:
        return NameRows(self._rows(self.trained))

    @cached_property
    def eval(self) -> NameRows:
        return NameRows(self._rows(self.held_out))

    def _rows(self, names: Sequence[str]) -> Rows:
        return whole(names) if self.options.rows == "names" else windows(names, self.options.window)

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "train names": len(self.trained),
            "eval names": len(self.held_out),
            "train rows": len(self.train),
            "eval rows": len(self.eval),
            "characters": len(ALPHABET),
        }

    @property
    def notes(self) -> list[str]:
        if not self.num_skipped:
            return []
        return [f"{self.options.names}: {self.num_skipped} lines hold no name of letters a-z, blank, - and ."]

    @property
    def fingerprint(self) -> str:
        """The same on two nodes if and only if they read the same names."""
        return hashlib.sha256("\n".join([*self.trained, "", *self.held_out]).encode()).hexdigest()

    def label_counts(self, start: int, stop: int) -> None:
        """There are no labels to be skewed."""

    def model(self, section: ModelSection) -> nn.Module:
        return build_model(self.options, section)

    def prepare(self, inputs: Tensor) -> Tensor:
        """uint8 codes (batch, positions) -> int64, on the same device."""
        return inputs.long()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nats a position of a window, or a character of a name; of logits (batch, positions, characters).

        Names are divided by the mean length of all, not by that of the batch: so the loss stays a mean over rows, and
        a step has the same gradient however its rows are spread over ranks and micro-batches.
        """
        nats = _nats(outputs, targets)
        if self.options.rows == "windows":
            return nats.mean()
        return (nats * (targets != BLANK_CODE)).sum() / (len(targets) * self._characters_a_name)

    @cached_property
    def _characters_a_name(self) -> float:
        return sum(len(name) + 1 for name in self.trained) / len(self.trained)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        nats, hits = _nats(outputs, targets), outputs.argmax(2) == targets
        window = self.options.window
        if self.options.rows == "windows":
            real = torch.zeros_like(hits)
            real[:, -1] = True  # in a window only the last character is new
            times, num_positions = torch.ones_like(targets), torch.ones_like(targets).sum()
        else:
            real = targets != BLANK_CODE
            # How many of the windows of its name show a character as one to predict: it, and those that end later.
            times = (real.flip(1).cumsum(1).flip(1) * real).clamp(max=window)
            num_positions = real.sum() * window
        num_real = real.sum()
        return {
            "char_loss": ((nats * real).sum(), num_real),
            "window_loss": ((nats * times).sum(), num_positions),
            "char_accuracy": ((hits & real).sum(), num_real),
        }

    def report(self, sums: metrics.Sums) -> metrics.Report:
        return {name: sums.ratio(name) for name in self.options.metrics}

    @property
    def signature(self) -> dict[str, Any]:
        """What a user of an exported model must know."""
        reading = f"the {self.options.window} characters before" if self.options.rows == "windows" else "all before"
        return {
            "input": "codes",
            "output": "logits",
            "classes": list(ALPHABET),
            "preprocessing": {
                "code": "a character's place in classes; * stands before a name begins, + ends it",
                "context": f"int64 (batch, positions): {reading}, then the logits of the last position",
            },
        }


def _nats(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log(probability) of each target, float32 (batch, positions)."""
    return functional.cross_entropy(outputs.float().transpose(1, 2), targets, reduction="none")
