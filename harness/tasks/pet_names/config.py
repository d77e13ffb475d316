"""The task ``pet_names``: its settings, and how its data is opened, by ``task.py``, which imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.tasks.pet_names.settings import PetNamesSettings

if TYPE_CHECKING:
    from harness.tasks.pet_names.task import PetNames


class Task(PetNamesSettings):
    """A text file with one name per line."""

    def open(self, seed: int, cache_dir: Path | None) -> PetNames:
        """Read and split the names. Raises DataError."""
        from harness.tasks.pet_names import task

        return task.read_names(self)
