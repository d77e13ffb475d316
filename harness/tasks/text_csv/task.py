"""Data and model of the task ``text_csv``."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.config import plugins
from harness.data.texts import RULE, UNKNOWN, Bytes, OwnTokenizer, TextTable, Tokenizer, Words, learn_words
from harness.errors import ConfigError, first_line
from harness.tasks.text_csv.settings import TextCsvSettings
from harness.training.evaluation import objective
from harness.training.evaluation.objective import Objective, Split
from harness.training.task import ModelSection, Supervised, model_builder

_SHOWN = 200  # characters of a text in a table of predictions
_EXAMPLE_TOKENS = 16


def open_tables(task: TextCsvSettings, cache_dir: Path | None) -> TextCsv:
    """Open ``task.train_csv`` and ``task.eval_csv``, and learn the words of the former. Raises DataError."""
    train, eval_, opened = objective.open_tables(task, cache_dir)
    tokenizer = _built_in(task) or learn_words(train.table, task.text_column, task.tokenizer.max_words, cache_dir)
    texts, eval_texts = (_texts(task, split, tokenizer) for split in (train, eval_))
    return TextCsv(task, texts, eval_texts, opened, tokenizer)


def open_new_table(task: TextCsvSettings, learned: dict[str, Any], source: str, cache_dir: Path | None) -> TextCsv:
    """Open the table ``source`` for prediction with the labels and words in ``learned``."""
    split, opened = objective.open_new_table(task, learned, source, cache_dir)
    tokenizer = _built_in(task) or _learned_words(learned)
    texts = _texts(task, split, tokenizer)
    return TextCsv(task, texts, texts, opened, tokenizer)


def _texts(task: TextCsvSettings, split: Split, tokenizer: Tokenizer) -> TextTable:
    options = task.tokenizer
    return TextTable(
        split.table, task.text_column, split.labels, tokenizer, options.max_length, options.pad == "max_length"
    )


def _learned_words(facts: dict[str, Any]) -> Words:
    """Return the vocabulary in ``facts``, the content of task.json. Raises ConfigError."""
    found = facts.get("vocabulary")
    if not (isinstance(found, list) and found and all(isinstance(word, str) for word in found)):
        raise ConfigError(
            "the run's task.json does not hold the words of the training data",
            hint="start the run again to write the file: harness train -c RUN/config.yaml",
        )
    return Words(tuple(found))


def _built_in(task: TextCsvSettings) -> Tokenizer | None:
    """Return the tokenizer, unless it must be learned. Raises ConfigError."""
    options, where = task.tokenizer, "task.tokenizer.name"
    if options.name == "words":
        return None
    if options.num_tokens is None:
        return Bytes()
    function = plugins.import_own("tokenizer", options.name, where)
    try:
        if inspect.isclass(function):
            function = function(**options.args)
        elif options.args:
            function = functools.partial(function, **options.args)
        own = OwnTokenizer(options.name, function, options.num_tokens)
        own.encode(["", "A sample text with two sentences. Ünïcode."])
    except Exception as error:  # of the user's own code
        what = f"the tokenizer {options.name} fails: {type(error).__name__}: {first_line(error)}"
        hint = "it is called with a text, and returns a list of ids from 0 to task.tokenizer.num_tokens - 1"
        raise ConfigError(what, where=where, hint=hint) from error
    return own


@dataclass(frozen=True)
class TextCsv(Supervised):
    """The opened task."""

    options: TextCsvSettings
    train: TextTable
    eval: TextTable
    objective: Objective
    tokenizer: Tokenizer

    @property
    def summary(self) -> dict[str, Any]:
        options = self.options.tokenizer
        shown = f"{options.name}, {self.tokenizer.num_tokens:,} distinct; at most {options.max_length} per text"
        rows = {"train rows": len(self.train), "eval rows": len(self.eval), "tokens": shown}
        return rows | self.objective.summary(len(self.eval))

    @cached_property
    def notes(self) -> list[str]:
        notes = [self.train.note(), self.eval.note(), *self.objective.notes]
        return [*self.train.table.notes, *self.eval.table.notes, *filter(None, notes)]

    @property
    def fingerprint(self) -> str:
        return f"{self.train.table.digest} {self.eval.table.digest}"

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        return self.train.labels.counts(start, stop)

    @property
    def learned(self) -> dict[str, Any]:
        words = {"vocabulary": list(self.tokenizer.vocabulary)} if isinstance(self.tokenizer, Words) else {}
        return {**self.objective.labels.learned, **words}

    def model(self, section: ModelSection) -> nn.Module:
        options = self.options.tokenizer
        length = options.max_length if options.pad == "max_length" else min(_EXAMPLE_TOKENS, options.max_length)
        known = {"num_classes": len(self.objective.labels.names), "num_tokens": self.tokenizer.num_tokens}
        return model_builder.build(section.name, section.args, known, torch.ones(2, length, dtype=torch.int64))

    def prepare(self, inputs: Tensor) -> Tensor:
        """int64 ids (batch, positions), as they are."""
        return inputs

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        texts = self.eval.table.strings(self.options.text_column, rows)
        shown = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…" for text in texts]
        return {"id": rows.tolist(), **self.eval.labels.known(rows), "text": shown}

    @property
    def signature(self) -> dict[str, Any]:
        options = self.options.tokenizer
        facts: dict[str, Any] = {
            "tokenizer": options.name, "max_length": options.max_length, "padding": "0, on the right"
        }  # fmt: skip
        if isinstance(self.tokenizer, Words):
            words = list(self.tokenizer.vocabulary)
            facts |= {"rule": RULE, "unknown": UNKNOWN, "first": 2, "vocabulary": words}
        elif options.name == "bytes":
            facts |= {"rule": "the bytes of the text in UTF-8, each plus 1"}
        variable = {} if options.pad == "max_length" else {"variable_length": True}
        return {"input": "tokens", **self.objective.labels.signature, **variable, "preprocessing": facts}
