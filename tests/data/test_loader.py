"""Batches from any number of workers, their times and unchanged errors."""

from __future__ import annotations

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
from torch.utils.data._utils import signal_handling

from harness.data import loader as module
from harness.data.batch import Batch
from harness.data.loader import BatchRequest, Loader, StoppedWaiting
from harness.data.rank_data import EvalData, TrainData
from harness.errors import DataError, TrainingError, WorkerKilled
from tests.data.test_rank_data import CPU, data
from tests.end_to_end.processes import wait_until
from tests.fixtures import CountingTable


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
