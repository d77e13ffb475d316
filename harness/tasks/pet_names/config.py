"""A character-level language model of pet names.

Names are cleaned by ``harness.data.names.clean`` and split by name: one distinct name in ten is for validation, so no
name is in both sets, and evaluation counts each validation name once. A model reads rows of one of two kinds. Both are
compared by ``char_loss``: the mean of -log(probability) in nats over the characters and the stop of each validation
name, without padding.

    windows   one row per next character, with the ``window`` characters before it. The training loss is over all
              positions of the window, padding included.
    names     one row per name, so each character is predicted once, from all characters before it. The training loss
              is over characters only.

``window_loss`` is the mean over all positions of all windows, padding included, for either kind. It is lower, because
padding is easy to predict, and it counts a character once per window that contains it. A model of whole names does not
predict padding, which then counts as a loss of zero, and sees the whole context of every character.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from harness.config.base import LocalPlace, Mark, Positive
from harness.config.schema import TaskSection


class Task(TaskSection):
    """A text file with one name per line."""

    name: Literal["pet_names"]
    """Learns to write names, character by character."""
    names: Annotated[LocalPlace, Mark.OF_MACHINE] = "data/pet_names/names.txt"
    """The file of names; `harness data pet_names data/pet_names` writes this one."""
    rows: Literal["windows", "names"] = "windows"
    """One row per character, with the window before it (windows), or one row per name (names)."""
    window: Positive = 8
    """Length of a window in characters. window_loss uses it with rows=names, too."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {
        "char_loss": "min",
        "window_loss": "min",
        "char_accuracy": "max",
    }
