"""Metrics against scikit-learn, and over ranks against the whole."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from harness.distributed.launch_env import detect
from harness.distributed.runtime import Runtime, open_runtime
from harness.training.metrics import MAX_CONFUSION, Sums, classification, classification_report
from tests.ranks import run_ranks

CLASSES = 7


def logits_and_targets(num_rows: int, classes: int = CLASSES):
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, classes, generator=generator), torch.randint(classes, (num_rows,), generator=generator)


def report_of(*batches, classes: int = CLASSES, runtime: Runtime | None = None):
    sums = Sums()
    for outputs, targets in batches:
        sums.add(classification(outputs, targets, classes))
    return classification_report(sums.reduce(runtime or Runtime()), range(classes))


def test_against_scikit_learn():
    reference = pytest.importorskip("sklearn.metrics")
    outputs, targets = logits_and_targets(200)
    guesses, labels = outputs.argmax(1).numpy(), np.arange(CLASSES)
    report = report_of((outputs, targets))
    assert report["top1"] == pytest.approx(reference.accuracy_score(targets, guesses))
    assert report["top5"] == pytest.approx(reference.top_k_accuracy_score(targets, outputs.numpy(), k=5, labels=labels))
    assert report["loss"] == pytest.approx(reference.log_loss(targets, outputs.softmax(1).numpy(), labels=labels))
    assert report["mean_class_accuracy"] == pytest.approx(reference.balanced_accuracy_score(targets, guesses))
    assert report["confusion"] == reference.confusion_matrix(targets, guesses, labels=labels).tolist()
    recalls = reference.recall_score(targets, guesses, average=None)
    assert list(report["class_accuracy"].values()) == pytest.approx(recalls.tolist())


def test_by_hand():
    outputs = torch.tensor([[5.0, 0, 0], [0, 5, 0], [0, 5, 0], [5, 0, 0]])
    report = report_of((outputs, torch.tensor([0, 1, 0, 0])), classes=3)
    assert report["top1"] == 0.75
    assert report["class_accuracy"] == {"0": 2 / 3, "1": 1.0, "2": None}
    assert report["mean_class_accuracy"] == pytest.approx(5 / 6)  # of the classes that occur
    assert report["confusion"] == [[2, 1, 0], [0, 1, 0], [0, 0, 0]]  # (label, prediction)


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_top5_of_few_classes_is_everything(classes):
    assert report_of(logits_and_targets(20, classes), classes=classes)["top5"] == 1.0


def test_batches_of_any_size_make_the_whole():
    outputs, targets = logits_and_targets(50)
    whole = report_of((outputs, targets))
    edges = [0, 1, 2, 20, 50]
    parts = report_of(*((outputs[a:b], targets[a:b]) for a, b in zip(edges, edges[1:], strict=False)))
    assert parts.pop("loss") == pytest.approx(whole.pop("loss"))
    assert parts == whole


def test_half_precision_outputs_are_summed_in_more():
    outputs, targets = logits_and_targets(300)
    low, high = report_of((outputs.bfloat16(), targets)), report_of((outputs.bfloat16().float(), targets))
    assert low == high
    assert classification(outputs.half(), targets, CLASSES)["loss"][0].dtype is torch.float32


def test_too_many_classes_have_no_confusion_matrix():
    outputs = torch.zeros(2, MAX_CONFUSION + 1)
    targets = torch.tensor([0, MAX_CONFUSION])
    assert "confusion" not in classification(outputs, targets, MAX_CONFUSION + 1)
    assert "confusion" not in report_of((outputs, targets), classes=MAX_CONFUSION + 1)
    assert "confusion" in classification(outputs[:1, :-1], targets[:1], MAX_CONFUSION)


def test_adding_does_not_change_what_was_added():
    pairs = {"loss": (torch.ones(()), torch.ones(()))}
    sums = Sums()
    sums.add(pairs)
    sums.add(pairs)
    assert sums.ratio("loss") == 1
    assert pairs["loss"][0].item() == 1
    assert sums.pairs["loss"][0].item() == 2


def test_nothing_counted():
    assert Sums().reduce(Runtime()).pairs == {}
    sums = Sums()
    sums.add({"loss": (torch.zeros(()), torch.zeros(()))})
    assert np.isnan(sums.ratio("loss"))


def _report_over_ranks():
    """Rank r has rows [0, 0, 1, rest] of 40: the first two ranks have nothing."""
    outputs, targets = logits_and_targets(40)
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        edges = [0, 0, 1, 40][-runtime.world_size - 1 :]
        start, stop = edges[runtime.rank], edges[runtime.rank + 1]
        batches = [(outputs[start:stop], targets[start:stop])] if stop > start else []
        nothing = Sums().reduce(runtime).pairs
        return report_of(*batches, runtime=runtime), nothing


@pytest.mark.parametrize("world", [2, 3])
def test_over_ranks_it_is_the_whole_also_where_one_has_no_rows(world):
    whole = report_of(logits_and_targets(40))
    for report, nothing in run_ranks(world, _report_over_ranks, group=False, timeout_s=30):
        assert nothing == {}
        assert report.pop("loss") == pytest.approx(whole["loss"])
        assert report == {key: value for key, value in whole.items() if key != "loss"}
