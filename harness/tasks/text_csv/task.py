"""Data and model of the task ``text_csv``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from harness.config.places import HUB
from harness.data import hub
from harness.data.texts import Bytes, TextTable, Tokenizer, Words, learn_words, learned_words, own_tokenizer
from harness.errors import ConfigError
from harness.tasks.text_csv.config import Task
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.tables import Split, open_new_table, open_tables
from harness.training.task import ModelSection, Supervised, model_builder

_SHOWN = 200  # characters of a text in a table of predictions
_EXAMPLE_TOKENS = 16


def open_data(task: Task, seed: int, cache_dir: Path | None) -> TextCsv:
    """Open ``task.train_csv`` and ``task.eval_csv``, and learn the words of the former. Raises DataError."""
    train, eval_, opened = open_tables(task, cache_dir)
    first, most = task.text_columns[0], task.tokenizer.max_words
    tokenizer = _tokenizer(task, lambda: learn_words(train.table, first, most, cache_dir))
    texts, eval_texts = (_texts(task, split, tokenizer) for split in (train, eval_))
    return TextCsv(task, texts, eval_texts, opened, tokenizer)


def open_new(task: Task, learned: dict[str, Any], source: str, cache_dir: Path | None) -> TextCsv:
    """Open the table ``source`` for prediction with the labels and words in ``learned``."""
    split, opened = open_new_table(task, learned, source, cache_dir)
    tokenizer = _tokenizer(task, lambda: learned_words(learned))
    if tokenizer.digest and learned.get("tokenizer") != tokenizer.digest:
        raise ConfigError(
            f"{task.tokenizer.name} is no longer the tokenizer that the run was trained with",
            where="task.tokenizer.name",
            hint=f"restore its files, or set it to a copy of them: task.tokenizer.name={HUB}FOLDER",
        )
    texts = _texts(task, split, tokenizer)
    return TextCsv(task, texts, texts, opened, tokenizer)


def _texts(task: Task, split: Split, tokenizer: Tokenizer) -> TextTable:
    options = task.tokenizer
    return TextTable(
        split.table, task.text_columns, split.labels, tokenizer, options.max_length, options.pad == "max_length"
    )


def _tokenizer(task: Task, words: Callable[[], Words]) -> Tokenizer:
    """Return the tokenizer, for which ``words`` reads the vocabulary if it has one. Raises ConfigError."""
    options = task.tokenizer
    if options.name == "words":
        return words()
    if options.name == "bytes":
        return Bytes()
    if options.of_hub:
        return hub.tokenizer(options.name, pairs=len(task.text_columns) > 1)
    assert options.num_tokens is not None  # as its section requires
    return own_tokenizer(options.name, options.args, options.num_tokens)


@dataclass(frozen=True)
class TextCsv(Supervised):
    """The opened task."""

    options: Task
    train: TextTable
    eval: TextTable
    objective: Objective
    tokenizer: Tokenizer

    @property
    def summary(self) -> dict[str, Any]:
        options = self.options.tokenizer
        description = f"{options.name}, {self.tokenizer.num_tokens:,} distinct; at most {options.max_length} per row"
        tokens = "; ".join(filter(None, [description, self.train.lengths]))
        rows = {"train rows": len(self.train), "eval rows": len(self.eval), "tokens": tokens}
        return rows | self.objective.summary(len(self.eval))

    @cached_property
    def notes(self) -> list[str]:
        texts = [self.eval] if self.train is self.eval else [self.train, self.eval]  # the same for prediction
        tables = [note for each in texts for note in each.table.notes]
        return [
            *tables,
            *(note for each in texts for note in each.notes()),
            *self.train.cut_warnings,
            *self._pair_warnings,
            *self.objective.notes,
        ]

    @property
    def _pair_warnings(self) -> list[str]:
        """A list with a warning if both texts of a pair become one."""
        first, *other_columns = self.options.text_columns
        if not other_columns or self.tokenizer.separates_pairs:
            return []
        problem = f"{self.options.tokenizer.name} has no token between both texts of a pair"
        return [f"{problem}: end the texts of column {first!r} with one, such as its eos_token"]

    @property
    def fingerprint(self) -> str:
        digests = [self.train.table.digest, self.eval.table.digest, self.tokenizer.digest]
        return " ".join(filter(None, digests))

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        return self.train.labels.counts(start, stop)

    @property
    def learned(self) -> dict[str, Any]:
        return {**self.objective.labels.learned, **self.tokenizer.learned}

    def model(self, section: ModelSection) -> nn.Module:
        options = self.options.tokenizer
        if section.name.startswith(HUB) and section.start_weights:
            self.tokenizer.require_tokens_of(section.name, options.name)
        fixed_length = options.pad == "max_length" or section.name.startswith(HUB)  # whose places are limited
        length = options.max_length if fixed_length else min(_EXAMPLE_TOKENS, options.max_length)
        outputs = len(self.objective.labels.names)
        arguments = {"num_classes": outputs, "num_tokens": self.tokenizer.num_tokens, **self.tokenizer.known}
        return model_builder.build(section.name, section.args, arguments, self.tokenizer.example(length), outputs)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return int64 ids (batch, positions) as they are."""
        return inputs

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        known = {"id": rows.tolist(), **self.eval.labels.known(rows)}
        for column in self.options.text_columns:
            is_taken = column in known or column in ("prediction", "label")
            known[f"text_{column}" if is_taken else column] = [
                text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…" for text in self.eval.table.strings(column, rows)
            ]
        return known

    @property
    def signature(self) -> dict[str, Any]:
        options = self.options.tokenizer
        preprocessing = {"tokenizer": options.name, "max_length": options.max_length, **self.tokenizer.signature}
        lengths = {"max_length": options.max_length} if options.pad == "batch" and options.max_length > 1 else {}
        return {"input": "tokens", **self.objective.labels.signature, **lengths, "preprocessing": preprocessing}
