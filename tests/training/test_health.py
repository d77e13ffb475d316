"""Runs that stopped learning fail, and those that only look like it do not. More of several ranks: end_to_end."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.errors import DataError, OwnCodeError, TrainingError
from harness.training import loop, run_log
from harness.training.health import Health
from harness.training.run import Run
from harness.training.state import State
from tests.fixtures import make_config, write_rows
from tests.ranks import run_ranks

HERE = "tests.training.test_health"
NUM_TRAIN, STEPS = 12, 3  # rows and steps of an epoch


class Spoiled(nn.Module):
    """A linear model with a mask of -inf, which from training step ``step`` on (from 1) does what ``how`` says."""

    def __init__(self, num_classes: int, how: str = "", step: int = 1) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(num_classes)
        self.norm = nn.BatchNorm1d(num_classes)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.how, self.left = how, step

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        logits = self.norm(self.layer(images.flatten(1))) + self.mask[0, 0]
        if self.left > 0:
            return logits
        if not self.training:
            return logits * torch.nan if self.how == "nan evaluation" else logits
        if self.how == "nan loss once" and self.left == 0:
            return logits * torch.nan
        if self.how == "nan statistics":
            self.norm.running_var = torch.tensor([1.0, torch.nan, 1.0])
        elif self.how == "endless gradients":
            logits.register_hook(lambda gradient: gradient * torch.inf)
        elif self.how == "large gradients":  # finite once the loss scale has fallen
            logits.register_hook(lambda gradient: torch.where(gradient.abs().max() > 1, torch.inf, gradient))
        return logits


@pytest.fixture
def start(tmp_path, monkeypatch, built):
    """Builds a run on one rank, in this process; ``how`` and ``step`` are those of Spoiled."""
    write_rows(tmp_path, "train", NUM_TRAIN)
    write_rows(tmp_path, "eval", 6)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that it is restored

    def begin(how: str = "", step: int = 1, *overrides: str, **sections) -> Run:
        model = {"name": f"{HERE}.Spoiled", "args": {"how": how, "step": step}}
        config = make_config(
            tmp_path,
            ["train.epochs=4", "train.log_every=2", "optimizer.lr=0.01", "precision.max_loss_scale=1024", *overrides],
            model=model,
            **sections,
        )
        return built(config)

    return begin


def failure(run: Run) -> str:
    with pytest.raises(TrainingError) as raised:
        loop.train(run)
    assert raised.value.exit_code == 70
    return str(raised.value)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_nan_loss_stops_at_the_next_log_line_or_is_skipped(start, level):
    settings = [f"precision.opt_level={level}", "optimizer.momentum=0.9"]
    text = failure(start("nan loss once", 4, *settings))  # in the second epoch
    assert "the loss became nan in the last step (step 4, epoch 2, loss scale " in text
    layer = "first non-finite layer: layer.weight" if level == "O0" else "all weights are finite; the largest is in "
    assert layer in text
    assert ("train.on_nan=skip" in text) == (level != "O0")
    assert "lower optimizer.lr (now 0.01), or set train.clip_norm=1" in text
    # There is a checkpoint of the first epoch, for which neither is of use.
    assert "opt_level=O4" not in text
    assert "schedule.warmup" not in text
    run = start("nan loss once", 4, *settings, "train.on_nan=skip")
    assert loop.train(run)
    assert (run.state.skipped, run.state.applied) == (1, 4 * STEPS - 1)
    assert all(math.isfinite(entry["loss"]) for entry in run.state.history)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", ["fused_adam", "fused_lamb", "fused_novograd", "adamw"])
def test_optimizers_do_not_count_a_skipped_step(start, name, level):
    run = start("nan loss once", 4, f"optimizer.name={name}", f"precision.opt_level={level}", "train.on_nan=skip")
    assert loop.train(run)
    assert run.state.skipped == 1
    steps = [entry["step"] for entry in (*run.optimizer.param_groups, *run.optimizer.state.values()) if "step" in entry]
    assert steps
    assert {int(step) for step in steps} == {run.state.applied}


def test_a_run_without_a_checkpoint_may_start_again_in_other_ways(start):
    text = failure(start("nan loss once", 1, "precision.opt_level=O1"))
    assert "or set schedule.warmup=1, or use precision.opt_level=O4 (bfloat16)" in text
    assert "there is no good checkpoint to continue from" in text


def test_infinite_loss_with_finite_gradients_is_skipped(start, monkeypatch):
    run, calls = start("", 1, "train.on_nan=skip", "precision.opt_level=O0"), itertools.count()
    loss = type(run.task).loss
    monkeypatch.setattr(
        type(run.task), "loss", lambda *given: loss(*given) + (torch.inf if next(calls) == STEPS else 0)
    )
    assert loop.train(run)
    assert (run.state.skipped, run.state.applied) == (1, 4 * STEPS - 1)


@pytest.mark.parametrize("how", ["nan statistics", "nan evaluation", "nan average"])
def test_diverged_model_never_replaces_the_best(start, tmp_path, how):
    run = start(how, 4, "train.ema_decay=0.5")
    if how == "nan average":
        update = run.ema.update

        def spoil(sources):
            update(sources)
            if run.state.step >= STEPS:
                run.ema.average[2][0] = torch.inf

        run.ema.update = spoil
    text = failure(run)
    assert {
        "nan statistics": "first non-finite layer: norm.running_var (1 of 10 tensors)",
        "nan evaluation": "the validation loss is nan (step 6, epoch 2, loss scale 1024); all weights are finite",
        "nan average": "first non-finite layer: the moving average of norm.weight (1 of 10 tensors)",
    }[how] in text
    folder = tmp_path / "runs" / "small"
    good = folder / "checkpoints" / f"step-{STEPS}"
    assert f"name=small-2 checkpoint.resume={good}" in text
    assert (folder / "checkpoints" / "best").read_text().strip() == good.name
    best = load_file(folder / "weights.safetensors")
    assert all(value.isfinite().all() for name, value in best.items() if name != "mask")
    # What the message says to type works.
    again = start("", 1, "name=small-2", f"checkpoint.resume={good}", "optimizer.lr=0.001")
    assert again.state.step == STEPS
    assert loop.train(again)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_weights_are_checked_without_a_loss(start, level):
    """A layer that the loss does not depend on."""
    run = start("", 1, f"precision.opt_level={level}")
    with torch.no_grad():
        run.module.layer.bias[0] = torch.inf
    run.module.norm = nn.Identity()
    run.module.layer.forward = lambda inputs: inputs[:, :3] * run.module.layer.weight.sum()
    assert "first non-finite layer: layer.bias" in failure(run)


def test_a_changed_number_of_threads_is_noticed_once(start, caplog):
    run = start("", 1)
    run.this_start.num_threads += 1  # as if the task had lowered it
    assert loop.train(run)
    assert caplog.text.count("the number of torch's threads has changed") == 1


def test_state_of_the_optimizer_is_checked(start):
    """An infinite second moment stops a weight for good, without a sign in loss or weights."""
    run = start("", 1, "optimizer.name=adam")
    step = run.optimizer.step

    def overflow(*arguments):
        step(*arguments)
        if run.state.step == STEPS:  # the first of the second epoch
            run.optimizer.state[run.module.layer.bias]["exp_avg_sq"][0] = torch.inf

    run.optimizer.step = overflow
    text = failure(run)
    assert "the optimizer's exp_avg_sq of layer.bias is no longer finite (step 6, epoch 2" in text
    assert f"step-{STEPS}" in text


def _with_an_infinite_moment_on_rank_1(folder: Path) -> str:
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        torch.manual_seed(0)
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if runtime.rank == 1:
            optimizer.state[layer.weight]["exp_avg_sq"][0, 0] = torch.inf
        precision = SimpleNamespace(loss_scale=lambda: 1.0)
        health = Health(make_config(folder), runtime, precision, layer, None, optimizer, "runs/x")
        with pytest.raises(TrainingError) as raised:
            health.weights(State(step=1), 0)
        return raised.value.message


def test_state_of_the_optimizer_on_one_rank_fails_all(tmp_path):
    """Under fsdp, each rank has that of its shards."""
    for text in run_ranks(2, _with_an_infinite_moment_on_rank_1, tmp_path, group=False):
        assert "the optimizer's exp_avg_sq of weight is no longer finite" in text


def _with_other_weights_on_rank_1(folder: Path, deterministic: bool | str) -> tuple[str, str]:
    warned, handler = [], logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("harness").addHandler(handler)
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        layer = nn.Linear(2, 1)
        nn.init.constant_(layer.weight, 1.0)
        nn.init.constant_(layer.bias, 0.25 * runtime.rank)
        config = make_config(folder, train={"deterministic": deterministic})
        precision = SimpleNamespace(loss_scale=lambda: 1.0)
        health = Health(config, runtime, precision, layer, None, torch.optim.SGD(layer.parameters()), "runs/x")
        try:
            health.weights(State(step=1), 0)
        except TrainingError as error:
            return "error", error.message
        return "warning", "".join(warned)


@pytest.mark.parametrize("deterministic", [True, "warn"])
def test_weights_that_differ_between_ranks(tmp_path, deterministic):
    """As after noise that each rank draws for itself."""
    for kind, text in run_ranks(2, _with_other_weights_on_rank_1, tmp_path, deterministic, group=False):
        assert kind == ("error" if deterministic is True else "warning")
        assert "bias is up to 0 on rank 0, 0.25 on rank 1" in text


def test_first_epochs_may_pass_until_the_loss_scale_fits(start):
    run = start("large gradients", 1, "precision.opt_level=O2")
    assert loop.train(run)
    skipped = [json.loads(line)["steps_skipped"] for line in run.folder.metrics.read_text().splitlines()
               if '"split": "epoch"' in line]  # fmt: skip
    assert skipped[:2] == [STEPS, STEPS]
    assert run.state.applied > 0


@pytest.mark.parametrize("settings", [["precision.opt_level=O1"], ["precision.opt_level=O0", "train.on_nan=skip"]])
def test_epoch_without_an_update_fails(start, settings):
    text = failure(start("endless gradients", 2 * STEPS + 1, "train.epochs=20", *settings))
    # From 1024 the scale reaches 1 in 10 steps, from the third epoch on; a static scale fails the first such epoch.
    place = "step 18, epoch 6" if "precision.opt_level=O1" in settings else "step 9, epoch 3"
    assert "no step of epoch" in text
    assert "updated the weights (3 skipped)" in text
    assert f"({place}, loss scale 1)" in text


def test_run_without_an_update_warns(start, caplog):
    assert loop.train(start("large gradients", 1, "precision.opt_level=O2", "train.max_steps=2"))
    assert "no step updated the weights (2 skipped), which are still the initial ones" in caplog.text
    assert "has fallen to 256" in caplog.text


def test_rows_of_skipped_steps_are_told_apart(start, caplog):
    """Also for a run that is shorter than train.log_every."""
    run = start("nan loss once", 2, "train.on_nan=skip", "train.epochs=1", "train.log_every=50", "batch.global=5")
    with caplog.at_level("INFO", "harness"):
        run.tracker.log, entries = lambda split, values: entries.append({"split": split, **values}), []
        assert loop.train(run)
    epoch = next(entry for entry in entries if entry["split"] == "epoch")
    assert [epoch[key] for key in ("rows_used", "rows_updated", "rows", "steps_skipped")] == [12, 7, 12, 1]
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert (summary["samples"], summary["samples_skipped"], summary["skipped"]) == (12, 5, 1)
    assert run.throughput() == pytest.approx(12 / run.state.train_s)
    assert run_log.total_s(run) == summary["wall_s"] < run.wall_s(), "one number, whenever it is asked for"
    used = (
        r"epoch 1/1  step 3/3  end of the epoch: mean loss \d\.\d{4}  12 of 12 rows used; "
        "7 of them updated the weights, and 5 belonged to 1 step skipped"
    )
    assert re.search(used, caplog.text)


def test_the_loss_of_an_epoch_is_the_mean_over_its_rows(start, caplog):
    """The sums do not depend on where log lines fall, and start at zero in the next epoch."""
    run = start("", 2, "train.epochs=2", "train.log_every=2", "batch.global=5")
    with caplog.at_level("INFO", "harness"):
        run.tracker.log, entries = lambda split, values: entries.append({"split": split, **values}), []
        assert loop.train(run)
    first, second, third, fourth = (entry["loss"] for entry in entries if entry["split"] == "train")
    means = (10 * first + 2 * second) / 12, (5 * third + 7 * fourth) / 12  # log lines of steps 1-2, 3, 4 and 5-6
    shown = re.findall(r"end of the epoch: mean loss (\S+)  ", caplog.text)
    assert shown == [f"{mean:.4f}" for mean in means]
    assert len({*shown}) == 2
    assert [entry["epoch"] for entry in entries if entry["split"] == "train"] == [1, 1, 2, 2]
    finished = [entry["epoch"] for entry in entries if entry["split"] != "train"]
    assert finished == [1, 1, 2, 2], "as the evaluation at the end of an epoch, its entry counts the finished ones"


def test_an_unreadable_row_that_is_read_twice_for_batch_norm_counts_once(start, tmp_path):
    """Nor does the row that replaces it count again."""
    run = start("", 1, "train.epochs=1", "batch.global=11", task={"on_bad_row": "skip"})
    _, (last,) = islice(run.train_data.groups(0, []), 2)  # not to its end, which would count as an epoch
    (row,) = last.rows
    (tmp_path / "train_images" / f"{row}.png").write_bytes(b"not an image")
    assert loop.train(run)
    epoch = json.loads(run.folder.metrics.read_text().splitlines()[-2])
    assert [epoch[key] for key in ("rows_used", "rows", "rows_repeated", "bad_rows")] == [11, 12, 0, 1]


def test_replacements_of_an_unreadable_row_are_told_once(start, tmp_path, caplog):
    caplog.set_level("INFO", "harness")
    (tmp_path / "train_images" / "3.png").write_bytes(b"not an image")
    assert loop.train(start("", 1, "train.epochs=2", "batch.global=12", task={"on_bad_row": "skip"}))
    assert "replaced 1 time so far" in caplog.text
    assert "replaced 2 times" not in caplog.text


def test_progress_says_that_all_steps_were_skipped(start):
    run, shown = start("large gradients", 1, "precision.opt_level=O1", "train.log_every=3"), []
    run.progress.show = shown.append
    loop.train(run)
    assert shown[0].startswith("skipped: all of steps 1-3, loss scale 128  lr ")
    assert shown[-1].startswith("loss ")


def test_evaluation_without_a_readable_row(start, tmp_path):
    for image in (tmp_path / "eval_images").iterdir():
        image.write_bytes(b"not an image")
    error = r"cannot be read, and no readable image replaces it \(rows tried: 5\)"
    with pytest.raises(DataError, match=error) as caught:
        loop.train(start("", 1, task={"on_bad_row": "skip"}))
    assert "which are damaged or not images" in caught.value.hint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(0.5), ""),
        (np.float32(0.5), ""),
        ("x", "ImageCsv.report() returned 'x' for metric 'loss'"),
        (None, "ImageCsv.report() returned no metric 'loss', only "),
    ],
)
def test_report_of_a_task_is_checked(start, monkeypatch, value, message):
    run = start("", 1, "train.epochs=1")
    report = type(run.task).report

    def changed(task, sums):
        found = {**report(task, sums), "loss": value}
        return {key: each for key, each in found.items() if each is not None}

    monkeypatch.setattr(type(run.task), "report", changed)
    if message:
        with pytest.raises(OwnCodeError) as raised:
            loop.train(run)
        assert message in str(raised.value)
    else:
        assert loop.train(run)
        assert run.state.history[0]["loss"] == 0.5


@pytest.mark.parametrize(
    ("metrics", "bad"),
    [
        ({"char_loss": 800.0, "perplexity": math.inf}, ""),
        ({"char_loss": math.nan, "perplexity": math.nan}, "char_loss is nan"),
        ({"perplexity": math.inf}, "perplexity is inf"),
        ({"f1": math.nan}, ""),
    ],
)
def test_only_a_loss_must_be_finite(start, metrics, bad):
    health = start().health
    directions = {name: "max" if name == "f1" else "min" for name in metrics}
    section = SimpleNamespace(metrics=directions)
    other = Health(health.config.model_copy(update={"task": section}), health.runtime, health.precision, health.module,
                   None, health.optimizer, "runs/x")  # fmt: skip
    if not bad:
        other.validation(metrics, State())
        state = State(applied=1, history=[{"step": 1}])
        with pytest.raises(TrainingError, match="no evaluation had a finite"):
            other.result(state)
    else:
        with pytest.raises(TrainingError, match=f"the validation {bad}"):
            other.validation(metrics, State())
