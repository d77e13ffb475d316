"""Losses and metrics that do not fit the labels are refused with the ones that do."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError
from tests.fixtures import make_config

MULTI = {"labels": {"column": "tags", "separator": "|"}}
NUMBERS = {"labels": {"kind": "regression", "column": ["x", "y"]}}


def task_of(folder, **options):
    return make_config(folder, task=options).task


@pytest.mark.parametrize(
    ("options", "kind", "loss", "metrics"),
    [
        ({}, "single_label", "cross_entropy", "top1 loss mean_class_accuracy"),
        (MULTI, "multi_label", "bce", "macro_f1 micro_f1 exact_match loss"),
        (NUMBERS, "regression", "mse", "rmse mae r2 loss"),
        ({"metrics": ["macro_f1", "top3"]}, "single_label", "cross_entropy", "macro_f1 top3 loss"),
    ],
)
def test_defaults_follow_the_labels(tmp_path, options, kind, loss, metrics):
    task = task_of(tmp_path, **options)
    assert (task.label_kind, task.loss_name) == (kind, loss)
    assert list(task.metrics) == metrics.split()
    assert {name: better for name, better in task.metrics.items() if better == "min"}.keys() <= {"loss", "rmse", "mae"}
    assert list(task.conflicts()) == []


@pytest.mark.parametrize(
    ("options", "key", "message", "hint"),
    [
        ({"loss": {"name": "mse"}}, "task.loss.name", "mse cannot be used with single_label", "bce or focal"),
        ({**MULTI, "loss": {"name": "cross_entropy"}}, "task.loss.name", "used with multi_label", "bce or focal"),
        ({**MULTI, "loss": {"name": "focall"}}, "task.loss.name", "there is no loss", "did you mean focal?"),
        ({**NUMBERS, "loss": {"name": "smooth_l1"}}, "task.loss.name", "there is no loss", "mse or l1 or huber"),
        ({**NUMBERS, "loss": {"class_weights": "balanced"}}, "task.loss.class_weights", "mse has no", "remove them"),
        ({"loss": {"name": "my.l", "class_weights": [1]}}, "task.loss.class_weights", "my.l has no", "task.loss.args"),
        ({"metrics": ["rmse"]}, "task.metrics", "rmse is not a metric of single_label", "top1"),
        ({"metrics": ["acuracy"]}, "task.metrics", "no metric 'acuracy'", "did you mean top1?"),
        ({"metrics": ["top0"]}, "task.metrics", "no metric 'top0'", "top1"),
        ({"metrics": ["torchmetrics.AUROC"]}, "task.metrics", "whether a higher AUROC is better", "better: max"),
        ({"metrics": ["top1", "top1"]}, "task.metrics", "top1 is listed twice", "key"),
        ({"metrics": [{"name": "top1", "args": {"k": 1}}]}, "task.metrics", "takes no settings", "top1"),
        ({"metrics": [{"name": "a.loss", "better": "min"}]}, "task.metrics", "of a built-in metric", "another key"),
        (
            {"metrics": [{"name": "a.b", "key": "top5", "better": "min"}]},
            "task.metrics",
            "of a built-in",
            "another key",
        ),
        ({**MULTI, "label_column": "tags"}, "task.label_column", "both set the column", "remove"),
        ({"labels": {"kind": "multi_label"}}, "task.labels", "needs a separator", 'separator: "|"'),
        ({"labels": {"column": ["a", "b"]}}, "task.labels", "only kind: regression takes several", "one column"),
        ({"labels": {"kind": "regression", "column": ["a", "a"]}}, "task.labels", "name at least one column", ""),
        ({"labels": {"kind": "regression", "column": []}}, "task.labels", "and each only once (found: [])", ""),
        (
            {"labels": {"kind": "regression", "separator": ","}},
            "task.labels",
            "are for kind: multi_label",
            "add separator: null, empty: error",
        ),
        ({"labels": {"kind": "multilabel"}}, "task.labels.kind", "did you mean multi_label?", ""),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, options, key, message, hint):
    with pytest.raises(ConfigError) as caught:
        make_config(tmp_path, task=options)
    text = str(caught.value)
    assert f": {key}: " in text
    assert message in text
    assert hint in text
    assert "1 problem in" in text


def test_best_metric_is_one_of_the_chosen(tmp_path):
    assert make_config(tmp_path, task=NUMBERS).best_metric == "rmse"
    assert make_config(tmp_path, task=NUMBERS, checkpoint={"best_metric": "r2"}).best_metric == "r2"
    with pytest.raises(ConfigError, match="no metric 'top1'"):
        make_config(tmp_path, task=MULTI, checkpoint={"best_metric": "top1"})
    with pytest.raises(ConfigError, match="1 problem .*\n.*there is no metric 'mse'"):
        make_config(tmp_path, task={**NUMBERS, "metrics": ["mse"]}, checkpoint={"best_metric": "r2"})
