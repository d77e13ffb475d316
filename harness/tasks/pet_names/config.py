"""Names, one character after the other: a language model over the names of pets.

Names are cleaned as ``harness.data.names.clean`` says, and split by name: one different name in ten is held out, so
that no name is both trained and evaluated, and evaluation counts each held-out name once. A model reads rows of one of
two kinds, and both are judged by the same number, ``char_loss``: the mean over each character of each held-out name,
and over the stop behind it, of -log(probability), in nats, blanks left out.

    windows   a row for each next character: the ``window`` characters before it. The loss in training is over all
              positions of the window, blanks included.
    names     a row for each name, so that each character is predicted once, from all those before it. The loss in
              training is over characters alone.

``window_loss`` is the mean over all positions of all windows, blanks included, for either kind. It is lower, since
blanks are easy, and characters count as often as windows have them. A model of whole names predicts no blanks: they
are counted at no cost, and its other characters have all their context.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from harness.config.base import Positive
from harness.config.schema import TaskSection

if TYPE_CHECKING:
    from harness.tasks.pet_names.task import PetNames


class Task(TaskSection):
    """A text file with a name a line."""

    name: Literal["pet_names"]
    names: str = "data/pet_names/names.txt"
    """The file of names; `harness data pet_names data/pet_names` writes this one."""
    rows: Literal["windows", "names"] = "windows"
    """What a row is: a window before each next character, or a whole name."""
    window: Positive = 8
    """Characters of a window; window_loss counts windows of this length for rows of either kind."""
    repeats: bool = False
    """Train on a name as often as the file has it, instead of once; held-out names always count once."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {
        "char_loss": "min",
        "window_loss": "min",
        "char_accuracy": "max",
    }

    def open(self, seed: int, cache_dir: Path | None) -> PetNames:
        """The names as rows of codes. Raises DataError."""
        from harness.tasks.pet_names import task

        return task.split_by_name(self)
