"""Seeds derived from (purpose, seed, ...), so that no two random streams overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch

EVALUATION_SEED = 0  # random transforms in evaluation draw the same numbers for every image


class Purpose(IntEnum):
    """What random numbers are for. Another number would change every run, and a resumed one."""

    INITIAL_WEIGHTS = 0
    TRAINING = 1
    AUGMENTATION = 2
    MIXING = 3
    COVERAGE = 4
    GRADIENTS = 5


def derive(*key: int) -> int:
    """Return a 63-bit seed that depends on every number of ``key``, each from 0 to 2^32 - 1."""
    # The length is part of the key because SeedSequence treats (1, 0) and (1,) alike.
    return int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0]) >> 1


def row_seed(seed: int, epoch: int, row: int) -> int:
    """Return the seed for augmenting ``row`` in ``epoch``: the same on any rank, in any worker, after any resume."""
    return derive(Purpose.AUGMENTATION, seed, epoch, row)


@contextlib.contextmanager
def seeded_torch(seed: int | torch.Tensor) -> Iterator[None]:
    """Seed torch's CPU generator, which torchvision's transforms draw from, or give it a state that it had; restore its
    own state on exit."""
    with torch.random.fork_rng(devices=[]):
        if isinstance(seed, torch.Tensor):
            torch.set_rng_state(seed)
        else:  # torch.manual_seed would seed the GPUs too, and their stream belongs to training
            torch.default_generator.manual_seed(seed)
        yield
