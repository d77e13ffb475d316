"""The facts of a run, or every error in its configuration, before anything is started."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.errors import ConfigError, DataError
from harness.training import preflight
from tests.fixtures import settings, write_rows, write_yaml


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path, "train", 20)
    write_rows(tmp_path, "eval", 6)
    return tmp_path


def examine(folder, *overrides, world=1, **sections):
    return preflight.examine(str(write_yaml(folder / "x.yaml", settings(folder, **sections))), overrides, world)


def test_facts(folder):
    facts, problems = examine(folder, "batch.accumulate=2", "train.epochs=3", world=2)
    assert problems == []
    assert facts["model"] == "linear, 195 parameters"
    assert facts["train rows"] == 20
    assert facts["batch"] == "2 per rank, 4 in total, in 2 micro-batches"
    assert facts["steps"] == "5 per epoch, 15 in total"
    assert facts["amp"].startswith("O1 by harness.apex; on this CPU, ")
    assert facts["ranks"] == 2
    assert not (folder / "runs").exists()  # nothing was started


def test_operation_without_a_deterministic_implementation(folder, monkeypatch):
    """Named for any machine; an error where training would run on CUDA and refuse it."""
    model = {"model": {"name": "tests.training.test_preflight.Pooled"}}
    facts, problems = examine(folder, **model)
    assert facts["deterministic"].endswith("others are refused; without one on CUDA: AdaptiveAvgPool2d")
    assert problems == []
    monkeypatch.setattr(preflight.devices, "choose", lambda *_: torch.device("cuda"))
    (problem,) = examine(folder, **model)[1]
    assert "train.deterministic: on CUDA, torch has no deterministic implementation of AdaptiveAvgPool2d" in str(
        problem
    )
    assert "x.mean((-2, -1))" in problem.hint
    for level in ("warn", "false"):
        assert examine(folder, f"train.deterministic={level}", **model)[1] == []


class Pooled(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features, self.layer = nn.Conv2d(1, 1, 3), nn.Linear(4, num_classes)

    def forward(self, images):
        return self.layer(nn.functional.adaptive_avg_pool2d(self.features(images), 2).flatten(1))


def test_scaled_learning_rate(folder):
    facts, _ = examine(folder, optimizer={"lr": 0.1, "lr_scaling": "linear", "lr_base_batch": 2})
    assert facts["learning rate"] == "0.2 (linear scaling of 0.1)"


def test_independent_errors_are_reported_together(folder):
    facts, problems = examine(
        folder, world=3, model={"name": "small_cnm"}, optimizer={"name": "adamm"}, precision={"backend": "apex"},
        runtime={"device": "auto"}, parallel={"strategy": "none"},
    )  # fmt: skip
    text = "\n".join(str(problem) for problem in problems)
    for words in (
        "precision.backend=apex, but",
        "4 rows cannot be divided among 3 ranks",
        "use batch.global=3 or batch.global=6",
        "unknown model 'small_cnm'",
        "unknown optimizer 'adamm'",
        "parallel.strategy=none runs in one process, but 3 were started",
    ):
        assert words in text
    assert len(problems) == 5
    assert {type(problem) for problem in problems} == {ConfigError}


def test_errors_of_data_do_not_hide_other_errors(folder):
    (folder / "eval.csv").unlink()
    _, problems = examine(folder, optimizer={"name": "adamm"})
    assert [type(problem) for problem in problems] == [DataError, ConfigError]


def test_unreadable_configuration_is_the_only_error(folder):
    facts, problems = examine(folder, "train.epoch=3")
    assert facts == {}
    assert len(problems) == 1


def test_too_few_rows(folder):
    _, problems = examine(folder, "batch.global=48", world=24)
    assert "20 training rows for 24 ranks" in str(problems[0])
    _, problems = examine(folder, "batch.global=32", "data.tail=drop")
    assert "do not fill one global batch of 32" in str(problems[0])


def test_error_of_an_own_task_is_one_of_the_errors(folder, monkeypatch):
    def fails(*_):
        raise KeyError("planned")

    monkeypatch.setattr("harness.tasks.image_csv.config.Task.open", fails)
    _, errors = examine(folder, "trackers=[wandb]")
    text = "\n".join(map(str, errors))
    assert "fails (test_preflight.py:" in text
    assert "KeyError: 'planned'" in text
