"""The rows of a rank: equal steps, exact weights, any position, and each evaluation row once."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.batch import Batch
from harness.data.loader import Loader
from harness.data.rank_data import EvalData, TrainData
from harness.data.shards import RULES, Segment
from tests.fixtures import CountingTable

CPU = torch.device("cpu")


def data(
    num_rows, rank=0, world=1, per_rank=4, accumulate=1, rule="contiguous", tail="use", workers=0, seed=3, **table
):
    loader = Loader(CountingTable(num_rows, **table), workers, CPU)
    return TrainData(loader, rule, range(rank, rank + 1), world, per_rank, accumulate, seed, tail)


def contents(groups) -> list:
    """[[(rows, marks, weight) of a micro-batch] of a step]."""
    return [
        [
            (m.batch.rows[: m.num_rows].tolist(), m.batch.inputs[: m.num_rows, 1].tolist(), m.weight)
            for m in group
            if m.num_rows
        ]
        for group in groups
    ]


shapes = st.tuples(
    st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from(RULES), st.booleans()
).filter(lambda shape: shape[0] >= shape[1])


@settings(max_examples=60)
@given(shapes)
def test_ranks_take_equal_steps_and_weighted_losses_are_exact(shape):
    num_rows, world, micro, accumulate, rule, drop = shape
    per_rank, tail = micro * accumulate, "drop" if drop else "use"
    ranks = [data(num_rows, rank, world, per_rank, accumulate, rule, tail) for rank in range(world)]
    groups = [list(rank.groups(2, [])) for rank in ranks]
    steps = ranks[0].steps_per_epoch()
    assert [len(rank) for rank in groups] == [steps] * world
    used = []
    for step in range(steps):
        parts = [rank[step] for rank in groups]
        assert len({len(group) for group in parts}) == 1, "ranks run different numbers of backward passes"
        assert 1 <= len(parts[0]) <= accumulate
        rows = np.concatenate([m.batch.rows[: m.num_rows] for group in parts for m in group])
        # As in the loop: the mean of each micro-batch times its weight, summed, then averaged over ranks.
        mean = sum(m.weight * m.batch.rows.mean() for group in parts for m in group) / world
        assert mean == pytest.approx(rows.mean())
        assert all(m.num_rows <= micro for group in parts for m in group)
        used += rows.tolist()
    assert len(set(used)) == len(used)
    if tail == "use":
        assert sorted(used) == list(range(num_rows))
    else:
        assert len(used) == steps * per_rank * world


@settings(max_examples=60)
@given(shapes)
def test_single_row_is_repeated_only_if_batch_norm_sees_no_other(shape):
    """With batch norm over all ranks, rows of other ranks in the same micro-batch count too."""
    num_rows, world, micro, accumulate, rule, drop = shape
    for spans in (False, True):
        ranks = [
            replace(
                data(num_rows, rank, world, micro * accumulate, accumulate, rule, "drop" if drop else "use"),
                batch_norm_spans_ranks=spans,
            )
            for rank in range(world)
        ]
        for step in zip(*(rank.groups(2, []) for rank in ranks), strict=True):
            for parts in zip(*step, strict=True):  # the same micro-batch of every rank
                total = sum(part.num_rows for part in parts)
                for part in parts:
                    alone = total == 1 if spans else True
                    assert len(part.batch) == (2 if alone and part.num_rows < 2 else max(part.num_rows, 1))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_at_any_position_continues_the_same_order(workers):
    train = data(23, rank=1, world=2, per_rank=4, accumulate=2, workers=workers)
    try:
        uninterrupted = contents(train.groups(1, []))
        contents(train.groups(2, []))
        segments: list[Segment] = []
        for position in range(train.steps_per_epoch()):
            assert contents(train.groups(1, copy.deepcopy(segments))) == uninterrupted[position:]
            assert train.steps_left(segments) == train.steps_per_epoch() - position
            train.advance(segments)
        assert segments == [Segment(2, 4, train.steps_per_epoch())]
        assert train.steps_left(segments) == 0
        assert contents(train.groups(1, segments)) == []
        reference = contents(data(23, rank=1, world=2, per_rank=4, accumulate=2).groups(1, []))
        assert uninterrupted == reference
        assert contents(train.groups(2, [])) != uninterrupted
    finally:
        train.loader.close()


@settings(max_examples=60)
@given(
    st.integers(4, 60), st.sampled_from(RULES), st.booleans(),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
)  # fmt: skip
def test_changes_of_world_size_within_an_epoch_cover_each_row_once(num_rows, rule, drop, starts):
    """Each start has (ranks, rows per rank, steps); the last one trains to the end."""
    segments: list[Segment] = []
    used: list[int] = []
    tail = "drop" if drop else "use"
    for number, (world, per_rank, steps) in enumerate(starts):
        ranks = [data(num_rows, rank, world, per_rank, rule=rule, tail=tail) for rank in range(world)]
        left = ranks[0].steps_left(segments)
        take = left if number == len(starts) - 1 else min(steps, left)
        groups = [list(rank.groups(0, copy.deepcopy(segments))) for rank in ranks]
        assert {len(rank) for rank in groups} == {left}
        for step in range(take):
            used += [row for rank in groups for m in rank[step] for row in m.batch.rows[: m.num_rows].tolist()]
            ranks[0].advance(segments)
    assert len(set(used)) == len(used)
    if not drop:
        assert sorted(used) == list(range(num_rows))


class NotLoaded:
    """A loader whose batches have only their rows."""

    def __init__(self, num_rows: int) -> None:
        self.dataset = range(num_rows)

    def fetch(self, requests):
        return (Batch(torch.empty(0), torch.empty(0), request.rows) for request in requests)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_with_equally_many_rows_the_weight_is_exactly_one(world):
    for size in range(1, 513):
        train = TrainData(NotLoaded(size * world), "contiguous", range(1), world, size, 1, 3)
        assert [micro.weight for (micro,) in train.groups(0, [])] == [1.0], size


def test_abandoned_epoch_does_not_affect_the_next():
    train = data(40, workers=2)
    try:
        groups = train.groups(0, [])
        first = contents([next(groups), next(groups)])
        del groups
        assert contents(train.groups(0, []))[:2] == first
        again = contents(train.groups(1, []))
        assert again == contents(data(40).groups(1, []))
    finally:
        train.loader.close()


# Evaluation


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 17])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_counts_each_row_once(world, num_rows, batch_size):
    seen, most = [], 0
    for rank in range(world):
        eval_data = EvalData(Loader(CountingTable(num_rows), 0, CPU), range(rank, rank + 1), world, batch_size)
        turns = list(itertools.islice(eval_data.turns(), eval_data.num_turns()))
        batches = [batch for own, batch in turns if batch is not None and own == rank]
        assert all(len(batch) <= batch_size for batch in batches)
        most = max(most, len(batches))
        seen += [row for batch in batches for row in batch.rows.tolist()]
    assert sorted(seen) == list(range(num_rows))
    assert eval_data.num_turns() == most


def test_evaluation_is_not_augmented():
    eval_data = EvalData(Loader(CountingTable(4), 0, CPU), range(1), 1, 4)
    first, second = (next(eval_data.turns())[1].inputs for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, CountingTable(4).batch(np.arange(4), 0).inputs)
