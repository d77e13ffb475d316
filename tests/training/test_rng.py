"""Random streams are independent, are restored exactly, and load without running code."""

from __future__ import annotations

import io
import random
from unittest import mock

import numpy as np
import torch

from harness.data.seeds import Purpose
from harness.training.reproducibility import rng

CPU = torch.device("cpu")


def draw() -> list[float]:
    """One number from each stream; two from those that generate pairs."""
    return [torch.rand(()).item(), torch.randn(()).item(), np.random.rand(), np.random.randn(), np.random.randn(),
            random.random(), random.gauss(0, 1)]  # fmt: skip


def test_derived_seeds_differ_and_are_stable():
    keys = [
        (purpose, seed, epoch, row) for purpose in range(4) for seed in (0, 1) for epoch in (0, 1) for row in (0, 1)
    ]
    seeds = {rng.derive(*key) for key in [*keys, (0, 0, 0, 2**31), (0, 2**32 - 1, 0, 0)]}
    assert len(seeds) == len(keys) + 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rng.derive(2, 0, 1) == 1741318030659061586  # a change would change the weights and pixels of every run


def test_seed_all_seeds_every_stream():
    rng.seed_all(Purpose.TRAINING, 3, 0)
    first = draw()
    rng.seed_all(Purpose.TRAINING, 3, 0)
    assert draw() == first
    rng.seed_all(Purpose.TRAINING, 3, 1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_state_is_restored_exactly_through_a_file():
    rng.seed_all(5)
    draw()
    np.random.randn()  # numpy and random now hold the second half of a pair, which is state too
    assert random.getstate()[2] is not None
    assert np.random.get_state()[3] == 1
    file = io.BytesIO()
    torch.save(rng.get_state(CPU).plain(), file)
    expected = draw() + draw()
    rng.seed_all(6)
    file.seek(0)
    rng.set_state(rng.Streams.from_plain(torch.load(file, weights_only=True)), CPU)
    assert draw() + draw() == expected


def test_two_ranks_that_take_turns_draw_as_each_alone():
    """Of NumPy, whatever each draws in its turn: nothing, words, or one of a pair of normal numbers."""
    draws = [lambda: None, np.random.randint, np.random.randn, np.random.rand, lambda: np.random.rand(700)[-1]]
    choices = random.Random(0)
    turns = [[[choices.randrange(len(draws)) for _ in range(choices.randrange(4))] for _ in range(100)] for _ in "ab"]

    def drawn(turn):
        return [np.random.randint(9) if draw == 1 else draws[draw]() for draw in turn]

    before = np.random.get_bit_generator()
    try:
        alone = []
        for of_rank, number in zip(turns, (1, 2), strict=True):
            np.random.set_bit_generator(np.random.MT19937(number))
            alone.append([drawn(turn) for turn in of_rank])
        states = []
        for number in (1, 2):
            np.random.set_bit_generator(np.random.MT19937(number))
            states.append(rng.get_state(CPU))
        found = [[], []]
        for turn in range(100):
            for rank in (0, 1):
                rng.set_state(states[rank], CPU)
                found[rank].append(drawn(turns[rank][turn]))
                states[rank] = rng.get_state(CPU)
        assert found == alone
    finally:
        np.random.set_bit_generator(before)


def test_state_of_a_rank_with_several_devices_is_that_of_each():
    devices = [torch.device("cuda", index) for index in range(3)]
    streams = {device: torch.full((4,), device.index, dtype=torch.uint8) for device in devices}
    restored = {}
    with (
        mock.patch("torch.cuda.get_rng_state", streams.__getitem__),
        mock.patch("torch.cuda.set_rng_state", lambda state, device: restored.update({device: state})),
    ):
        rng.set_state(rng.get_state(*devices), *devices)
    assert {device: state.tolist() for device, state in restored.items()} == {d: [d.index] * 4 for d in devices}
