"""Losses against torch's, metrics against scikit-learn and torchmetrics, at any number of batches and ranks."""

from __future__ import annotations

import json
import math
import os
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from harness import cli
from harness.apex import amp
from harness.config.targets import LabelledTask, TableTask
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.errors import EXIT_OWN_CODE, EXIT_USAGE, ConfigError, HarnessError
from harness.training.evaluation.labels import KINDS as KINDS_OF_LABELS
from harness.training.evaluation.labels import (
    MAX_CONFUSION,
    MAX_SCORES,
    Labels,
    MultiLabel,
    Regression,
    SingleLabel,
)
from harness.training.evaluation.losses import LabelCounts
from harness.training.evaluation.objective import MAX_KEPT, Objective
from harness.training.evaluation.predictions import shown_report
from harness.training.evaluation.sums import Sums, reduced
from harness.training.reproducibility.logical_ranks import LogicalRanks
from tests.fixtures import settings, write_rows, write_yaml
from tests.ranks import run_ranks

SINGLE = SingleLabel(("a", "b", "c"))
MULTI = MultiLabel(("a", "b", "c", "d"), "|")
NUMBERS = Regression(("x", "y"), mean=(10.0, 0.5), std=(4.0, 0.25))
COUNTS = np.asarray([6, 3, 1])
KINDS = {"single_label": {}, "multi_label": {"separator": "|"}, "regression": {"kind": "regression"}}


def objective(labels: Labels, counts=COUNTS, **options) -> Objective:
    options |= {"name": "x", "train_csv": "t", "eval_csv": "e", "labels": KINDS[labels.kind]}
    return Objective(TableTask.model_validate(options), labels, lambda: LabelCounts(counts, int(counts.sum())))


def test_a_subclass_of_a_kind_does_not_replace_it():
    type("Own", (SingleLabel,), {})
    type("Again", (SingleLabel,), {"kind": "single_label"})
    assert KINDS_OF_LABELS["single_label"] is SingleLabel


def batch(labels: Labels, rows: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(rows, len(labels.names), generator=generator)
    if labels.kind == "regression":
        return outputs, torch.randn(outputs.shape, generator=generator)
    if labels.kind == "multi_label":
        return outputs, (torch.rand(outputs.shape, generator=generator) < 0.4).to(torch.uint8)
    return outputs, torch.randint(len(labels.names), (rows,), generator=generator)


def report_of(subject: Objective, outputs, targets, edges=(0, 40), runtime=None) -> dict:
    sums = Sums()
    for start, stop in zip(edges, edges[1:], strict=False):
        sums.add(subject.evaluate(outputs[start:stop], targets[start:stop]))
    return subject.report(reduced([sums], LogicalRanks(runtime or Runtime())))


# Losses


def focal(outputs, targets, gamma):
    probability = outputs.softmax(1)[torch.arange(len(targets)), targets]
    return (-((1 - probability) ** gamma) * probability.log()).mean()


def sigmoid_focal(outputs, targets, gamma):  # Lin et al. 2017
    p = outputs.sigmoid()
    return -(targets * (1 - p) ** gamma * p.log() + (1 - targets) * p**gamma * (1 - p).log()).mean()


CASES = [
    (SINGLE, {}, functional.cross_entropy),
    (SINGLE, {"args": {"label_smoothing": 0.1}}, lambda o, t: functional.cross_entropy(o, t, label_smoothing=0.1)),
    (SINGLE, {"name": "bce"}, lambda o, t: functional.binary_cross_entropy_with_logits(o, torch.eye(3)[t])),
    (SINGLE, {"name": "focal", "args": {"gamma": 1.5}}, lambda o, t: focal(o, t, 1.5)),
    (MULTI, {}, lambda o, t: functional.binary_cross_entropy_with_logits(o, t.float())),
    (
        MULTI,
        {"args": {"label_smoothing": 0.1}},
        lambda o, t: functional.binary_cross_entropy_with_logits(o, t * 0.9 + 0.05),
    ),
    (MULTI, {"name": "focal"}, lambda o, t: sigmoid_focal(o, t, 2.0)),
    (NUMBERS, {}, functional.mse_loss),
    (NUMBERS, {"name": "l1"}, functional.l1_loss),
    (NUMBERS, {"name": "huber", "args": {"delta": 0.5}}, lambda o, t: functional.huber_loss(o, t, delta=0.5)),
    (MULTI, {"name": "torch.nn.MultiLabelSoftMarginLoss"}, lambda o, t: functional.multilabel_soft_margin_loss(o, t)),
    (
        NUMBERS,
        {"name": "torch.nn.SmoothL1Loss", "args": {"beta": 2.0}},
        lambda o, t: functional.smooth_l1_loss(o, t, beta=2),
    ),
]


@pytest.mark.parametrize(
    ("labels", "loss", "expected"), CASES, ids=[f"{each[0].kind}-{each[1].get('name')}" for each in CASES]
)
def test_losses_are_the_mean_over_rows(labels, loss, expected):
    """The validation loss too, in batches of any size; label smoothing is for training only."""
    subject, (outputs, targets) = objective(labels, loss=loss), batch(labels)
    subject.check(40)
    torch.testing.assert_close(subject.loss(outputs, targets), expected(outputs, targets))
    parts = [subject.loss(outputs[a:b], targets[a:b]) * (b - a) / 40 for a, b in ((0, 7), (7, 40))]
    torch.testing.assert_close(sum(parts), subject.loss(outputs, targets))
    without = {key: value for key, value in loss.items() if "label_smoothing" not in value}
    plain = next(each for kind, options, each in CASES if (kind, options) == (labels, without))
    for edges in ((0, 40), (0, 3, 39, 40)):
        assert report_of(subject, outputs, targets, edges)["loss"] == pytest.approx(plain(outputs, targets).item())


def test_class_weights():
    """The sum is divided by the number of rows, so that it does not depend on how they are split."""
    outputs, targets = batch(SINGLE)
    each = functional.cross_entropy(outputs, targets, reduction="none")
    for given, weights in (
        ("balanced", 10 / 3 / COUNTS), ([1.0, 0.0, 2.5], [1.0, 0.0, 2.5]), ({"c": 3.0}, [1.0, 1.0, 3.0]),
    ):  # fmt: skip
        expected = (each * torch.tensor(np.asarray(weights), dtype=torch.float32)[targets]).mean()
        subject = objective(SINGLE, loss={"class_weights": given})
        torch.testing.assert_close(subject.loss(outputs, targets), expected)
        assert report_of(subject, outputs, targets, (0, 9, 40))["loss"] == pytest.approx(expected.item())
    counts = np.asarray([5, 1, 9, 0])
    outputs, targets = batch(MULTI)
    subject = objective(MULTI, counts, loss={"class_weights": "balanced"})  # 15 rows in all
    ratio = torch.tensor([10 / 5, 14 / 1, 6 / 9, 15.0])
    expected = functional.binary_cross_entropy_with_logits(outputs, targets.float(), pos_weight=ratio)
    torch.testing.assert_close(subject.loss(outputs, targets), expected)
    for given, message in (
        ([1.0, 2.0], "2 weights for 3 labels"), ([-1.0, 1, 1], "positive or zero"), ({"x": 1.0}, "no label 'x'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            objective(SINGLE, loss={"class_weights": given}).check(9)


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, outputs, targets):
        return (outputs * self.weight).mean()


def fails(outputs, targets, reduction=""):
    raise IndexError("no such column")


def squares(outputs, targets):
    return outputs.square()


def detached(outputs, targets):
    return outputs.detach().mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "tests.training.test_objective.squares"}, r"shape \(8, 3\), not one number"),
        ({"name": "torch.nn.CrossEntropyLos"}, "cannot be imported"),
        ({"name": "torch.nn.CrossEntropyLoss", "args": {"wieght": 1}}, "has no argument wieght"),
        ({"name": "tests.training.test_objective.Trained"}, "has parameters, which would not be trained"),
        ({"name": "tests.training.test_objective.fails"}, "IndexError: no such column"),
        ({"name": "tests.training.test_objective.detached"}, "has no gradient"),
        ({"name": "tests.training.test_objective"}, "cannot be called"),
        ({"name": "torch.nn.BCELoss"}, "the loss torch.nn.BCELoss fails"),
    ],
)  # fmt: skip
def test_unusable_loss_is_refused_before_training(loss, message):
    with pytest.raises(HarnessError, match=message) as caught:
        objective(SINGLE, loss=loss).check(9)
    assert caught.value.exit_code == (EXIT_OWN_CODE if "IndexError" in message else EXIT_USAGE)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("torch.nn.CrossEntropyLoss", {"reduction": "mean", "power": 1.5}),
        ("tests.training.test_objective.fails", {"reduction": "mean", "power": 1.5}),
        ("focal", {"power": 1.5}),
        ("cross_entropy", {"label_smoothing": 1.0}),
        ("bce", {"label_smoothing": "much"}),
        ("focal", {"gamma": -0.5}),
    ],
)
def test_a_wrong_argument_of_a_loss_is_placed_at_its_own_key(name, args):
    """It may be in another file than the other arguments."""
    with pytest.raises(ConfigError) as caught:
        objective(SINGLE, loss={"name": name, "args": args}).check(9)
    assert caught.value.where == f"task.loss.args.{list(args)[-1]}"


# Metrics


def test_metrics_agree_with_scikit_learn():
    reference = pytest.importorskip("sklearn.metrics")
    outputs, targets = batch(SINGLE)
    metrics = ["macro_f1", "top1", "top2", "mean_class_accuracy"]
    found = report_of(objective(SINGLE, metrics=metrics), outputs, targets, (0, 1, 30, 40))
    predicted = outputs.argmax(1)
    assert list(found)[:5] == [*metrics, "loss"]
    assert found["macro_f1"] == pytest.approx(reference.f1_score(targets, predicted, average="macro"))
    assert found["top1"] == pytest.approx(reference.accuracy_score(targets, predicted))
    assert found["top2"] == pytest.approx(reference.top_k_accuracy_score(targets, outputs, k=2))
    assert found["mean_class_accuracy"] == pytest.approx(reference.balanced_accuracy_score(targets, predicted))
    assert found["confusion"] == reference.confusion_matrix(targets, predicted).tolist()  # (label, prediction)
    recall = reference.recall_score(targets, predicted, average=None)
    assert list(found["class_accuracy"].values()) == pytest.approx(recall.tolist())

    outputs, targets = batch(MULTI)
    found = report_of(objective(MULTI), outputs, targets, (0, 1, 30, 40))
    predicted = outputs > 0
    for average in ("macro", "micro"):
        assert found[f"{average}_f1"] == pytest.approx(reference.f1_score(targets, predicted, average=average))
    assert found["exact_match"] == pytest.approx(reference.accuracy_score(targets, predicted))
    assert found["by_label"]["c"]["rows"] == targets[:, 2].sum()
    recall = reference.recall_score(targets, predicted, average=None)
    assert [each["recall"] for each in found["by_label"].values()] == pytest.approx(recall.tolist())

    outputs, targets = batch(NUMBERS)
    found = report_of(objective(NUMBERS), outputs, targets, (0, 1, 30, 40))
    true, predicted = (NUMBERS.mean + each.double().numpy() * NUMBERS.std for each in (targets, outputs))
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(true, predicted))
    assert found["r2"] == pytest.approx(reference.r2_score(true, predicted))
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(true, predicted))
    assert found["by_column"]["y"]["r2"] == pytest.approx(reference.r2_score(true[:, 1], predicted[:, 1]))


def test_f1_and_mcc_of_two_classes_agree_with_scikit_learn():
    """From counts that are summed over batches; f1 is that of the second class."""
    reference, two = pytest.importorskip("sklearn.metrics"), SingleLabel(("no", "yes"))
    outputs, targets = batch(two)
    found = report_of(objective(two, metrics=["f1", "mcc"]), outputs, targets, (0, 1, 30, 40))
    assert found["f1"] == pytest.approx(reference.f1_score(targets, outputs.argmax(1)))
    assert found["mcc"] == pytest.approx(reference.matthews_corrcoef(targets, outputs.argmax(1)))
    outputs, targets = batch(SINGLE)
    found = report_of(objective(SINGLE, metrics=["mcc"]), outputs, targets, (0, 1, 30, 40))
    assert found["mcc"] == pytest.approx(reference.matthews_corrcoef(targets, outputs.argmax(1)))
    constant = report_of(objective(two, metrics=["mcc", "f1"]), torch.tensor([[1.0, 0.0]] * 3), torch.zeros(3).long())
    assert (constant["mcc"], constant["f1"]) == (0, 0)
    with pytest.raises(ConfigError, match="f1 is for two classes, and there are 3: 'a', 'b', 'c'"):
        objective(SINGLE, metrics=["f1"]).check(9)


@pytest.mark.parametrize(
    ("labels", "texts"),
    [
        (SINGLE, [["a", "", "b", "other", "c"]]),
        (MULTI, [["a|c", "", "d", "a|other", "b"]]),
        (NUMBERS, [["10", "", "2.5", "x", "7"], ["1", "2", "0.5", "1", "0"]]),
    ],
)
def test_rows_of_a_new_file_are_evaluated_like_the_others(labels, texts):
    """Rows with a blank or an unknown label are left out, and counted."""
    subject, outputs = objective(labels), torch.randn(5, len(labels.names))
    targets = {
        "single_label": torch.tensor([0, 1, 2]),
        "multi_label": torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]),
        "regression": torch.tensor([[0, 2], [-1.875, 0], [-0.75, -2]]),
    }[labels.kind]
    sums = Sums()
    sums.add(subject.pairs_of_new(outputs, texts))
    expected = report_of(subject, outputs[[0, 2, 4]], targets, (0, 3))
    expected.pop("confusion", None)  # nobody would see it
    assert subject.report(sums) == expected
    assert subject.pairs_of_new(outputs, []) == {}
    why = "a number" if labels is NUMBERS else "in the training data"
    counts = ["rows evaluated: 3 of 7", "rows left out, without a label: 1"]
    counts += [f"rows left out, with a label that is not {why}: 1", "rows left out, that could not be read: 2"]
    assert shown_report(subject, sums, 7)[:4] == counts
    blank = Sums()
    blank.add(subject.pairs_of_new(outputs[:1], [[""]] * len(texts)))
    assert shown_report(subject, blank, 1) == ["rows evaluated: 0 of 1", "rows left out, without a label: 1"]
    assert shown_report(subject, Sums(), 1) == []
    with pytest.raises(ConfigError, match=r"the shape \(5, \d, 2\), not"):
        subject.pairs_of_new(torch.stack([outputs] * 2, dim=2), texts)


def test_precision_recall_and_f1_of_each_class_are_shown():
    subject, sums = objective(SINGLE, metrics=["macro_f1"]), Sums()
    outputs = torch.tensor([[5.0, 0, 0], [0, 5, 0], [0, 5, 0], [5, 0, 0]])
    sums.add(subject.pairs_of_new(outputs, ["abaa"]))
    rows, first, loss, *table = shown_report(subject, sums, 4)
    assert (rows, first) == ("rows evaluated: 4 of 4", "macro_f1: 0.7333")
    assert loss.startswith("loss: ")
    assert [line.split() for line in table] == [
        ["classes", "precision", "recall", "f1", "rows"],
        ["a", "1.0000", "0.6667", "0.8000", "3"],
        ["b", "0.5000", "1.0000", "0.6667", "1"],
    ]


def test_r2_of_equal_labels_is_undefined():
    """Their spread is only what rounding leaves, which must not be a divisor."""
    subject = objective(Regression(("x",), mean=(0.0,), std=(1.0,)))
    for label in torch.randn(200, generator=torch.Generator().manual_seed(1)):
        found = report_of(subject, torch.zeros(999, 1), label.repeat(999, 1), (0, 7, 300, 999))
        assert np.isnan(found["r2"])
    nearly = torch.full((40, 1), 1000.0)
    nearly[0] += 0.01
    assert np.isfinite(report_of(subject, nearly, nearly)["r2"])


def test_labels_that_no_row_has():
    outputs, targets = batch(MULTI)
    targets[:, 1] = 0
    outputs[:, 1] = -1.0
    found = report_of(objective(MULTI), outputs, targets)
    assert found["by_label"]["b"] == {"precision": None, "recall": None, "f1": None, "rows": 0}
    f1 = [each["f1"] for each in found["by_label"].values() if each["f1"] is not None]
    assert found["macro_f1"] == pytest.approx(np.mean(f1))


def test_class_without_rows_has_no_accuracy():
    outputs = torch.tensor([[5.0, 0, 0], [0, 5, 0], [0, 5, 0], [5, 0, 0]])
    report = report_of(objective(SINGLE), outputs, torch.tensor([0, 1, 0, 0]))
    assert report["class_accuracy"] == {"a": 2 / 3, "b": 1.0, "c": None}
    assert report["mean_class_accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_five_guesses_among_five_classes_or_fewer_are_always_right(classes):
    labels = SingleLabel(tuple(range(classes)))
    assert report_of(objective(labels, metrics=["top5", "top1"]), *batch(labels))["top5"] == 1
    objective(labels, metrics=["top1", "top5"]).check(9)
    with pytest.raises(ConfigError, match="top5 is 1 for any model"):  # and would choose the first checkpoint
        objective(labels, metrics=["top5", "top1"]).check(9)


def test_half_precision_outputs_are_summed_in_higher_precision():
    (outputs, targets), subject = batch(SINGLE), objective(SINGLE)
    assert report_of(subject, outputs.bfloat16(), targets) == report_of(subject, outputs.bfloat16().float(), targets)
    assert subject.evaluate(outputs.half(), targets)["loss"][0].dtype is torch.float32


def test_confusion_matrix_is_omitted_for_too_many_classes():
    outputs, targets = torch.zeros(2, MAX_CONFUSION + 1), torch.tensor([0, MAX_CONFUSION])
    many, few = (objective(SingleLabel(tuple(range(MAX_CONFUSION + more)))) for more in (1, 0))
    assert "confusion" not in report_of(many, outputs, targets)
    assert "confusion" in few.evaluate(outputs[:1, :-1], targets[:1])


def test_sums():
    pairs = {"loss": (torch.ones(()), torch.ones(())), "nothing": (torch.zeros(()), torch.zeros(()))}
    sums = Sums()
    for _ in range(2):
        sums.add(pairs)
    assert (sums.ratio("loss"), sums.pairs["loss"][0].item()) == (1, 2)
    assert pairs["loss"][0].item() == 1  # the sums are copies
    assert math.isnan(sums.ratio("nothing"))


def _report_over_ranks():
    """Split 40 rows as [0, 0, 1, 39], taking the last ``world_size`` parts: at least one rank has no rows."""
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        start, stop = [0, 0, 1, 40][-runtime.world_size - 1 :][runtime.rank : runtime.rank + 2]
        nothing = reduced([Sums()], LogicalRanks(runtime)).pairs
        return report_of(objective(SINGLE), *batch(SINGLE), (start, stop) if stop > start else (), runtime), nothing


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_add_up_to_the_whole_with_and_without_rows(world):
    whole = report_of(objective(SINGLE), *batch(SINGLE))
    for report, nothing in run_ranks(world, _report_over_ranks, group=False, timeout_s=30):
        assert nothing == {}
        assert report.pop("loss") == pytest.approx(whole["loss"])
        assert report == {key: value for key, value in whole.items() if key != "loss"}


def _mismatched():
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        sums = Sums()
        sums.add({"loss": (torch.ones(6 - runtime.rank, 1), 1), "error": (torch.ones(()), 1)})
        try:
            reduced([sums], LogicalRanks(runtime))
        except HarnessError as error:
            return str(error)


def test_sums_of_other_shapes_on_another_rank_are_refused_on_all():
    """A task that forgot to sum over its rows, with one batch on each rank, of which the last is shorter."""
    for error in run_ranks(2, _mismatched, group=False, timeout_s=30):
        assert "sums of shape (5, 1) and (6, 1) for 'loss' on different ranks\n  -> add up the sum over the" in error


def spread(outputs, targets):
    """A metric of one's own: every row once, as probabilities and classes."""
    assert targets.dtype == torch.int64
    return float(outputs.sum() + targets.float().std())


OWN = {
    "single_label": [
        {"name": "torchmetrics.classification.MulticlassAUROC", "better": "max"},  # keeps rows
        {"name": "torchmetrics.classification.MulticlassCohenKappa", "better": "max"},  # adds counts
        {"name": "torchmetrics.classification.MulticlassF1Score", "better": "max", "key": "top_f1"},  # adds by class
        {"name": "tests.training.test_objective.spread", "better": "min"},
    ],
    "multi_label": [
        {"name": "torchmetrics.classification.MultilabelHammingDistance", "better": "min", "key": "hamming"},
        {"name": "torchmetrics.classification.MultilabelAveragePrecision", "better": "max"},
    ],
    "regression": [
        {"name": "torchmetrics.MeanAbsolutePercentageError", "better": "min"},
    ],
}  # fmt: skip


def own_values(kind: str, edges: tuple[int, ...], runtime: Runtime | None = None) -> dict[str, float]:
    """The loss and the metrics of ``OWN``, of batches of rows."""
    labels = {"single_label": SINGLE, "multi_label": MULTI, "regression": NUMBERS}[kind]
    found = report_of(objective(labels, metrics=OWN[kind]), *batch(labels), edges, runtime)
    return {name: value for name, value in found.items() if isinstance(value, float)}


def own_values_of_ranks() -> list[dict[str, float]]:
    with open_runtime(detect(os.environ), "cpu", 60) as runtime:
        mine = ((0, 11, 40), ())[runtime.rank]  # one rank has no rows
        return [own_values(kind, mine, runtime) for kind in OWN]


@pytest.mark.slow
def gram(probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (probabilities.T @ probabilities).trace()


class Gram:
    """``gram``, added up over batches, as torchmetrics does."""

    def __init__(self) -> None:
        self._reductions = {"total": type("dim_zero_sum", (), {"__name__": "dim_zero_sum"})()}
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())

    def update(self, probabilities: torch.Tensor, targets: torch.Tensor) -> None:
        self.total = self.total + gram(probabilities, targets)

    def compute(self) -> torch.Tensor:
        return self.total


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_own_metrics_are_computed_without_the_casts_of_amp(level):
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    try:
        values = batch(SINGLE)
        true = float(gram(values[0].double().softmax(dim=1), values[1]))
        for name in ("gram", "Gram"):
            judge = objective(SINGLE, metrics=[{"name": f"{__name__}.{name}", "better": "max", "key": "own"}])
            assert report_of(judge, *values)["own"] == pytest.approx(true, rel=1e-6), name
    finally:
        amp.reset()


def test_torchmetrics_counts_each_row_once_on_any_number_of_ranks():
    pytest.importorskip("torchmetrics")
    whole = [own_values(kind, (0, 40)) for kind in OWN]
    assert [len(found) - 1 for found in whole] == [len(metrics) for metrics in OWN.values()]  # the loss is there, too
    parts = [own_values(kind, (0, 1, 25, 40)) for kind in OWN]
    for found in (parts, *run_ranks(2, own_values_of_ranks, group=False)):
        for values, expected in zip(found, whole, strict=True):
            assert values == pytest.approx(expected, rel=1e-6)


def breaks(outputs, targets):
    return 1 / 0


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"name": "tests.training.test_objective.breaks"}, "breaks fails: ZeroDivisionError"),
        ({"name": "torchmetrics.classification.MulticlassRecall", "args": {"average": "none"}}, "not a number"),
        ({"name": "torchmetrics.classification.BinaryAUROC"}, "(?s)BinaryAUROC fails.*-> use .*MulticlassAUROC:"),
        ({"name": "torchmetrics.classification.AURROC"}, "cannot be imported"),
    ],
)
def test_unusable_metric_is_refused_before_training(metric, message):
    pytest.importorskip("torchmetrics")
    with pytest.raises(HarnessError, match=message) as caught:
        objective(SINGLE, metrics=[{**metric, "better": "max"}]).check(9)
    assert caught.value.exit_code == (EXIT_OWN_CODE if "ZeroDivision" in message else EXIT_USAGE)


def by_class(outputs, targets, kept=3):
    return np.full(kept, 0.5)


def several(outputs, targets):
    return {"f1": 0.5, "recall": 0.25}


def test_metric_that_returns_a_dictionary():
    metric = {"name": "tests.training.test_objective.several", "better": "max"}
    with pytest.raises(ConfigError, match="-> return one number; of several, give task.metrics a function for each"):
        objective(SINGLE, metrics=[metric]).check(9)


def test_metric_that_returns_an_array():
    metric = {"name": "tests.training.test_objective.by_class", "better": "max"}
    with pytest.raises(ConfigError, match=r"by_class returns values of shape \(3,\), not a number\n  -> average it"):
        objective(SINGLE, metrics=[metric]).check(9)
    one = objective(SINGLE, metrics=[metric | {"args": {"kept": 1}}])
    one.check(9)
    assert report_of(one, *batch(SINGLE))["by_class"] == 0.5


def test_costs_are_stated_and_limited():
    keeping = objective(MULTI, metrics=[{"name": "tests.training.test_objective.spread", "better": "max"}])
    facts = keeping.summary(1 << 20)
    assert facts["labels"] == "4: " + ", ".join(MULTI.names)
    assert re.search(r"keeps all outputs .* for spread: 20.0 MiB", facts["metrics"])
    with pytest.raises(ConfigError, match="spread would keep"):
        keeping.check(MAX_KEPT)
    objective(MULTI).check(MAX_KEPT)
    assert objective(SingleLabel(("a",))).notes == ["all training rows have the label 'a': there is nothing to learn"]


MINE = """
from torch.nn.functional import one_hot

def brier(outputs, targets, factor=1.0):
    return factor * (outputs.softmax(1) - one_hot(targets, outputs.shape[1])).square().sum(1)

def surest(probabilities, targets):
    return probabilities.max()
"""


def test_strangers_loss_and_metric_are_a_function_each(tmp_path, monkeypatch, capfd):
    (tmp_path / "own_objective.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    for split, rows in (("train", 8), ("eval", 6)):
        write_rows(tmp_path, split, rows)
    task = {
        "loss": {"name": "own_objective.brier", "args": {"factor": 2.0}},
        "metrics": [{"name": "own_objective.surest", "better": "max"}],
    }
    config = write_yaml(
        tmp_path / "config.yaml", settings(tmp_path, task=task, train={"epochs": 1, "deterministic": False})
    )
    assert cli.main(["train", "-c", str(config)]) == 0
    run = tmp_path / "runs" / "small"
    (entry,) = json.loads((run / "summary.json").read_text())["history"]
    table = pd.read_csv(run / "predictions.csv")
    scores = table[["score_0", "score_1", "score_2"]].to_numpy()
    assert entry["surest"] == pytest.approx(scores.max(), abs=1e-5)
    assert entry["loss"] == pytest.approx(2 * ((scores - np.eye(3)[table["label"]]) ** 2).sum(1).mean(), abs=1e-5)

    command = ["predict", str(run), "--csv", str(tmp_path / "eval.csv"), "--out", str(tmp_path / "new.csv")]
    monkeypatch.setattr(sys.modules["own_objective"], "surest", breaks)
    for why in ("the metric own_objective.surest fails: ZeroDivisionError", "own_objective"):  # then without its module
        assert cli.main(command) == 0, "predictions do not need the metric"
        (warning,) = re.findall("the rows with labels are not evaluated: .*", "".join(capfd.readouterr()))
        assert why in warning
        assert len(pd.read_csv(tmp_path / "new.csv")) == len(table)
        (tmp_path / "own_objective.py").unlink(missing_ok=True)
        sys.modules.pop("own_objective", None)


# Predictions


def test_predictions_and_errors():
    logits = torch.tensor([[3.0, -1.0, 0.5, -9.0], [-1.0, -1.0, -1.0, -1.0]])
    table = objective(MULTI).labels.predictions(logits)
    assert table["prediction"] == ["a|c", ""]
    assert table["score_c"].tolist() == pytest.approx([1 / (1 + math.exp(-0.5)), 1 / (1 + math.e)])
    rows, targets = MULTI.targets([["a| c|", "none", "", "b"]], True)
    assert (rows, targets.tolist(), targets.dtype) == ([0, 2, 3], [[1, 0, 1, 0], [0] * 4, [0, 1, 0, 0]], torch.uint8)
    many = MultiLabel(tuple(range(200)), ",")
    table = objective(many).labels.predictions(torch.eye(200)[[7]] * 9 - 1)
    assert (table["prediction"], table["label_1"]) == (["7"], [7])
    assert list(table)[1:] == [f"{name}_{place}" for place in range(1, 6) for name in ("label", "score")]
    table = objective(SingleLabel(tuple(range(MAX_SCORES + 1)))).labels.predictions(
        torch.eye(MAX_SCORES + 1)[[3, 100]] * 9
    )
    assert list(table) == ["prediction", "score", *(f"{k}_{n}" for n in (2, 3, 4, 5) for k in ("prediction", "score"))]
    assert table["prediction"] == [3, 100]
    assert (table["score"] > table["score_2"]).all()

    years = Regression(("year",), (1_700_000_123.0,), (0.1,)).predictions(torch.tensor([[1.0]]))
    assert years["prediction"] == [1_700_000_123.1]
    subject = objective(NUMBERS)
    table = subject.labels.predictions(torch.tensor([[1.0, -2.0]]).half())
    assert (table["prediction_x"], table["prediction_y"]) == ([14.0], [0.0])
    assert subject.labels.errors({**table, "label_x": [13.0]})["error_x"].tolist() == [1.0]
    assert subject.labels.errors({**table, "label_x": ["13"], "label_y": ["n/a"]}) == {}  # of a new table, as written


@pytest.mark.parametrize("labels", [SINGLE, MULTI, NUMBERS], ids=lambda labels: labels.kind)
def test_facts_survive_the_run_folder(labels):
    assert labels.of_learned(labels.learned, "|") == labels
    for damaged in ({}, {"classes": [], "columns": []}, {"classes": [1.5], "columns": ["x", "y"], "mean": [1.0]}):
        with pytest.raises(ConfigError, match="task.json lacks"):
            labels.of_learned(damaged, "|")
    for key in labels.learned:
        for wrong in (5, True, None, "x", {}, {"x": 1}, [None], [[1]], [True], [1.0, float("nan")], [1.0, 10**400]):
            with pytest.raises(ConfigError):
                labels.of_learned({**labels.learned, key: wrong}, "|")


def test_task_without_these_settings_has_the_defaults():
    assert list(LabelledTask(name="x").metrics) == ["top1", "loss", "mean_class_accuracy"]
