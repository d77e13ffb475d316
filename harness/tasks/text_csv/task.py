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
from harness.config.places import HUB
from harness.data import hub
from harness.data.hub import HubTokenizer
from harness.data.texts import RULE, UNKNOWN, Bytes, OwnTokenizer, TextTable, Tokenizer, Words, learn_words
from harness.errors import ConfigError, first_line
from harness.tasks.text_csv.config import BUILT_IN, Task
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.tables import Split, open_new_table, open_tables
from harness.training.task import ModelSection, Supervised, model_builder

_SHOWN = 200  # characters of a text in a table of predictions
_EXAMPLE_TOKENS = 16


def open_data(task: Task, seed: int, cache_dir: Path | None) -> TextCsv:
    """Open ``task.train_csv`` and ``task.eval_csv``, and learn the words of the former. Raises DataError."""
    train, eval_, opened = open_tables(task, cache_dir)
    tokenizer = _built_in(task) or learn_words(train.table, task.text_columns[0], task.tokenizer.max_words, cache_dir)
    texts, eval_texts = (_texts(task, split, tokenizer) for split in (train, eval_))
    return TextCsv(task, texts, eval_texts, opened, tokenizer)


def open_new(task: Task, learned: dict[str, Any], source: str, cache_dir: Path | None) -> TextCsv:
    """Open the table ``source`` for prediction with the labels and words in ``learned``."""
    split, opened = open_new_table(task, learned, source, cache_dir)
    tokenizer = _built_in(task) or _learned_words(learned)
    if isinstance(tokenizer, HubTokenizer) and learned.get("tokenizer") != tokenizer.digest:
        raise ConfigError(
            f"{task.tokenizer.name} is no longer the tokenizer that the run was trained with",
            where="task.tokenizer.name",
            hint=f"restore its files, or set it to a copy of them: task.tokenizer.name={HUB}FOLDER",
        )
    texts = _texts(task, split, tokenizer)
    return TextCsv(task, texts, texts, opened, tokenizer)


def _texts(task: Task, split: Split, tokenizer: Tokenizer | HubTokenizer) -> TextTable:
    options = task.tokenizer
    return TextTable(
        split.table, task.text_columns, split.labels, tokenizer, options.max_length, options.pad == "max_length"
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


def _built_in(task: Task) -> Tokenizer | HubTokenizer | None:
    """Return the tokenizer, unless it must be learned. Raises ConfigError."""
    options, where = task.tokenizer, "task.tokenizer.name"
    if options.name == "words":
        return None
    if options.of_hub:
        return hub.tokenizer(options.name, where, pairs=len(task.text_columns) > 1)
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

    options: Task
    train: TextTable
    eval: TextTable
    objective: Objective
    tokenizer: Tokenizer | HubTokenizer

    @property
    def summary(self) -> dict[str, Any]:
        options = self.options.tokenizer
        shown = f"{options.name}, {self.tokenizer.num_tokens:,} distinct; at most {options.max_length} per row"
        tokens = "; ".join(filter(None, [shown, self.train.lengths]))
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
            *self.objective.notes,
        ]

    @property
    def fingerprint(self) -> str:
        of_tokenizer = [self.tokenizer.digest] if isinstance(self.tokenizer, HubTokenizer) else []
        return " ".join([self.train.table.digest, self.eval.table.digest, *of_tokenizer])

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        return self.train.labels.counts(start, stop)

    @property
    def learned(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if isinstance(self.tokenizer, Words):
            facts = {"vocabulary": list(self.tokenizer.vocabulary)}
        elif isinstance(self.tokenizer, HubTokenizer):
            facts = {"tokenizer": self.tokenizer.digest}
        return {**self.objective.labels.learned, **facts}

    def model(self, section: ModelSection) -> nn.Module:
        options = self.options.tokenizer
        if section.name.startswith(HUB) and section.start_weights and options.name in BUILT_IN:
            raise ConfigError(
                f"{section.name} was not trained on the tokens of the tokenizer {options.name}",
                where="task.tokenizer.name",
                hint=f"set task.tokenizer.name={section.name}, or model.weights=random",
            )
        whole = options.pad == "max_length" or section.name.startswith(HUB)  # whose places are limited
        length = options.max_length if whole else min(_EXAMPLE_TOKENS, options.max_length)
        outputs, example = len(self.objective.labels.names), torch.ones(2, length, dtype=torch.int64)
        known: dict[str, Any] = {"num_classes": outputs, "num_tokens": self.tokenizer.num_tokens}
        if isinstance(self.tokenizer, HubTokenizer):
            if section.name.startswith(HUB) and section.start_weights:
                hub.require_same(options.name, section.name, self.tokenizer)
            example = self.tokenizer.example(length)
            known |= {"tokenizer": self.tokenizer}
        return model_builder.build(section.name, section.args, known, example, outputs)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return int64 ids (batch, positions) as they are."""
        return inputs

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        known = {"id": rows.tolist(), **self.eval.labels.known(rows)}
        for column in self.options.text_columns:
            taken = column in known or column in ("prediction", "label")
            known[f"text_{column}" if taken else column] = [
                text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…" for text in self.eval.table.strings(column, rows)
            ]
        return known

    @property
    def signature(self) -> dict[str, Any]:
        options = self.options.tokenizer
        facts: dict[str, Any] = {
            "tokenizer": options.name, "max_length": options.max_length, "padding": "0, on the right"
        }  # fmt: skip
        if isinstance(self.tokenizer, HubTokenizer):
            facts = {
                "tokenizer": options.name, "max_length": options.max_length, "last_dimension": self.tokenizer.inputs
            }  # fmt: skip
        elif isinstance(self.tokenizer, Words):
            words = list(self.tokenizer.vocabulary)
            facts |= {"rule": RULE, "unknown": UNKNOWN, "first": 2, "vocabulary": words}
        elif options.name == "bytes":
            facts |= {"rule": "the bytes of the text in UTF-8, each plus 1"}
        lengths = {"max_length": options.max_length} if options.pad == "batch" and options.max_length > 1 else {}
        return {"input": "tokens", **self.objective.labels.signature, **lengths, "preprocessing": facts}
