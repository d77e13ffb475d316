"""Texts from a CSV: one column of texts, and one of labels or several of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from harness.config.base import Arguments, Positive, Section
from harness.config.targets import TableTask

if TYPE_CHECKING:
    from harness.errors import DataError

BUILT_IN = ("words", "bytes")


class TokenizerSection(Section):
    """How texts are cut into tokens."""

    name: str = "words"
    """words: the most frequent words of train_csv, in lowercase. bytes: the bytes of the text in UTF-8. Or your own
    package.module.function from a text to a list of ids, of which 0 is padding, or a class that makes such a function.
    """
    max_words: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """Size of the vocabulary of `words`; all other words are one token."""
    max_length: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Maximum number of tokens per text; the rest is cut off."""
    pad: Literal["batch", "max_length"] = "batch"
    """Pad shorter texts to the length of the longest in the batch, or to max_length, which torch.compile prefers."""
    num_tokens: Positive | None = None
    """For a tokenizer of your own: its largest id plus one, such as 30522."""
    args: Arguments = {}
    """Keyword arguments of a tokenizer of your own, such as {lowercase: true}."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if "." not in name and name not in BUILT_IN:
            raise ValueError(f"there is no tokenizer {name!r}; use words, bytes, or your own package.module.function")
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> TokenizerSection:
        own = "." in self.name
        if own and self.num_tokens is None:
            raise ValueError(f"{self.name} needs num_tokens, its largest id plus one")
        if not own and self.num_tokens is not None:
            raise ValueError(
                f"num_tokens is for a tokenizer of your own; the built-in tokenizer {self.name} sets it itself"
            )
        if self.args and not own:
            raise ValueError(f"the tokenizer {self.name} takes no args")
        return self


class TextCsvSettings(TableTask):
    """A CSV (or Parquet file) with one text and a label, several labels or numbers per row."""

    name: Literal["text_csv"]
    """Predicts labels or numbers for the texts in an annotation CSV."""
    text_column: str = "text"
    """Column of the CSV with the texts."""
    tokenizer: TokenizerSection = TokenizerSection()
    """How texts are cut into tokens."""

    @property
    def input_columns(self) -> dict[str, str]:
        return {self.text_column: "task.text_column"}

    def problems(self) -> Iterator[DataError]:
        from harness.data.table import convert

        yield from convert.problems((self.train_csv, self.eval_csv), self.columns)
