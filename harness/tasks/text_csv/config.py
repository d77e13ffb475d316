"""Texts from a CSV: one column of texts, and one of labels or several of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from harness.config.base import Arguments, Mark, Positive, Section
from harness.config.places import HUB
from harness.config.targets import TableTask

if TYPE_CHECKING:
    from harness.errors import DataError

_BUILT_IN = ("words", "bytes")
_MAX_WORDS = 20_000


class TokenizerSection(Section):
    """How texts are cut into tokens."""

    name: str = "words"
    """words: the most frequent words of train_csv, in lowercase. bytes: the bytes of the text in UTF-8. Or your own
    package.module.function from a text to a list of ids, of which 0 is padding, or a class that makes such a function.
    Or hf:FOLDER_OR_NAME, that of a model of Hugging Face.
    """
    max_words: Annotated[int, Field(ge=1, le=10_000_000)] = _MAX_WORDS
    """Size of the vocabulary of `words`; all other words are one token."""
    max_length: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Maximum number of tokens per row, a text or a pair; the rest is cut off: of a pair, first the end of the longer
    text. `harness check` says how many of the first 500 rows are cut.
    """
    pad: Literal["batch", "max_length"] = "batch"
    """Pad shorter rows to the length of the longest in the batch, or to max_length, which torch.compile prefers."""
    num_tokens: Positive | None = None
    """For a tokenizer of your own: its largest id plus one, such as 30522."""
    args: Arguments = {}
    """Keyword arguments of a tokenizer of your own, such as {lowercase: true}."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if "." not in name and name not in _BUILT_IN and not name.startswith(HUB):
            raise ValueError(
                f"there is no tokenizer {name!r}; use words, bytes, hf:FOLDER_OR_NAME, or your own "
                "package.module.function"
            )
        return name

    @property
    def of_hub(self) -> bool:
        """True for a tokenizer of transformers."""
        return self.name.startswith(HUB)

    @model_validator(mode="after")
    def _fits_together(self) -> TokenizerSection:
        is_own = "." in self.name and not self.of_hub
        if is_own and self.num_tokens is None:
            raise ValueError(f"{self.name} needs num_tokens, its largest id plus one")
        if not is_own and self.num_tokens is not None:
            raise ValueError(f"num_tokens is for a tokenizer of your own; the tokenizer {self.name} sets it itself")
        if self.args and not is_own:
            raise ValueError(f"the tokenizer {self.name} takes no args")
        if self.name != "words" and self.max_words != _MAX_WORDS:
            raise ValueError(f"max_words is for the tokenizer words, not for {self.name}; remove it")
        return self


class Task(TableTask):
    """A CSV (or Parquet file) with one text and a label, several labels or numbers per row."""

    name: Literal["text_csv"]
    """Predicts labels or numbers for the texts in an annotation CSV."""
    text_column: str | Annotated[tuple[str, ...], Field(strict=False)] = "text"
    """Column of the CSV with the texts; for a tokenizer hf:FOLDER_OR_NAME also two, such as [question, answer], whose
    texts are encoded as pairs.
    """
    tokenizer: Annotated[TokenizerSection, Mark.CODE] = TokenizerSection()
    """How texts are cut into tokens."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_files(cls, values: Any) -> Any:
        """Texts are read with the table, before training, so none is found to be unreadable later."""
        if isinstance(values, dict) and "on_bad_row" in values:
            raise ValueError(
                "text_csv has no on_bad_row, since the texts are in the table: a run starts only if all of it can be "
                "read, and names rows without text; remove on_bad_row, and such rows from the table"
            )
        return values

    @model_validator(mode="after")
    def _takes_pairs(self) -> Task:
        most = 2 if self.tokenizer.of_hub else 1
        if not 1 <= len(self.text_columns) <= most or len(set(self.text_columns)) < len(self.text_columns):
            raise ValueError(
                f"text_column {list(self.text_columns)}: the tokenizer {self.tokenizer.name} takes "
                + ("one column, or a list of two different ones" if most == 2 else "one; hf:FOLDER_OR_NAME takes pairs")
            )
        if in_both := set(self.text_columns) & set(self.label_columns):
            raise ValueError(f"column {min(in_both)!r} is in text_column and is that of the labels; name another")
        return self

    @property
    def text_columns(self) -> tuple[str, ...]:
        return (self.text_column,) if isinstance(self.text_column, str) else self.text_column

    @property
    def input_columns(self) -> dict[str, str]:
        return dict.fromkeys(self.text_columns, "task.text_column")

    def problems(self) -> Iterator[DataError]:
        from harness.data.table import header

        yield from header.problems((self.train_csv, self.eval_csv), self.columns)
