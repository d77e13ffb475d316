"""Evaluation on several ranks: all of them decide by the same numbers."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from harness import cli
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.errors import HarnessError
from harness.training.evaluation import evaluate
from harness.training.evaluation.sums import Sums
from tests.fixtures import settings, write_rows, write_yaml
from tests.ranks import run_ranks

HERE = "tests.training.test_evaluate"
EPOCHS = 4
_calls = [0]


def contrary(outputs: Tensor, targets: Tensor) -> float:
    """A metric that rises with every call on rank 0, and falls on the others."""
    _calls[0] += 1
    return float(_calls[0] if os.environ["RANK"] == "0" else -_calls[0])


@pytest.mark.parametrize(
    "schedule",
    [{"name": "constant"}, {"name": "plateau", "args": {"patience": 0, "factor": 0.5}}],
    ids=["patience", "plateau"],
)
def test_ranks_whose_metrics_differ_train_to_the_end_by_those_of_rank_0(tmp_path, schedule):
    """Otherwise rank 0 alone keeps the best weights, or rank 1 alone stops for patience, and waits for the other."""
    for name, rows in (("train", 8), ("eval", 6)):
        write_rows(tmp_path, name, rows)
    task = {"metrics": ["loss", {"name": f"{HERE}.contrary", "better": "max"}]}
    metric = "contrary"
    train = {"epochs": EPOCHS, "patience": 2, "deterministic": False}
    tree = settings(
        tmp_path, task=task, train=train, schedule=schedule, checkpoint={"best_metric": metric},
        runtime={"device": "cpu", "timeout_s": 20},
    )  # fmt: skip
    config = write_yaml(tmp_path / "config.yaml", tree)
    assert run_ranks(2, cli.main, ["train", "-c", str(config)], group=False, timeout_s=90) == [0, 0]
    summary = json.loads((tmp_path / "runs" / "small" / "summary.json").read_text())
    values = [entry[metric] for entry in summary["history"]]
    assert len(values) == EPOCHS
    assert values == sorted(values)
    assert summary["best"] == {metric: values[-1], "step": summary["step"]}
    log = (tmp_path / "runs" / "small" / "metrics.jsonl").read_text().splitlines()
    rates = {entry["lr"] for entry in map(json.loads, log) if entry["split"] == "train"}
    assert len(rates) == 1  # rank 1's values alone would have lowered it


class _Reporter:
    """A task whose report is another one on each rank, and fails on rank ``fails``."""

    def __init__(self, rank: int, fails: int | None) -> None:
        self.rank, self.fails = rank, fails

    def report(self, sums: Sums) -> dict[str, Any]:
        if self.rank == self.fails:
            raise ValueError("no such file: words.txt")
        return {"loss": 1.0 + self.rank, "confusion": [[self.rank]], f"only_of_{self.rank}": 3}


def _reports(fails: int | None) -> dict[str, Any] | str:
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        section = SimpleNamespace(task=SimpleNamespace(metrics={"loss": "min"}))
        run: Any = SimpleNamespace(runtime=runtime, task=_Reporter(runtime.rank, fails), config=section)
        try:
            return evaluate.report(run, Sums())
        except (HarnessError, ValueError) as error:
            return f"{error} of {getattr(error, 'origin_rank', runtime.rank)}"


def test_numbers_are_those_of_rank_0():
    first, second = run_ranks(2, _reports, None, group=False)
    assert first == {"loss": 1.0, "confusion": [[0]], "only_of_0": 3}
    assert {key: second[key] for key in first} == {**first, "confusion": [[1]]}  # only rank 0 writes it


@pytest.mark.parametrize("rank", [0, 1])
def test_error_in_the_report_of_one_rank_is_raised_on_all(rank):
    for text in run_ranks(2, _reports, rank, group=False):
        assert "no such file: words.txt" in text
        assert text.endswith(f"of {rank}")
