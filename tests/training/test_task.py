"""The interface of a task: what a module of the user's must have, and how its faults are reported."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from harness import cli
from harness.apex import amp
from harness.config import loader
from harness.config.schema import ModelSection, TaskSection, TrainSection
from harness.config.targets import LabelledTask
from harness.data.batch import Batch, read
from harness.distributed.runtime import Runtime
from harness.errors import EXIT_OWN_CODE, ConfigError, DataError, HarnessError, OwnCodeError
from harness.inference import predict
from harness.training import build, loop
from harness.training.check import preflight
from harness.training.evaluation import evaluate, task_checks
from harness.training.evaluation.task_checks import doubt_of_mean
from harness.training.rows.opening import open_data
from harness.training.run import Run
from harness.training.run_start import RunStart
from harness.training.task import (
    Arrays,
    BaseTask,
    Classification,
    Sums,
    Supervised,
    row_seed,
    wrong_return,
)
from tests.ranks import run_ranks

HERE = "tests/training/test_task.py"


class Task(TaskSection):
    """Learn y = 2x, with a fault."""

    fault: str = ""

    @property
    def metrics(self):
        return super().metrics | ({"rare": "max"} if self.fault == "rare" else {})

    def open(self, seed: int, cache_dir: Path | None) -> object:
        return Line(self.fault)


class Unsized:
    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        raise NotImplementedError


class Tuples:
    def __len__(self) -> int:
        return 10

    def batch(self, rows: np.ndarray, epoch: int | None) -> object:
        return torch.ones(len(rows), 1), torch.ones(len(rows), 1)


class FewRows(Arrays):
    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        batch = super().batch(rows, epoch)
        return Batch(batch.inputs[1:], batch.targets[1:], rows)


class DropsARow(Arrays):
    bad: tuple[int, ...] = ()

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        batch = super().batch(rows, epoch)
        return Batch(batch.inputs[1:], batch.targets[1:], rows[1:], [*self.bad])


class Draws(Arrays):
    epochs: ClassVar = ()

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        batch = super().batch(rows, epoch)
        return replace(batch, inputs=batch.inputs + torch.rand(1)) if epoch in self.epochs else batch


class Numpy(Arrays):
    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        batch = super().batch(rows, epoch)
        return Batch(batch.inputs.numpy(), batch.targets, batch.rows)


class Counts(nn.Module):
    """Has buffers that change in every pass: one in place, one by another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, inputs):
        self.passes += 1
        self.last = inputs[:1, 0].clone()
        return inputs


class Twice(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, inputs):
        return inputs, super().forward(inputs)


class Line(BaseTask):
    num_outputs = 1

    def __init__(self, fault: str) -> None:
        x = np.linspace(-1, 1, 10, dtype=np.float64 if fault == "float64" else np.float32)[:, None]
        self.fault, self.evaluations = fault, 0
        self.train = Arrays(x, 2 * x)
        if fault.startswith("tuples"):
            self.train = Tuples()
            if "fingerprint" in fault:
                self.fingerprint = "of tuples"
        if fault == "few rows of a batch":
            self.train, self.fingerprint = FewRows(x, 2 * x), "of few rows"
        if fault == "a row less":
            self.train, self.fingerprint = DropsARow(x, 2 * x), "of a row less"
        if fault == "numpy":
            self.train, self.fingerprint = Numpy(x, 2 * x), "of NumPy"
        if fault == "draws in batch()":
            self.train, self.fingerprint = Draws(x, 2 * x), "of draws"
        if "own dataset" in fault:
            self.train = Doubled(x)
        self.eval = {"no __len__": Unsized(), "no method": object()}.get(fault, self.train)

    def model(self, section):
        if self.fault == "two outputs":
            return Twice()
        return nn.Sequential(Counts(), nn.Dropout(0.5), nn.Linear(1, 1)) if self.fault == "draws" else nn.Linear(1, 1)

    def loss(self, outputs, targets):
        if self.fault == "two outputs":
            outputs = outputs[1]
        errors = (outputs - targets).square()
        wrong = {"rows": errors[:, 0], "float": errors.mean().item(), "detached": errors.detach().mean(),
                 "nan": errors.mean() * torch.nan, "sum": errors.sum()}  # fmt: skip
        if self.fault == "pairs":
            return (outputs - targets[:, 0]).square().mean()
        if self.fault == "random":
            return errors.mean() * torch.rand(())
        if self.fault == "broadcast":
            return nn.functional.mse_loss(outputs, targets[:, 0])
        return wrong.get(self.fault, errors.mean())

    def evaluate(self, outputs, targets):
        if self.fault == "draws":
            random.random(), np.random.normal(), torch.rand(1)
            self.evaluations += 1
            assert self.evaluations <= 2  # of 10 rows, 6 at a time
        if self.fault in ("raises", "raises, own dataset") or (
            self.fault == "raises on rank 1" and os.environ["RANK"] == "1"
        ):
            raise KeyError("height")
        if self.fault == "rows":
            return super().evaluate(outputs, targets)
        if self.fault == "two outputs":
            outputs = outputs[1]
        errors = (outputs - targets).square()
        right = {"loss": (errors.sum(), torch.tensor(len(errors)))}
        wrong = {"a number": errors.sum(), "numbers": {"loss": (1.0, 2)}, "unsummed": {"loss": (errors, errors)},
                 "vector": {"loss": (errors[:, 0], len(errors))},
                 "mean": {"loss": (errors.mean(), len(errors))}}  # fmt: skip
        if self.fault == "rare" and len(errors) < 6:  # not in the first batch
            right["rare"] = errors.sum(), len(errors)
        return wrong.get(self.fault, right)

    def predictions(self, outputs):
        return {"prediction": [1, 2]} if self.fault == "predictions" else {}

    def report(self, sums):
        if self.fault in ("vector", "few rows", "rare"):
            assert self.fault != "few rows", "too few rows"
            return super().report(sums)
        wrong = {"misspelled": {"los": 1.0}, "text": {"loss": "low"}, "no return": None}
        return wrong.get(self.fault, {"loss": sums.pairs["loss"][0].sum().item()})


def configured(folder: Path, fault: str) -> str:
    tree = {
        "name": "line", "task": {"name": "tests.training.test_task", "fault": fault}, "output": str(folder / "runs"),
        "data": {"num_workers": 2 * ("own dataset" in fault)}, "model": {"name": "linear"},
        "batch": {"global": 4, "eval_per_rank": 6},
        "optimizer": {"name": "sgd", "lr": 0.1}, "train": {"epochs": 1, "deterministic": False},
        "precision": {"opt_level": "O0"}, "runtime": {"device": "cpu"},
    }  # fmt: skip
    (folder / "line.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "line.yaml")


def checked(folder: Path, fault: str, *settings: str) -> list[HarnessError]:
    return preflight.examine(configured(folder, fault), settings, 1).errors


def train(folder: Path, fault: str) -> Run:
    amp.reset()
    try:
        with RunStart(loader.load(configured(folder, fault)), Runtime()) as run:
            loop.train(run)
            return run
    finally:
        amp.reset()


def warned(folder: Path, fault: str) -> str:
    plan = preflight.examine(configured(folder, fault), (), 1)
    assert plan.errors == []
    return plan.facts.get("warning", "")


def test_a_model_may_return_what_the_loss_takes(tmp_path):
    plan = preflight.examine(configured(tmp_path, "two outputs"), (), 1)
    assert plan.errors == []
    assert plan.facts["model"] == "Twice, 2 parameters"  # that of the task, not model.name
    run = train(tmp_path, "two outputs")
    assert json.loads((run.folder.path / "provenance.json").read_text())[-1]["model"]["name"] == "Twice"


def test_a_loss_that_is_a_sum_is_warned_of(tmp_path):
    place = f"{HERE}:{inspect.getsourcelines(Line.loss)[1]}: loss() is "
    assert warned(tmp_path, "sum").count(place) == 1
    assert "for the same rows twice, so it is a sum; return the mean" in warned(tmp_path, "sum")
    assert "so it is a sum" not in warned(tmp_path, "")


@pytest.mark.parametrize("epoch", [0, None])
def test_rows_that_differ_in_each_reading_are_warned_of(tmp_path, epoch, monkeypatch):
    """Of training rows or of validation rows only."""
    place = f"{HERE}:{inspect.getsourcelines(Draws.batch)[1]}: batch() returns other inputs"
    assert "batch() returns" not in warned(tmp_path, "draws in batch()")
    monkeypatch.setattr(Draws, "epochs", [epoch])
    assert warned(tmp_path, "draws in batch()").count(place) == 1


def test_a_metric_that_is_a_mean_is_warned_of(tmp_path):
    place = f"{HERE}:{inspect.getsourcelines(Line.evaluate)[1]}: evaluate() returns "
    assert warned(tmp_path, "mean").count(place) == 1
    assert "so it is a mean" not in warned(tmp_path, "")


def test_a_loss_that_mixes_rows_is_warned_of(tmp_path):
    """Not one that draws, nor one of the harness, which may weight classes."""
    place = f"{HERE}:{inspect.getsourcelines(Line.loss)[1]}: loss() mixes rows: it is "
    assert place in warned(tmp_path, "pairs")
    assert "mixes rows" not in warned(tmp_path, "") + warned(tmp_path, "random") + warned(tmp_path, "sum")
    section, pairs = TaskSection(name="own.task"), SimpleNamespace(loss=lambda one, other: (one - other).pow(2).mean())
    found = doubt_of_mean(section, pairs, torch.rand(4, 1), torch.rand(4))
    assert "mixes rows, perhaps by a broadcast of shapes (4, 1) and (4,): it is " in found
    weighted = SimpleNamespace(loss=nn.CrossEntropyLoss(torch.tensor([1.0, 9.0])))
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 1])
    assert "loss() mixes rows: it is " in doubt_of_mean(section, weighted, *rows)
    of_harness = type("Weighted", (Supervised,), {"objective": weighted})()
    assert doubt_of_mean(section, of_harness, *rows) == ""


def test_a_loss_of_other_shapes_is_one_warning_with_its_line(tmp_path):
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        found = warned(tmp_path, "broadcast")
    lines, first = inspect.getsourcelines(Line.loss)
    line = first + next(number for number, text in enumerate(lines) if "mse_loss" in text)
    assert re.findall(r"[\w/.]+:\d+: Using a target size", found) == [f"{HERE}:{line}: Using a target size"]
    assert not [each for each in others if "target size" in str(each.message)]


RETURNS = [
    ("rows", "Line.loss() returned a tensor of shape (4,)\n  -> return the mean over the rows"),
    ("float", "Line.loss() returned a value of type float\n"),
    ("detached", "Line.loss() returned a number without a gradient\n  -> remove .detach(), .item(), "),
    ("a number", "Line.evaluate() returned a tensor of shape ()\n  -> return {name: (sum, count)}"),
    ("numbers", "Line.evaluate() returned (float, int) for 'loss'\n"),
    ("vector", "Line.evaluate() returned a sum of shape (4,) and a count of shape () for 'loss'\n  -> add up the sum"),
    ("misspelled", "Line.report() returned no metric 'loss', only 'los'\n  -> return a dictionary with a number for"),
    ("text", "Line.report() returned 'low' for metric 'loss'\n"),
    ("no return", "Line.report() returned nothing\n"),
    ("predictions", "Line.predictions() returned 2 values of 'prediction' for 4 rows\n"),
]


@pytest.mark.parametrize(("fault", "message"), RETURNS, ids=[fault for fault, _ in RETURNS])
def test_what_a_method_must_not_return(tmp_path, fault, message):
    """Named alike by a check and by training, with the place of the method."""
    place = f"{HERE}:{inspect.getsourcelines(getattr(Line, message[5:].partition('(')[0]))[1]}: "
    (found,) = checked(tmp_path, fault)
    with pytest.raises(OwnCodeError) as caught:
        train(tmp_path, fault)
    for error in (found, caught.value):
        text = str(error).replace("(6,)", "(4,)").replace("6 rows", "4 rows")  # a batch of an evaluation has 6 rows
        assert text.startswith(place + message)
        assert error.exit_code == EXIT_OWN_CODE


def test_sums_that_depend_on_the_number_of_rows(tmp_path):
    with pytest.raises(OwnCodeError, match=r"of shape \(4, 1\) for 'loss', after one of shape \(6, 1\) for another"):
        train(tmp_path, "unsummed")


@pytest.mark.parametrize(
    "fault",
    [
        "a number",
        "numbers",
        "vector",
        "raises",
        "raises, own dataset",
        "misspelled",
        "text",
        "few rows",
        "rare",
        "sum",
        "pairs",
    ],
)
def test_faults_of_an_evaluation_are_found_before_the_first_step(tmp_path, monkeypatch, caplog, fault):
    """An error in report(), which may need more rows than a batch has, a metric that a batch has no rows of, and a loss
    that is no mean are warnings."""

    class FirstStep(Exception):
        pass

    def epoch(run):
        raise FirstStep

    monkeypatch.setattr(loop, "epoch", epoch)
    trains = fault in ("few rows", "rare", "sum", "pairs")
    with pytest.raises(FirstStep if trains else KeyError if fault.startswith("raises") else OwnCodeError):
        train(tmp_path, fault)
    assert ("for the same rows twice, so it is a sum" in caplog.text) == (fault == "sum")
    assert ("loss() mixes rows" in caplog.text) == (fault == "pairs")
    text = "report() of the task fails on the first validation batch, and perhaps on all: tests/training/test_task.py:"
    assert (text in caplog.text) == (fault == "few rows")
    assert ("the first validation batch has no metric 'rare', only 'loss'" in caplog.text) == (fault == "rare")


def test_fault_of_one_rank_before_the_first_step_ends_all(tmp_path):
    words = ["train", "-c", configured(tmp_path, "raises on rank 1"), "runtime.timeout_s=30"]
    assert run_ranks(2, cli.main, words, group=False, timeout_s=90) == [EXIT_OWN_CODE] * 2
    failure = json.loads((tmp_path / "runs" / "line" / "failure.json").read_text())
    assert (failure["rank"], failure["step"]) == (1, 0)


def test_the_look_at_an_evaluation_before_training_changes_no_bit(tmp_path, monkeypatch):
    seen = []
    for folder, look in (("with", loop.try_evaluation), ("without", lambda run: None)):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(loop, "try_evaluation", look)
        run = train(tmp_path / folder, "draws")
        seen.append((run.module.state_dict(), run.state.history, random.random(), np.random.rand(), torch.rand(1)))
    (weights, *numbers), (others, *other_numbers) = seen
    assert numbers == other_numbers
    assert all(torch.equal(weights[key], others[key]) for key in weights | others)


def test_the_look_at_an_evaluation_calls_copies_of_losses():
    """A loss may count its calls in a buffer. The data are not copied."""
    net = nn.Linear(1, 1)
    task = SimpleNamespace(train=[1], eval=[2], criterion=nn.BatchNorm1d(1), net=net)
    task.criterion.rows = task.train
    found = evaluate._copy(SimpleNamespace(task=task, module=net, parallel=SimpleNamespace(eval_model=net)))
    assert found.net is net
    found.criterion(torch.ones(3, 1))
    assert (found.criterion.num_batches_tracked, task.criterion.num_batches_tracked) == (1, 0)
    assert found.train is task.train is found.criterion.rows


def test_loss_that_is_not_finite_names_only_settings_of_the_task(tmp_path):
    (found,) = checked(tmp_path, "nan")
    assert found.message == "loss() of the task returned nan with the initial weights"
    assert found.where.startswith(HERE)
    assert found.hint == "check the inputs and labels of the first rows and loss()"


def test_float64_inputs_pass_the_check_and_train(tmp_path):
    assert checked(tmp_path, "float64") == []
    train(tmp_path, "float64")


def test_wrong_return_of_inherited_method_names_the_own_class():
    class Own(Supervised):
        pass

    error = wrong_return(Own(), "loss", "nothing", "")
    assert error.where == f"{HERE}:{inspect.getsourcelines(Own)[1]}"
    assert type(wrong_return(Supervised(), "loss", "nothing", "")) is not OwnCodeError


@pytest.mark.parametrize("fault", ["tuples", "tuples, own fingerprint"])
def test_a_dataset_that_does_not_return_a_batch_is_named(tmp_path, fault):
    with pytest.raises(OwnCodeError) as caught:
        train(tmp_path, fault)
    for error in (caught.value, checked(tmp_path, fault)[0]):
        assert str(error) == (
            f"{HERE}:{inspect.getsourcelines(Tuples.batch)[1]}: Tuples.batch() returned (Tensor, Tensor), not a Batch\n"
            "  -> return harness.training.task.Batch(inputs, targets, rows)"
        )


def test_a_batch_whose_parts_differ_in_length_is_named(tmp_path):
    with pytest.raises(OwnCodeError) as caught:
        train(tmp_path, "few rows of a batch")
    for error in (caught.value, checked(tmp_path, "few rows of a batch")[0]):
        assert error.where == f"{HERE}:{inspect.getsourcelines(FewRows.batch)[1]}"
        assert re.search(r"FewRows.batch\(\) returned .* \((\d), 1\), .* \(\1, 1\) and .* \(\d,\)$", error.message)


def test_a_batch_without_a_row_that_is_not_named_as_bad_is_an_error(tmp_path):
    with pytest.raises(OwnCodeError) as caught:
        train(tmp_path, "a row less")
    for error in (caught.value, checked(tmp_path, "a row less")[0]):
        assert error.where == f"{HERE}:{inspect.getsourcelines(DropsARow.batch)[1]}"
        assert re.search(r"DropsARow.batch\(\) returned a Batch of \d+ rows? where \d+ were asked for", error.message)
    x, rows = np.ones((4, 1), np.float32), np.arange(4)
    with pytest.raises(OwnCodeError, match="a Batch of 3 rows where 4 were asked for"):
        read(DropsARow(x, x), rows, 0)
    unreadable = DropsARow(x, x)
    unreadable.bad = (0,)
    assert len(read(unreadable, rows, 0)) == 3


def test_a_batch_of_numpy_arrays_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Line, "model", BaseTask.model)
    settings = ["model.name=torch.nn.Linear", "model.args.in_features=1", "model.args.out_features=1"]
    (found,) = checked(tmp_path, "numpy", *settings)
    assert found.exit_code == 1
    assert "Numpy.batch() returned a Batch with inputs of type ndarray and targets of type Tensor" in found.message


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no __len__", "eval of the task tests.training.test_task is of type Unsized, which has no __len__()\n"),
        ("no method", "is of type object, which has no __len__() and no batch(rows, epoch)\n"),
    ],
)
def test_missing_methods_of_a_dataset_are_named(tmp_path, fault, message):
    (found,) = checked(tmp_path, fault)
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, fault)
    for error in (found, caught.value):
        assert message in str(error)
        is_own = fault == "no __len__"
        assert error.where.endswith(
            f"{HERE}:{inspect.getsourcelines(Unsized)[1]}" if is_own else "line.yaml:19: task.name"
        )


def test_missing_members_are_named():
    opened = SimpleNamespace(**dict.fromkeys(
        ("train", "eval", "summary", "notes", "fingerprint", "label_counts", "model", "prepare", "loss", "evaluate",
         "report"), Arrays(np.zeros(1), np.zeros(1))))  # fmt: skip

    class Task(TaskSection):
        def open(self, seed: int, cache_dir: Path | None) -> object:
            return opened

    assert open_data(Task(name="mine"), 0, None) is opened
    del opened.loss, opened.notes
    opened.predictions = print
    with pytest.raises(
        ConfigError, match="Task.open of mine returns an object of type SimpleNamespace without notes, loss, known\n"
    ):
        open_data(Task(name="mine"), 0, None)


def test_a_missing_file_that_the_task_names_is_an_error_of_the_data(tmp_path):
    class Task(TaskSection):
        table: str

        def open(self, seed: int, cache_dir: Path | None) -> object:
            return Path(self.table).read_text() and (tmp_path / "other.txt").read_text()

    there = tmp_path / "houses.csv"
    there.write_text("price")
    with pytest.raises(DataError) as caught:
        open_data(Task(name="mine", table=str(tmp_path / "huoses.csv")), 0, None)
    assert str(caught.value) == f"{tmp_path / 'huoses.csv'}: no such file\n  -> did you mean {there}?"
    with pytest.raises(FileNotFoundError, match="other.txt"):
        open_data(Task(name="mine", table=str(there)), 0, None)

    class Unnamed(TaskSection):
        table: str | None = None

        def open(self, seed: int, cache_dir: Path | None) -> object:
            raise FileNotFoundError("no words")

    with pytest.raises(FileNotFoundError, match="no words"):
        open_data(Unnamed(name="mine"), 0, None)


class Plain(BaseTask):
    """The least that a task needs, with ``data`` for both splits."""

    def __init__(self, data):
        self.train = self.eval = data

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()


class Doubled:
    """Rows x and 2x of ``values``, not in ``Arrays``."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def batch(self, rows, epoch):
        x = torch.from_numpy(self.values[rows])
        return Batch(x, 2 * x, rows)


def test_a_task_of_data_and_a_loss_has_all_members():
    class Task(TaskSection):
        def open(self, seed: int, cache_dir: Path | None) -> object:
            return Plain(Doubled(np.ones((5, 3), np.float32)))

    opened = open_data(Task(name="mine"), 0, None)
    assert (opened.summary, opened.notes) == ({"train rows": 5, "eval rows": 5}, ())
    assert opened.label_counts(0, 5) is None
    model = opened.model(ModelSection(name="linear", args={"num_classes": 4}))
    batch = opened.train.batch(np.arange(3), 0)
    assert model(opened.prepare(batch.inputs)).shape == (3, 4)
    sums = Sums()
    for targets in (torch.ones(3), torch.zeros(1)):
        sums.add(opened.evaluate(torch.zeros(len(targets)), targets))
    assert opened.report(sums) == {"loss": 0.75}


@pytest.mark.parametrize("count", [len, lambda rows: np.int64(len(rows)), lambda rows: torch.tensor(len(rows))])
def test_a_count_may_be_a_number(count):
    class Own(Plain):
        def evaluate(self, outputs, targets):
            return {"sum": (targets.sum(), count(targets))}

    task, sums = Own(Doubled(np.ones((5, 3), np.float32))), Sums()
    for targets in (torch.ones(3), torch.zeros(1)):
        task_checks.add_pairs(sums, task, targets, targets)
    assert sums.over(Runtime()).ratio("sum") == 0.75


def test_a_number_of_outputs_is_given_to_the_model_and_required_of_it():
    task = Plain(Doubled(np.ones((5, 3), np.float32)))
    task.num_outputs = 2
    assert task.model(ModelSection(name="linear")).layer.weight.shape == (2, 3)
    with pytest.raises(ConfigError):
        task.model(ModelSection(name="torch.nn.Linear", args={"in_features": 3, "out_features": 7}))


@pytest.mark.parametrize("kind", [Doubled, lambda values: Arrays(values, 2 * values)])
def test_a_fingerprint_is_of_the_rows(kind):
    values = np.random.default_rng(0).random((50, 3), dtype=np.float32)
    found = Plain(kind(values)).fingerprint
    assert Plain(kind(values.copy())).fingerprint == found
    changed = values.copy()
    changed[31, 1] += 1
    for other in (changed, values[:-1], values.reshape(50, 1, 3), values[::-1]):
        assert Plain(kind(other.copy())).fingerprint != found


class Augmented(Doubled):
    """Draws, also for targets, as the docs say; opens its file at first use."""

    file = None

    def batch(self, rows, epoch):
        self.file = object()
        noise = [np.random.default_rng(row_seed(0, epoch, int(row))).normal() for row in rows]
        batch = super().batch(rows, epoch)
        return Batch(batch.inputs.bfloat16() + torch.tensor(noise)[:, None], batch.targets, rows)


def test_a_dataset_that_augments_is_read_as_in_training_and_by_a_copy():
    values = np.random.default_rng(0).random((50, 3), dtype=np.float32)
    task = Plain(Augmented(values))
    task.eval = Doubled(values)
    model = task.model(ModelSection(name="linear", args={"num_classes": 4}))
    assert model.layer.weight.shape == (4, 3)
    assert len(task.fingerprint) == 64
    build.require_mixable(SimpleNamespace(train=TrainSection(mixup=0.2)), task)
    assert task.train.file is None, "loader workers must not share it"


def test_classes_of_arrays_are_counted():
    class Letters(Classification):
        classes = ("a", "b", "c")
        train = eval = Arrays(np.zeros((4, 2), np.float32), np.array([0, 2, 2, 0]))

        def __init__(self):
            self.notes = ["a note"]

    assert Letters().label_counts(1, 4).tolist() == [1, 0, 2]
    assert Letters().notes == ["a note"]
    assert Letters().signature["classes"] == ["a", "b", "c"]
    assert Letters().model(ModelSection(name="linear")).layer.weight.shape == (3, 2)
    Letters.train = Doubled(np.zeros((4, 2), np.float32))
    assert Letters().label_counts(0, 4) is None
    Letters.options = LabelledTask(name="letters", loss={"class_weights": "balanced"})
    with pytest.raises(ConfigError) as caught:
        Letters().objective.loss  # noqa: B018
    assert caught.value.where == "task.loss.class_weights"


def test_an_unfinished_own_task_is_told_what_to_write():
    class Task(TaskSection):
        def open(self, seed: int, cache_dir: Path | None) -> object:
            return BaseTask()

    with pytest.raises(ConfigError, match="without train, eval, loss\n") as caught:
        open_data(Task(name="mine"), 0, None)
    assert caught.value.hint == "set train and eval in __init__, and write loss"


def test_section_without_open_is_reported():
    with pytest.raises(NotImplementedError, match=r"Task does not define open\(seed, cache_dir\)"):
        open_data(TaskSection(name="x"), 0, None)


def test_prediction_of_a_task_without_open_new_says_what_to_define(tmp_path):
    with pytest.raises(
        ConfigError, match=r"-> define Task.open_new\(learned, source, cache_dir\) in it; see docs/add_a"
    ):
        predict.open_task(loader.load(configured(tmp_path, "")), tmp_path, "new.csv")
