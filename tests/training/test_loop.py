"""When a run logs, evaluates and saves; and, on the GPU of tests/syncs.py, when the host waits for the device, and that
what it does later gives the same results.

The table in benchmarks/results/waits.md is counted there, too.
"""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from harness.config import loader
from harness.data.shards import Segment
from harness.distributed.runtime import Runtime
from harness.runs.checkpoint import steps
from harness.training import counting, loop
from harness.training.optimizer.precision import Precision
from harness.training.run import Run
from tests import sync_table, syncs
from tests.end_to_end.experiment import assert_same, last_checkpoint, record
from tests.fixtures import make_config, settings, write_rows, write_yaml

OPTIMIZERS = {
    "sgd": {"name": "sgd", "momentum": 0.9}, "adam": {"name": "adam"}, "fused_adam": {"name": "fused_adam"},
    "fused_sgd": {"name": "fused_sgd", "momentum": 0.9}, "fused_lamb": {"name": "fused_lamb"},
    "rmsprop": {"name": "rmsprop"},  # which cannot skip a step by itself
}  # fmt: skip


class Overflows(nn.Module):
    """A small network whose gradients are infinite for the batch with row LAST: once per epoch."""

    LAST = 23

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.layers(images)
        if outputs.requires_grad:
            overflows = images[:, 0, 0, 0].max() > (self.LAST - 0.5) / 127.5 - 1  # the first pixel is the row
            outputs.register_hook(lambda gradient: torch.where(overflows, torch.inf, gradient))
        return outputs


@pytest.mark.parametrize(
    "strategy", ["none", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_table_of_waits_is_current(tmp_path, strategy):
    counts = sync_table.all_counts(tmp_path, strategy)
    assert sync_table.written(strategy) == sync_table.rows(counts), "run python -m tests.sync_table"
    for level, parts in counts.items():
        waits = {part: [sync.where for sync in found] for part, found in parts.items()}
        assert not waits["a batch of an evaluation"]
        assert not waits["a log line"]
        assert len(waits["the end of an evaluation"]) == 1
        overflow = 1 if level == "O2" or (level == "O1" and strategy == "fsdp") else 0
        assert len(waits["a step"]) == overflow, waits["a step"]
        assert waits["a step with `train.clip_norm`"] == waits["a step with `train.ema_decay`"] == waits["a step"]
        assert len(waits["a step with `train.on_nan: skip`"]) == (2 if level in ("O1", "O2") else 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("level", sync_table.LEVELS)
def test_steps_on_a_cuda_device_wait_as_often_as_the_table_says(tmp_path, built, level):
    """torch itself counts: a step at O2 waits once, a step at any other level does not."""
    write_rows(tmp_path, "train", 96)
    write_rows(tmp_path, "eval", 24)
    model = {"name": "small_cnn", "args": {"width": 4}}
    tree = settings(tmp_path, model=model, precision={"opt_level": level}, runtime={"device": "cuda"},
                    train={"epochs": 2, "log_every": 1, "deterministic": False})  # fmt: skip
    run = built(loader.load(write_yaml(tmp_path / "config.yaml", tree)), Runtime(device=torch.device("cuda:0")))
    groups = iter(run.train_data.groups(0, []))
    for _ in range(3):
        loop.step(run, next(groups))
    counting.catch_up(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(2):
                loop.step(run, next(groups))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    assert len(waits) == (2 if level == "O2" else 0), [(wait.filename, wait.lineno) for wait in waits]


def test_when_a_run_logs_evaluates_and_saves(tmp_path, built):
    """Intervals count from the start of the run. Before an evaluation, there is a line and a checkpoint."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 3)
    train = {"epochs": 2, "log_every": "4 steps", "evaluate_every": "5 steps", "deterministic": False}
    checkpoint = {"every": "4 steps", "keep": 99}
    run = built(make_config(tmp_path, batch={"global": 2}, train=train, checkpoint=checkpoint))
    assert loop.train(run)
    entries = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    lines = [entry for entry in entries if entry["split"] == "train"]
    assert [line["step"] for line in lines] == [4, 5, 6, 8, 10, 12]  # an epoch has 6 steps
    assert all(line["grad_norm"] for line in lines)
    assert [entry["step"] for entry in entries if entry["split"] == "eval"] == [5, 10, 12]
    assert sorted(steps(run.checkpoints.folder)) == [4, 5, 6, 8, 10, 12]
    rows = [after - before for before, after in pairwise([0, *(line["samples"] for line in lines)])]
    spent_s = sum(num / line["samples_per_s"] for num, line in zip(rows, lines, strict=True))
    assert run.state.train_s == pytest.approx(spent_s)


def test_part_of_an_epoch_that_another_number_of_ranks_began(tmp_path, built):
    """Two ranks have taken 2 steps of 2 rows each. One rank has 2 left; from the start, it would have taken 6."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 3)
    train = {"evaluate_every": "0.5 epochs", "deterministic": False}
    run = built(make_config(tmp_path, ["batch={global: null, per_rank: 2}"], train=train))
    run.state.segments, run.state.step = [Segment(2, 2, 2)], 2
    assert (run.evaluation_due(), run.steps_to_evaluation()) == (True, 2)


def test_an_evaluation_that_was_due_is_due_on_other_ranks(tmp_path, built):
    """Two ranks have taken 3 of 6 steps. For one rank, which has 6 left, the middle of the epoch is at step 5."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 3)
    train = {"evaluate_every": "0.5 epochs", "deterministic": False}
    run = built(make_config(tmp_path, ["batch={global: null, per_rank: 1}"], train=train))
    run.state.segments, run.state.step = [Segment(2, 1, 3)], 3
    assert (run.evaluation_due(), run.steps_to_evaluation()) == (True, 2)
    run.state.evaluated = 3
    assert not run.evaluation_due()


def test_the_confusion_matrix_is_of_the_best_evaluation(tmp_path, built):
    """As are the weights and predictions.csv."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 3)
    run = built(make_config(tmp_path, train={"deterministic": False}))
    found = {"rows": 3, "rows_used": 3, "bad_rows": 0, "samples_per_s": 1.0, "class_accuracy": {"a": 0.5, "b": 1.0}}
    assert run.config.best_metric == "top1"
    for top1, counts in ((0.25, [[0, 2], [0, 1]]), (0.75, [[1, 1], [0, 1]]), (0.0, [[0, 2], [1, 0]])):
        run.state.step += 1
        report = {**found, **dict.fromkeys(run.config.task.metrics, 1.0), "top1": top1, "confusion": counts}
        with (
            mock.patch.object(loop, "evaluate", lambda run, report=report: report),
            mock.patch.object(loop, "keep_best"),
        ):
            loop.evaluation(run)
    assert (run.folder.path / "confusion.csv").read_text() == "label,a,b\na,1,1\nb,0,1\n"


@pytest.fixture
def start(tmp_path, built):
    """A function that builds a run of 18 steps in 3 epochs on the GPU, of which one overflows in each."""
    write_rows(tmp_path, "train", 24)
    write_rows(tmp_path, "eval", 4)

    def start(name: str, *overrides: str, optimizer: str = "sgd") -> Run:
        tree = settings(
            tmp_path, name=name, model={"name": "tests.training.test_loop.Overflows"},
            train={"epochs": 3, "log_every": 4, "deterministic": False, "ema_decay": 0.9, "clip_norm": 1.0},
            optimizer={"lr": 0.05, **OPTIMIZERS[optimizer]}, schedule={"name": "cosine", "warmup": 0.5},
            precision={"opt_level": "O1"}, checkpoint={"every": 3},
        )  # fmt: skip
        config = loader.load(write_yaml(tmp_path / f"{name}.yaml", tree), ["runtime.device=cuda", *overrides])
        return built(config, Runtime(device=torch.device("cuda:0")))

    with syncs.fake_gpu():
        yield start


def finished(run: Run) -> tuple[list[dict], dict]:
    assert loop.train(run)
    folder = run.folder.metrics.parent
    return record(folder), last_checkpoint(folder)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_late_decisions_give_the_same_bits(start, optimizer):
    late = finished(start("late", optimizer=optimizer))
    with (
        mock.patch.object(Precision, "skip_flag", Precision.will_skip),
        mock.patch.object(loop, "end_window", _at_once),
    ):
        at_once = finished(start("at-once", optimizer=optimizer))
    assert (late[1]["state"]["skipped"], late[1]["state"]["applied"]) == (3, 15)
    assert_same(late[0], at_once[0], "metrics.jsonl")
    assert_same(late[1], at_once[1], "checkpoint")


def _at_once(run: Run) -> None:
    counting.collect_waits(run)
    run.meter.end_window(run.precision.loss_scale())
    counting.write_line(run)


@pytest.mark.parametrize(("number", "saved"), [(5, 3), (7, 6)], ids=["within an epoch", "after an epoch"])
def test_run_that_is_killed_with_an_open_decision_resumes_exactly(start, number, saved):
    """The decision about the step before a checkpoint is open until then, too."""
    whole = finished(start("whole"))
    first, step = start("broken"), loop.step
    killed = mock.patch.object(loop, "step", lambda run, *rest, **more: _killed_after(number, step, run, *rest, **more))
    with killed, pytest.raises(InterruptedError):
        loop.train(first)
    assert first.uncounted is not None
    resumed = start("broken")
    assert resumed.state.step == saved
    assert_same(finished(resumed), whole)


def _killed_after(number, step, run, *rest, **more):
    step(run, *rest, **more)
    if run.step == number:
        raise InterruptedError


def test_host_waits_for_a_step_only_when_the_device_has_the_next_one(start):
    run = start("order")
    groups = iter(run.train_data.groups(0, []))
    for _ in range(3):
        loop.step(run, next(groups), measured=True)
    assert run.uncounted is not None
    counting.end_window(run)
    gpu = syncs._gpu
    gpu.order.clear()
    with mock.patch.object(syncs.Event, "query", return_value=False):
        loop.step(run, next(groups))
    names = [what for _, what in gpu.order]
    waits = [place for place, (stream, _) in enumerate(gpu.order) if stream == "host"]
    assert len(waits) == 3, names  # for the decision, the end of the window, and the values of the line
    backward = max(place for place, what in enumerate(names) if what == "convolution_backward")
    assert min(waits) > backward
    recorded = [what.removeprefix("record ") for what in names if what.startswith("record event")]
    assert not [names[place] for place in waits if any(names[place].startswith(f"wait for {e} ") for e in recorded)]
