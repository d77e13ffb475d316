"""Metrics of classification against scikit-learn, and sums over batches and ranks against the whole."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from harness.config.targets import LabelledTask
from harness.distributed.launch_env import detect
from harness.distributed.runtime import Runtime, open_runtime
from harness.training.evaluation.metrics import MAX_CONFUSION, MAX_SCORES, Sums, reduced
from harness.training.evaluation.objective import Classification
from harness.training.logical_ranks import LogicalRanks
from tests.ranks import run_ranks

CLASSES = 7


def task_of(classes: int, metrics: Sequence[str] = ()) -> Classification:
    task = Classification()
    task.classes, task.options = range(classes), LabelledTask(name="x", metrics=metrics)
    return task


def logits_and_targets(num_rows: int, classes: int = CLASSES):
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, classes, generator=generator), torch.randint(classes, (num_rows,), generator=generator)


def report_of(*batches, classes: int = CLASSES, runtime: Runtime | None = None, metrics: Sequence[str] = ()):
    task, sums = task_of(classes, metrics), Sums()
    for outputs, targets in batches:
        sums.add(task.evaluate(outputs, targets))
    return task.report(reduced([sums], LogicalRanks(runtime or Runtime())))


def test_classification_agrees_with_scikit_learn():
    reference = pytest.importorskip("sklearn.metrics")
    outputs, targets = logits_and_targets(200)
    predicted, labels = outputs.argmax(1).numpy(), np.arange(CLASSES)
    report = report_of((outputs, targets), metrics=("top1", "top5", "loss", "mean_class_accuracy"))
    assert report["top1"] == pytest.approx(reference.accuracy_score(targets, predicted))
    assert report["top5"] == pytest.approx(reference.top_k_accuracy_score(targets, outputs.numpy(), k=5, labels=labels))
    assert report["loss"] == pytest.approx(reference.log_loss(targets, outputs.softmax(1).numpy(), labels=labels))
    assert report["mean_class_accuracy"] == pytest.approx(reference.balanced_accuracy_score(targets, predicted))
    assert report["confusion"] == reference.confusion_matrix(targets, predicted, labels=labels).tolist()
    recalls = reference.recall_score(targets, predicted, average=None)
    assert list(report["class_accuracy"].values()) == pytest.approx(recalls.tolist())


def test_class_without_rows_has_no_accuracy():
    outputs = torch.tensor([[5.0, 0, 0], [0, 5, 0], [0, 5, 0], [5, 0, 0]])
    report = report_of((outputs, torch.tensor([0, 1, 0, 0])), classes=3)
    assert report["top1"] == 0.75
    assert report["class_accuracy"] == {"0": 2 / 3, "1": 1.0, "2": None}
    assert report["mean_class_accuracy"] == pytest.approx(5 / 6)
    assert report["confusion"] == [[2, 1, 0], [0, 1, 0], [0, 0, 0]]  # (label, prediction)


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_five_guesses_among_five_classes_or_fewer_are_always_right(classes):
    assert report_of(logits_and_targets(20, classes), classes=classes, metrics=["top5", "top1"])["top5"] == 1


def test_batches_of_any_size_add_up_to_the_whole():
    outputs, targets = logits_and_targets(50)
    whole = report_of((outputs, targets))
    edges = [0, 1, 2, 20, 50]
    parts = report_of(*((outputs[a:b], targets[a:b]) for a, b in zip(edges, edges[1:], strict=False)))
    assert parts.pop("loss") == pytest.approx(whole.pop("loss"))
    assert parts == whole


def test_half_precision_outputs_are_summed_in_higher_precision():
    outputs, targets = logits_and_targets(300)
    assert report_of((outputs.bfloat16(), targets)) == report_of((outputs.bfloat16().float(), targets))
    assert task_of(CLASSES).evaluate(outputs.half(), targets)["loss"][0].dtype is torch.float32


def test_confusion_matrix_is_omitted_for_too_many_classes():
    outputs, targets = torch.zeros(2, MAX_CONFUSION + 1), torch.tensor([0, MAX_CONFUSION])
    assert "confusion" not in report_of((outputs, targets), classes=MAX_CONFUSION + 1)
    assert "confusion" in task_of(MAX_CONFUSION).evaluate(outputs[:1, :-1], targets[:1])


def test_predictions_of_many_classes_are_the_best_five():
    table = task_of(MAX_SCORES + 1).predictions(torch.eye(MAX_SCORES + 1)[[3, 100]] * 9)
    more = [f"{kind}_{n}" for n in (2, 3, 4, 5) for kind in ("prediction", "score")]
    assert list(table) == ["prediction", "score", *more]
    assert table["prediction"] == [3, 100]
    assert (table["score"] > table["score_2"]).all()


def test_adding_copies_the_values():
    pairs = {"loss": (torch.ones(()), torch.ones(()))}
    sums = Sums()
    sums.add(pairs)
    sums.add(pairs)
    assert (sums.ratio("loss"), sums.pairs["loss"][0].item()) == (1, 2)
    assert pairs["loss"][0].item() == 1


def test_ratio_of_nothing_is_nan():
    sums = Sums()
    sums.add({"loss": (torch.zeros(()), torch.zeros(()))})
    assert np.isnan(sums.ratio("loss"))


def _report_over_ranks():
    """Split 40 rows as [0, 0, 1, 39], taking the last ``world_size`` parts: at least one rank has no rows."""
    outputs, targets = logits_and_targets(40)
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        edges = [0, 0, 1, 40][-runtime.world_size - 1 :]
        start, stop = edges[runtime.rank], edges[runtime.rank + 1]
        batches = [(outputs[start:stop], targets[start:stop])] if stop > start else []
        nothing = reduced([Sums()], LogicalRanks(runtime)).pairs
        return report_of(*batches, runtime=runtime), nothing


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_add_up_to_the_whole_with_and_without_rows(world):
    whole = report_of(logits_and_targets(40))
    for report, nothing in run_ranks(world, _report_over_ranks, group=False, timeout_s=30):
        assert nothing == {}
        assert report.pop("loss") == pytest.approx(whole["loss"])
        assert report == {key: value for key, value in whole.items() if key != "loss"}
