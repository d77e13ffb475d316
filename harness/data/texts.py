"""The texts of a table as rows of token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
import torch

from harness.data.batch import Batch
from harness.data.row_labels import RowLabels
from harness.data.table.table import Table
from harness.data.tokens import Tokenizer

_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True)
class TextTable:
    """The texts and labels of a table, as a dataset: inputs are ids, int64 (batch, positions), padded with 0 on the
    right.

    max_length: of a text in tokens; what follows is cut off
    fixed: pad all batches to ``max_length`` instead of to their longest text
    """

    table: Table
    column: str
    labels: RowLabels
    tokenizer: Tokenizer
    max_length: int
    fixed: bool

    def __len__(self) -> int:
        return self.table.num_rows

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """These rows in order; the same in every epoch."""
        ids, counts = self.tokenizer.encode(self.table.strings(self.column, rows))
        kept = np.minimum(counts, self.max_length)
        width = self.max_length if self.fixed else max(1, int(kept.max(initial=0)))
        places = np.arange(width)
        inside = places < kept[:, None]
        starts = np.cumsum(counts) - counts
        padded = np.zeros((len(rows), width), dtype=np.int64)
        padded[inside] = ids[(starts[:, None] + places)[inside]]
        return Batch(torch.from_numpy(padded), torch.from_numpy(self.labels.targets(rows)), rows)

    def note(self) -> str:
        """A warning about rows without text; empty if there are none."""
        count, first = 0, -1
        for start in range(0, len(self), _CHUNK_ROWS):
            texts = self.table.slice(self.column, start, start + _CHUNK_ROWS)
            blank = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy()
            if blank.any():
                first = start + int(blank.argmax()) if first < 0 else first
                count += int(blank.sum())
        if not count:
            return ""
        where = self.table.where(first)
        return f"rows without text in column {self.column!r}: {count} of {len(self)}, the first at {where}"
