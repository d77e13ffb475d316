"""Shard rules: complete, disjoint, equal in steps, and exact across a change of world size within an epoch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data import row_order
from harness.data.row_order import hashed, permutation
from harness.data.shards import (
    RULES,
    Segment,
    bounds,
    num_rows_in_step,
    num_rows_used,
    num_steps,
    shard,
)
from harness.errors import ConfigError
from tests.conftest import ROOT

rules = st.sampled_from(RULES)
sizes = st.integers(1, 400)
worlds = st.integers(1, 9)


@given(rules, sizes, worlds, st.integers(0, 3), st.integers(0, 5))
def test_shards_cover_every_row_once(rule, num_rows, world, epoch, seed):
    shards = [np.asarray(shard(rule, num_rows, rank, world, epoch, seed)) for rank in range(world)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(num_rows))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(rules, sizes, worlds, st.integers(1, 20))
def test_step_counts_cover_all_rows(rule, num_rows, world, per_rank):
    lengths = [len(shard(rule, num_rows, rank, world, 0, 0)) for rank in range(world)]
    steps = num_steps(num_rows, world, per_rank)
    assert steps * per_rank >= max(lengths) > (steps - 1) * per_rank
    for step in range(steps + 1):
        rows = sum(min(max(length - step * per_rank, 0), per_rank) for length in lengths)
        assert num_rows_in_step(num_rows, world, per_rank, step) == rows
    dropped = num_steps(num_rows, world, per_rank, tail="drop")
    assert dropped * per_rank <= min(lengths)
    assert all(num_rows_in_step(num_rows, world, per_rank, step) == world * per_rank for step in range(dropped))


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
    uninterrupted = np.asarray(shard("global", 100, 0, 1, 0, 0))
    done = Segment(num_ranks=4, per_rank=3, steps=3)
    rest = [shard("global", 100, rank, 2, 0, 0, [done]) for rank in range(2)]
    for step in range(num_steps(64, 2, 6)):
        rows = np.concatenate([r[step * 6 : (step + 1) * 6] for r in rest])
        start = 36 + step * 12
        assert sorted(rows.tolist()) == sorted(uninterrupted[start : start + 12].tolist())


@pytest.mark.parametrize("rule", RULES)
def test_order_depends_on_epoch_and_seed(rule):
    first = shard(rule, 50, 1, 2, 0, 0)[:]
    assert (first == shard(rule, 50, 1, 2, 0, 0)[:]).all()
    assert (first != shard(rule, 50, 1, 2, 1, 0)[:]).any()
    assert (first != shard(rule, 50, 1, 2, 0, 1)[:]).any()


def test_ranks_shuffle_their_shards_differently():
    """Neighbours in the file would otherwise always meet in one step."""
    first, second = (np.asarray(shard("contiguous", 200, rank, 2, 0, 0)) for rank in range(2))
    assert not np.array_equal(first, second - 100)
    first, second = (np.asarray(shard("strided", 200, rank, 2, 0, 0)) for rank in range(2))
    assert not np.array_equal(first, second - 1)


def test_contiguous_shard_is_a_block():
    assert set(shard("contiguous", 10, 1, 3, 0, 0)[:].tolist()) == {3, 4, 5}


def test_unknown_rule_and_tail():
    with pytest.raises(ConfigError, match="striped"):
        shard("striped", 10, 0, 1, 0, 0)
    with pytest.raises(ConfigError, match="leave"):
        num_steps(10, 1, 2, "leave")


@given(
    rules, st.integers(1, 3000), st.lists(st.tuples(worlds, st.integers(1, 40), st.integers(1, 30)), max_size=3), worlds
)
def test_no_row_is_lost_or_repeated_when_the_world_size_changes(rule, num_rows, changes, world):
    segments, used, left = [], [], num_rows
    for size, per_rank, steps in changes:
        for rank in range(size):
            used.append(shard(rule, num_rows, rank, size, 1, 2, segments)[: steps * per_rank])
        segments.append(Segment(size, per_rank, steps))
        left -= num_rows_used(left, segments[-1])
        assert sum(map(len, used)) == num_rows - left
    rest = [shard(rule, num_rows, rank, world, 1, 2, segments)[:] for rank in range(world)]
    assert sorted(np.concatenate([*used, *rest]).tolist()) == list(range(num_rows))


def test_every_small_permutation_has_each_value_once():
    """Without the table that is used for them, which numpy shuffles."""
    for num in [*range(1, 1100), 4097, 65_537, 262_145]:
        assert (np.sort(permutation(num, (num,), small=0)(np.arange(num))) == np.arange(num)).all(), num


@pytest.mark.parametrize("num", [1000, 4500, 16_385])
def test_large_permutations_are_as_random_as_numpys(num):
    """Over 200 keys, four statistics that are normally distributed for random permutations: within 5 deviations."""
    index, keys = np.arange(num), range(200)
    found = [permutation(num, (7, key), small=0)(index) for key in keys]
    correlation = [np.corrcoef(index, values)[0, 1] * np.sqrt(num) for values in found]
    assert abs(np.mean(correlation)) * np.sqrt(len(keys)) < 5  # of positions and values: mean 0, variance 1
    assert abs(np.var(correlation) - 1) < 5 * np.sqrt(2 / len(keys))
    neighbours = [(np.abs(np.diff(values)) == 1).sum() for values in found]  # Poisson with mean 2
    assert abs(np.mean(neighbours) - 2) < 5 * np.sqrt(2 / len(keys))
    # Values of one of ten sorted classes in batches of 100: hypergeometric.
    classes = np.concatenate([values[: num // 100 * 100].reshape(-1, 100) * 10 // num == 3 for values in found])
    variance = 100 * 0.1 * 0.9 * (num - 100) / (num - 1)
    assert abs(np.var(classes.sum(1)) - variance) < 5 * variance * np.sqrt(2 / len(classes))
    # Where each tenth of the values goes: chi squared with 81 degrees of freedom.
    places = sum(np.histogram2d(index, values, 10)[0] for values in found) / (len(keys) * num / 100)
    assert abs(((places - 1) ** 2).sum() * len(keys) * num / 100 - 81) < 5 * np.sqrt(2 * 81)


PLAN = """
import resource, sys, time
import numpy as np
from harness.data.shards import Segment, bounds, shard
from harness.training.rows.coverage import Coverage

rows, world = 10**9, 1024
warm = shard("global", 10**5, 0, 1, 0, 0)[:]  # numpy's own memory
for rule in ("global", "contiguous", "strided"):
    for rank in (0, 511, 1023):
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (50 << 20), resource.RLIM_INFINITY))
        plan, coverage, count = shard(rule, rows, rank, world, 3, 1), Coverage(rows), 0
        for start in range(0, len(plan), 4096):
            part = plan[start : start + 4096]
            coverage.add(part)
            count += len(part)
        assert count == len(plan) in (976562, 976563), count
        start, stop = bounds(rows, rank, world)
        assert rule != "contiguous" or (start <= part.min() and part.max() < stop)
        left = shard(rule, rows, rank % 8, 8, 3, 1, [Segment(world, 64, 10000)])
        assert len(left[:10000]) == 10000
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_rank_of_a_thousand_plans_a_billion_rows_in_50_mib():
    done = subprocess.run([sys.executable, "-c", PLAN], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_hash_is_that_of_splitmix64():
    """The first three numbers of the published generator with seed 1234567, whose state grows by the golden ratio."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.array([1234567], np.uint64) + golden * np.arange(3, dtype=np.uint64)
    assert hashed(states, golden).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_an_order_is_a_sampler(monkeypatch):
    monkeypatch.setattr(row_order, "_CHUNK", 7)
    order = shard("global", 40, 1, 2, 3, 0)
    assert [*order] == np.asarray(order).tolist()
    assert len({*order}) == len(order) == 20


def test_rows_that_are_handed_out_may_be_changed():
    rows = shard("global", 100, 0, 2, 0, 0)
    before = rows[0:10]
    before[:] = 0
    assert list(rows[0:10]) == list(rows)[:10] != [0] * 10
