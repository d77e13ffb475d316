"""Batches of a rank: equal steps, exact weights, any position, any number of workers, and unchanged errors."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data._utils import signal_handling

from harness.data import loader as module
from harness.data.batch import Batch
from harness.data.loader import BatchRequest, EvalData, Loader, StoppedWaiting, TrainData
from harness.data.shards import RULES, Segment
from harness.errors import DataError, TrainingError, WorkerKilled
from tests.end_to_end.processes import wait_until
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


class Changing:
    """Four rows of images; from row 2 on, ``change`` is applied to the inputs."""

    def __init__(self, change) -> None:
        self.change = change

    def __len__(self) -> int:
        return 4

    def batch(self, rows, epoch):
        inputs = torch.zeros(len(rows), 1, 8, 8)
        return Batch(self.change(inputs) if rows[0] >= 2 else inputs, torch.zeros(len(rows), dtype=torch.int64), rows)


@pytest.mark.parametrize(
    ("change", "number", "words"),
    [(torch.Tensor.double, 1, ["torch.float64", "torch.float32"]), (lambda x: x, 0, []),
     (lambda x: x[..., 1:], 1, ["(1, 8, 7)", "(1, 8, 8)"]), (lambda x: x.flatten(2), 1, ["2 dimensions"])],
    ids=["float64", "equal", "narrower", "flat"],
)  # fmt: skip
def test_a_batch_of_another_kind_is_noticed_once(caplog, change, number, words):
    loader = Loader(Changing(change), 0, CPU)
    list(loader.fetch(BatchRequest(np.array([row]), 0) for row in range(4)))
    assert len(caplog.records) == number
    assert all(word in caplog.text for word in words)


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_float64_from_the_first_batch_on_is_noticed_once(caplog, what):
    class Doubles(CountingTable):
        def batch(self, rows, epoch):
            batch = super().batch(rows, epoch)
            return replace(batch, **{what: getattr(batch, what).double()})

    module._warn_of_float64.cache_clear()
    for _ in range(2):  # the training and the evaluation rows
        list(Loader(Doubles(4), 0, CPU).fetch(BatchRequest(np.array([row]), None) for row in range(4)))
    assert [record.message for record in caplog.records] == [caplog.records[0].message]
    assert caplog.records[0].message.startswith(f"the dataset returns {what} of torch.float64")


def test_each_batch_is_read_within_its_limit():
    within = []

    @contextmanager
    def reading(what):
        within.append(what)
        yield
        within.append("end")

    loader = Loader(CountingTable(4), 0, CPU, reading=reading)
    assert len(list(loader.fetch(BatchRequest(np.array([row]), 0) for row in range(2)))) == 2
    assert within == ["reading a batch of the dataset", "end"] * 3  # the third finds no more


def test_texts_of_other_lengths_are_usual(caplog):
    loader = Loader(Changing(lambda x: x), 0, CPU)
    for length in (3, 5):
        loader._notice_kind(Batch(torch.zeros(1, length, dtype=torch.int64), torch.zeros(1), np.zeros(1, np.int64)))
    assert not caplog.records


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


def test_loading_does_not_advance_the_training_stream():
    for workers in (0, 1):
        train = data(8, workers=workers)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        list(train.groups(0, []))
        assert torch.equal(torch.get_rng_state(), before)
        train.loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_a_worker_is_raised_unchanged(workers):
    train = data(12, workers=workers, fail_at=5)
    try:
        with pytest.raises(DataError) as caught:
            list(train.groups(0, []))
        error = caught.value
        assert str(error) == "train.csv:7: image not found: x.png\n  -> restore it"
        assert error.__cause__ is None
    finally:
        train.loader.close()


class TwoArguments(Exception):
    def __init__(self, place, reason):
        super().__init__(f"{place}: {reason}")


class OwnError(DataError):
    def __init__(self, image):
        super().__init__(f"{image} is odd", where="odd.csv", hint="turn it")


class Odd(CountingTable):
    """At row 5 it does what ``how`` names."""

    def __init__(self, how):
        super().__init__(12)
        self.how = how

    def batch(self, rows, epoch):
        batch = super().batch(rows, epoch)
        if 5 in rows:
            getattr(self, self.how)(batch)
        return batch

    def other_arguments(self, batch):
        raise TwoArguments("x.png", "odd")

    def other_arguments_of_an_own_error(self, batch):
        raise OwnError("x.png")

    def local_class(self, batch):
        class Local(Exception):
            pass

        raise Local("odd")

    def not_picklable(self, batch):
        batch.bad.append(lambda: None)

    def killed(self, batch):
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(self, batch):
        os._exit(3)

    def exits_quietly(self, batch):
        os._exit(0)

    def sys_exits(self, batch):
        sys.exit("enough")

    def stops(self, batch):
        raise StopIteration

    def reaches_the_end(self, batch):
        raise EOFError("a file ends early")

    def blocks(self, batch):
        time.sleep(600)  # the test's own limit is shorter


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("other_arguments", RuntimeError, "TwoArguments: x.png: odd"),
        ("other_arguments_of_an_own_error", DataError, "odd.csv: x.png is odd\n  -> turn it"),
        ("local_class", RuntimeError, "Local: odd"),
        ("not_picklable", RuntimeError, "a batch of the dataset cannot be sent to the rank: Can't "),
        ("killed", WorkerKilled, "was killed by SIGKILL: sent by the OOM killer, a user or a scheduler"),
        ("exits_quietly", TrainingError, "exited with exit code 0: the dataset, or a library that it uses, ended the"),
        ("sys_exits", TrainingError, "the dataset raised SystemExit (enough) in a loader worker"),
        ("exits", TrainingError, "exited with exit code 3: the dataset, or a library that it uses, ended the process"),
        ("blocks", TrainingError, "the loader workers delivered no batch for 1.5 s (runtime.timeout_s)"),
    ],
)
def test_failure_of_a_worker_is_named(how, kind, text):
    """Torch drops what a worker cannot pickle, and would wait for it for ever."""
    loader = Loader(Odd(how), 1, CPU, timeout_s=1.5 if how == "blocks" else 250)
    try:
        with pytest.raises((kind, TwoArguments)) as caught:
            list(TrainData(loader, "contiguous", range(1), 1, 4, 1, 0).groups(0, []))
    finally:
        loader.close()
    if type(caught.value).__name__ == "TwoArguments":  # tblib, a dependency of dask, makes it picklable
        text = text.removeprefix("TwoArguments: ")
    else:
        assert type(caught.value) is kind
    assert text in str(caught.value)
    assert multiprocessing.active_children() == []
    if kind is RuntimeError:
        assert "Traceback" in str(caught.value.__cause__), "the worker's"


def test_end_of_file_without_workers_is_the_error_of_the_dataset():
    with pytest.raises(EOFError, match="a file ends early"):
        list(TrainData(Loader(Odd("reaches_the_end"), 0, CPU), "contiguous", range(1), 1, 4, 1, 0).groups(0, []))


def test_dataset_that_raises_stop_iteration_does_not_end_the_epoch():
    with pytest.raises(RuntimeError, match="the dataset raised StopIteration"):
        list(TrainData(Loader(Odd("stops"), 0, CPU), "contiguous", range(1), 1, 4, 1, 0).groups(0, []))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_all_processes_does_not_end_a_worker_that_starts(monkeypatch, number):
    """It arrives after torch has set the worker's handlers, and before in_loader_worker."""
    set_handlers = signal_handling._set_worker_signal_handlers

    def signalled():
        set_handlers()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", signalled)
    train = data(12, workers=1)
    try:
        assert len(list(train.groups(0, []))) == 3
    finally:
        train.loader.close()


def test_wait_for_workers_can_be_ended():
    asked = []
    loader = Loader(Odd("blocks"), 1, CPU, leave=lambda: asked.append(None) is None)
    data = TrainData(loader, "contiguous", range(1), 1, 4, 1, 0)
    try:
        assert len(list(data.groups(0, []))) < 3
        with pytest.raises(StoppedWaiting):
            list(EvalData(loader, range(1), 1, 4).turns())  # one of the batches blocks
    finally:
        loader.close()
    assert asked


def test_waiting_time_is_measured():
    class Slow(CountingTable):
        def batch(self, rows, epoch):
            time.sleep(0.05)
            return super().batch(rows, epoch)

    loader = Loader(Slow(8), 0, CPU)
    begin = time.perf_counter()
    list(TrainData(loader, "contiguous", range(1), 1, 4, 1, 0).groups(0, []))
    assert 0.1 <= loader.wait_s <= time.perf_counter() - begin


def test_only_known_stages_of_a_dataset_are_kept():
    class Timed(CountingTable):
        def batch(self, rows, epoch):
            return replace(super().batch(rows, epoch), spent_s={"read": 2.0, "of a user's own": 1.0})

    loader = Loader(Timed(4), 0, CPU)
    list(TrainData(loader, "contiguous", range(1), 1, 4, 1, 0).groups(0, []))
    assert loader.spent_s.keys() == {"read", "load", "cpu"}


def test_close_ends_the_workers():
    train = data(8, workers=2)
    list(train.groups(0, []))
    assert len(multiprocessing.active_children()) >= 2
    train.loader.close()
    wait_until(lambda: not multiprocessing.active_children(), 60, "the workers end")
    train.loader.close()  # a second call does nothing
    data(4).loader.close()


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


def test_a_temporary_folder_with_a_long_path(tmp_path, monkeypatch):
    """Workers send batches through sockets in it, whose names are limited."""
    folder = tmp_path / ("t" * 140)
    folder.mkdir()
    monkeypatch.setattr(util, "get_temp_dir", lambda: str(folder))
    loader = Loader(CountingTable(8), 1, CPU)
    with pytest.raises(TrainingError, match="cannot be sent to the rank: AF_UNIX") as caught:
        list(loader.fetch([BatchRequest(np.arange(4), 0)]))
    loader.close()
    assert "export TMPDIR=/tmp" in caught.value.hint


def test_what_opens_no_file():
    """A dataset of torch's may hold one of the user's own, which opens its file at the first use."""
    inner = CountingTable(4)
    for part in (1, [np.ones(1)], {"a": torch.ones(2)}, random.Random(), None):
        assert module._opens_no_file(part), part
    for part in (inner, [inner], {"a": inner}, torch.utils.data.Subset(inner, [0]), sys.stdout):
        assert not module._opens_no_file(part), part
