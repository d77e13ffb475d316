"""The texts of a table as rows of token ids: bytes, words, or the user's own tokenizer. Id 0 is padding."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from harness.config import plugins
from harness.data.batch import Batch
from harness.data.row_labels import RowLabels
from harness.data.table.table import Table, TableRows
from harness.errors import ConfigError, DataError, first_line, plural
from harness.runs.console import working
from harness.runs.fetch import made_once
from harness.runs.files import cache_folder, read_sealed, write_sealed

log = logging.getLogger("harness")

RULE = "NFD, lower case; a word is a run of letters, marks, digits and underscores"
SETTING = "task.tokenizer.name"
_BETWEEN_WORDS = r"[^\p{L}\p{M}\p{N}_]+"
_CHUNK_ROWS = 1 << 16
_LOOKED_AT = 500  # rows whose tokens are counted


class Tokenizer(ABC):
    """Makes rows of ids, from 0 to ``num_tokens - 1``, of one column of texts, or of two as pairs."""

    num_tokens: int
    digest = ""
    """Of what changes the ids and is not in the configuration."""
    learned: Mapping[str, Any] = {}
    """What task.json keeps for predictions."""
    signature: Mapping[str, Any] = {"padding": "0, on the right"}
    """What other programs need to make the same ids."""
    known: Mapping[str, Any] = {}
    """Further arguments of a model that takes them."""
    separates_pairs = True
    """False if no token tells where the second text of a pair begins."""

    @abstractmethod
    def padded(self, texts: Sequence[Sequence[str]], max_length: int, fixed: bool) -> np.ndarray:
        """Return int64 ids (batch, positions, ...) of columns of ``texts``, cut off after ``max_length``, to which
        ``fixed`` pads all."""

    @abstractmethod
    def lengths(self, texts: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the number of tokens of each row of ``texts``, of which none is cut."""

    def example(self, length: int) -> torch.Tensor:
        """Return two made-up rows of ``length`` tokens."""
        return torch.ones(2, length, dtype=torch.int64)

    def require_tokens_of(self, model: str, name: str) -> None:
        """Raise ConfigError if the weights of ``model``, a ``hf:FOLDER_OR_NAME``, were trained on the tokens of another
        tokenizer than this one of this ``name``."""
        hint = f"set {SETTING}={model}, or model.weights=random"
        raise ConfigError(f"{model} was not trained on the tokens of the tokenizer {name}", where=SETTING, hint=hint)


class _OneColumn(Tokenizer):
    """A tokenizer that encodes each text by itself."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return (the ids of all texts, one after the other, as int64; the number of ids of each text)."""

    def padded(self, texts: Sequence[Sequence[str]], max_length: int, fixed: bool) -> np.ndarray:
        ids, counts = self.encode(texts[0])
        kept = np.minimum(counts, max_length)
        width = max_length if fixed else max(1, int(kept.max(initial=0)))
        places = np.arange(width)
        inside = places < kept[:, None]
        starts = np.cumsum(counts) - counts
        padded = np.zeros((len(counts), width), dtype=np.int64)
        padded[inside] = ids[(starts[:, None] + places)[inside]]
        return padded

    def lengths(self, texts: Sequence[Sequence[str]]) -> np.ndarray:
        return self.encode(texts[0])[1]


class Bytes(_OneColumn):
    """The bytes of the text in UTF-8, each plus one."""

    num_tokens = 257
    signature = {**Tokenizer.signature, "rule": "the bytes of the text in UTF-8, each plus 1"}

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        counts = np.asarray([len(part) for part in parts], dtype=np.int64)
        return np.frombuffer(b"".join(parts), np.uint8).astype(np.int64) + 1, counts


class Words(_OneColumn):
    """Words by their place in a vocabulary, plus two."""

    def __init__(self, vocabulary: list[str]) -> None:
        self.num_tokens = len(vocabulary) + 2
        self.learned = {"vocabulary": vocabulary}
        self.signature = {**self.signature, "rule": RULE, "unknown": 1, "first": 2, **self.learned}
        self._words = pa.array(vocabulary, pa.string())

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        words, counts = words_of(pa.array(texts, pa.string()))
        places = pc.fill_null(pc.index_in(words, self._words), -1).to_numpy(zero_copy_only=False)
        return places.astype(np.int64) + 2, counts


@dataclass
class OwnTokenizer(_OneColumn):
    """A function of the user's own from a text to a sequence of ids."""

    name: str
    function: Callable[[str], Sequence[int]]
    num_tokens: int

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Raises DataError for an id that the model has no place for."""
        parts = [np.asarray(self.function(text), dtype=np.int64).reshape(-1) for text in texts]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_tokens):
            wrong = int(ids.max() if ids.max() >= self.num_tokens else ids.min())
            raise DataError(
                f"the tokenizer {self.name} returned the id {wrong}; ids are from 0 to {self.num_tokens - 1}",
                where="task.tokenizer",
                hint="set task.tokenizer.num_tokens to the largest id plus one",
            )
        return ids, np.asarray([len(part) for part in parts], dtype=np.int64)

    def require_tokens_of(self, model: str, name: str) -> None:
        """Leave the tokens to the user."""


def own_tokenizer(name: str, args: Mapping[str, Any], num_tokens: int) -> OwnTokenizer:
    """Return the user's function, or object of a class, ``name``. Raises ConfigError if it fails."""
    function = plugins.import_own("tokenizer", name, SETTING)
    try:
        if inspect.isclass(function):
            function = function(**args)
        elif args:
            function = functools.partial(function, **args)
        tokenizer = OwnTokenizer(name, function, num_tokens)
        tokenizer.encode(["", "A sample text with two sentences. Ünïcode."])
    except Exception as error:  # of the user's own code
        message = f"the tokenizer {name} fails: {type(error).__name__}: {first_line(error)}"
        hint = "it is called with a text, and returns a list of ids from 0 to task.tokenizer.num_tokens - 1"
        raise ConfigError(message, where=SETTING, hint=hint) from error
    return tokenizer


def words_of(texts: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return (the words of all texts, one after the other; the number of words of each text), by ``RULE``."""
    # Decomposed, because pyarrow 25 does not compose for NFC: both spellings of a letter become one in any version.
    plain = pc.utf8_lower(pc.utf8_normalize(texts, form="NFD"))
    parts = pc.split_pattern_regex(plain, pattern=_BETWEEN_WORDS)
    words = parts.flatten()
    filled = pc.not_equal(words, "").to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(texts)), pc.list_value_length(parts).to_numpy(zero_copy_only=False))
    return words.filter(pa.array(filled)), np.bincount(owners[filled], minlength=len(texts))


def learn_words(table: Table, column: str, max_words: int, cache_dir: Path | None) -> Words:
    """Return the ``max_words`` most frequent words of a column; of equally frequent ones, the first in alphabetical
    order.

    The first process of a node counts them while others wait. Raises DataError if there are none.
    """
    key = hashlib.sha256(json.dumps([RULE, table.digest, column, max_words]).encode()).hexdigest()[:32]
    path = cache_folder(cache_dir) / "words" / f"{key}.json"
    with made_once(path):
        try:
            words = read_sealed(path)["words"]
        except (OSError, ValueError):
            if path.exists():
                log.warning("%s: the list of words in the cache is damaged; counting again", table.name)
            words = _most_frequent(table, column, max_words)
            write_sealed(path, {"words": words}, secrets.token_hex(8))
    return Words(words)


def learned_words(facts: Mapping[str, Any]) -> Words:
    """Return the vocabulary in ``facts``, the content of task.json. Raises ConfigError."""
    words = facts.get("vocabulary")
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        raise ConfigError(
            "the run's task.json does not hold the words of the training data",
            hint="start the run again to write the file: harness train -c RUN/config.yaml",
        )
    return Words(words)


def _most_frequent(table: Table, column: str, max_words: int) -> list[str]:
    """Count the words of ``column``, as ``learn_words`` describes. Raises DataError."""
    counts: Counter[str] = Counter()
    with working(f"counting the words of {table.name}", "rows", len(table)) as work:
        for work.done in range(0, len(table), _CHUNK_ROWS):
            for chunk in table.slice(column, work.done, work.done + _CHUNK_ROWS).chunks:
                value_counts = words_of(chunk)[0].value_counts()
                words, numbers = value_counts.field("values").to_pylist(), value_counts.field("counts").to_pylist()
                counts.update(dict(zip(words, numbers, strict=True)))
    if not counts:
        raise DataError(
            f"no row has a word in column {column!r}",
            where=table.name,
            hint="set task.text_column to the column of texts, or use task.tokenizer.name=bytes",
        )
    return sorted(counts, key=lambda word: (-counts[word], word))[:max_words]


@dataclass(frozen=True)
class TextTable(TableRows):
    """The texts and labels of a table, as a dataset: inputs are ids, int64 (batch, positions), padded with 0 on the
    right. Of a tokenizer of transformers, which takes texts or pairs of them, they are (batch, positions, inputs)."""

    table: Table
    columns: tuple[str, ...]
    labels: RowLabels
    tokenizer: Tokenizer
    max_length: int
    """The most tokens of a row; what follows is cut off, of a pair first the end of the longer text."""
    fixed: bool
    """True to pad all batches to ``max_length`` instead of to their longest text."""

    def __len__(self) -> int:
        return self.table.num_rows

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return these rows in order; the same in every epoch."""
        texts = [self.table.strings(column, rows) for column in self.columns]
        inputs = self.tokenizer.padded(texts, self.max_length, self.fixed)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(self.labels.targets(rows)), rows)

    @cached_property
    def _looked_at(self) -> np.ndarray:
        """The numbers of tokens of some rows; empty if the tokenizer fails, which the first batch reports."""
        rows = np.linspace(0, len(self) - 1, min(_LOOKED_AT, len(self))).round().astype(np.int64)
        texts = [self.table.strings(column, rows) for column in self.columns]
        try:
            return self.tokenizer.lengths(texts)
        except Exception:  # of the user's own tokenizer
            return np.empty(0, np.int64)

    @property
    def lengths(self) -> str:
        """How many tokens rows have and how many of them are cut, in words; empty if the tokenizer fails."""
        counts = self._looked_at
        longest, cut, looked = int(counts.max(initial=0)), int((counts > self.max_length).sum()), len(counts)
        if not looked:
            return ""
        if not cut:
            return f"the longest of {plural(looked, 'row')} looked at has {longest:,}"
        return f"{cut:,} of {plural(looked, 'row')} looked at are cut; the longest has {longest:,}"

    @property
    def cut_warnings(self) -> list[str]:
        """A list with a warning if most rows are cut."""
        if (self._looked_at > self.max_length).sum() * 2 <= len(self._looked_at):
            return []
        return [f"most texts lose their end: {self.lengths}; task.tokenizer.max_length is {self.max_length}"]

    def notes(self) -> list[str]:
        """Return a warning for each column with rows without text."""
        return list(filter(None, map(self._note, self.columns)))

    def _note(self, column: str) -> str:
        count, first = 0, -1
        for start in range(0, len(self), _CHUNK_ROWS):
            texts = self.table.slice(column, start, start + _CHUNK_ROWS)
            blank = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy()
            if blank.any():
                first = start + int(blank.argmax()) if first < 0 else first
                count += int(blank.sum())
        if not count:
            return ""
        where = self.table.where(first)
        return f"rows without text in column {column!r}: {count} of {len(self)}, the first at {where}"
