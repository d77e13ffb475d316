"""The task ``image_csv``: its settings, and how its data is opened, by ``task.py``, which imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tasks.image_csv.settings import ImageCsvSettings

if TYPE_CHECKING:
    from harness.tasks.image_csv.task import ImageCsv


class Task(ImageCsvSettings):
    """A CSV (or Parquet file) with one image path and a label, several labels or numbers per row."""

    def open(self, seed: int, cache_dir: Path | None) -> ImageCsv:
        """Open the annotation tables, converting them first if necessary. Raises DataError."""
        from harness.tasks.image_csv import task

        return task.open_tables(self, seed, cache_dir)

    def open_new(self, learned: dict[str, Any], source: str, cache_dir: Path | None) -> ImageCsv:
        """Open the table ``source`` for prediction. Its labels are optional and are not interpreted."""
        from harness.tasks.image_csv import task

        return task.open_new_table(self, learned, source, cache_dir)
