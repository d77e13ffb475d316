"""Seeds: one 63-bit number for each (purpose, seed, ...), so that random streams never overlap."""

from __future__ import annotations

import numpy as np

INITIAL_WEIGHTS, TRAINING, AUGMENTATION, ORDER = range(4)  # purposes: streams that never meet


def derive(*key: int) -> int:
    """A 63-bit seed that depends on every number of ``key``, each from 0 to 2^32 - 1, well mixed."""
    # With the length, since a SeedSequence takes (1, 0) for (1,).
    return int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0] >> 1)
