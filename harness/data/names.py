"""Cleaned names: the characters they have. BLANK pads the start of a name, STOP marks its end."""

from __future__ import annotations

import string

BLANK, STOP = "*", "+"
ALPHABET = BLANK + STOP + " -." + string.ascii_lowercase
_IN_NAMES = frozenset(ALPHABET) - {BLANK, STOP}


def clean(name: str) -> str:
    """Return ``name`` in lower case, with blanks stripped and runs of blanks collapsed.

    Returns "" if it has a character other than a-z, blank, hyphen and full stop, or no letter at all.
    """
    tidied = " ".join(part for part in name.lower().split(" ") if part)
    usable = set(tidied) <= _IN_NAMES and any(character.isalpha() for character in tidied)
    return tidied if usable else ""
