"""The task ``text_csv``: its settings, and how its data is opened, by ``task.py``, which imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tasks.text_csv.settings import TextCsvSettings

if TYPE_CHECKING:
    from harness.tasks.text_csv.task import TextCsv


class Task(TextCsvSettings):
    """A CSV (or Parquet file) with one text and a label, several labels or numbers per row."""

    def open(self, seed: int, cache_dir: Path | None) -> TextCsv:
        """Open the annotation tables, converting them first if necessary. Raises DataError."""
        from harness.tasks.text_csv import task

        return task.open_tables(self, cache_dir)

    def open_new(self, learned: dict[str, Any], source: str, cache_dir: Path | None) -> TextCsv:
        """Open the table ``source`` for prediction. Its labels are optional and are not interpreted."""
        from harness.tasks.text_csv import task

        return task.open_new_table(self, learned, source, cache_dir)
