"""The task ``mnist``: its settings, and how its data is opened, by ``task.py``, which imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.tasks.mnist.settings import MnistSettings

if TYPE_CHECKING:
    from harness.tasks.mnist.task import Images


class Task(MnistSettings):
    """60,000 gray images of 28x28 pixels to train on, 10,000 to evaluate on, in ten classes."""

    def open(self, seed: int, cache_dir: Path | None) -> Images:
        """Map the image files. Raises DataError."""
        from harness.tasks.mnist import task

        return task.open_images(self, seed)
