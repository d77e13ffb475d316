"""Shard rules: complete, disjoint, equal in steps, and exact across a change of world size within an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data.shards import RULES, Segment, bounds, num_steps, shard, step_rows

rules = st.sampled_from(RULES)
sizes = st.integers(1, 400)
worlds = st.integers(1, 9)


@given(rules, sizes, worlds, st.integers(0, 3), st.integers(0, 5))
def test_shards_cover_every_row_once(rule, num_rows, world, epoch, seed):
    shards = [shard(rule, num_rows, rank, world, epoch, seed) for rank in range(world)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(num_rows))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(rules, sizes, worlds, st.integers(1, 20))
def test_step_counts_cover_all_rows(rule, num_rows, world, per_rank):
    lengths = [len(shard(rule, num_rows, rank, world, 0, 0)) for rank in range(world)]
    steps = num_steps(num_rows, world, per_rank)
    assert steps * per_rank >= max(lengths) > (steps - 1) * per_rank
    for step in range(steps + 1):
        rows = sum(min(max(length - step * per_rank, 0), per_rank) for length in lengths)
        assert step_rows(num_rows, world, per_rank, step) == rows
    dropped = num_steps(num_rows, world, per_rank, tail="drop")
    assert dropped * per_rank <= min(lengths)
    assert all(step_rows(num_rows, world, per_rank, step) == world * per_rank for step in range(dropped))


@given(st.integers(1, 10**12), st.integers(1, 5000), st.data())
def test_bounds_equal_the_recipe(num_rows, world, data):
    rank = data.draw(st.integers(0, world - 1))
    assert bounds(num_rows, rank, world) == (int(rank * num_rows / world), int((rank + 1) * num_rows / world))


@given(st.integers(1, 300), st.integers(0, 4), st.integers(1, 6))
def test_global_batches_do_not_depend_on_world_size(num_rows, epoch, quarter):
    batch = 4 * quarter

    def global_batches(world):
        shards = [shard("global", num_rows, rank, world, epoch, 7) for rank in range(world)]
        per_rank = batch // world
        return [
            sorted(row for rows in shards for row in rows[step * per_rank : (step + 1) * per_rank].tolist())
            for step in range(num_steps(num_rows, world, per_rank))
        ]

    assert global_batches(1) == global_batches(2) == global_batches(4)


def test_global_batches_continue_at_another_world_size():
    """Resuming on 2 ranks after 3 steps on 4 ranks changes no batch, with a global batch of 12."""
    uninterrupted = shard("global", 100, 0, 1, 0, 0)
    done = Segment(world_size=4, per_rank=3, steps=3)
    rest = [shard("global", 100, rank, 2, 0, 0, [done]) for rank in range(2)]
    for step in range(num_steps(64, 2, 6)):
        rows = np.concatenate([r[step * 6 : (step + 1) * 6] for r in rest])
        start = 36 + step * 12
        assert sorted(rows.tolist()) == sorted(uninterrupted[start : start + 12].tolist())


@pytest.mark.parametrize("rule", RULES)
def test_order_depends_on_epoch_and_seed(rule):
    first = shard(rule, 50, 1, 2, 0, 0)
    assert (first == shard(rule, 50, 1, 2, 0, 0)).all()
    assert (first != shard(rule, 50, 1, 2, 1, 0)).any()
    assert (first != shard(rule, 50, 1, 2, 0, 1)).any()


def test_contiguous_shard_is_a_block():
    assert set(shard("contiguous", 10, 1, 3, 0, 0).tolist()) == {3, 4, 5}


def test_unknown_rule():
    with pytest.raises(ValueError, match="striped"):
        shard("striped", 10, 0, 1, 0, 0)
