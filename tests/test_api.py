"""The Python API, and the script of docs/python_api.md."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import harness
from harness import load_config, load_model, open_run, predict, train
from harness.data.rank_data import TrainData
from harness.distributed.stop import Stop
from harness.errors import CheckpointError, ConfigError, DataError, HarnessError, OwnCodeError, TrainingError
from harness.inference.rows import as_file
from harness.runs import reader
from harness.trackers.metrics_log import MetricsLog
from harness.training import parts
from harness.training.optimizer.precision import Precision
from harness.training.reproducibility import determinism
from harness.training.run import Run
from harness.training.state import State
from harness.training.strategies.base import ParallelStrategy
from tests.conftest import ROOT
from tests.fixtures import settings, write_rows, write_yaml
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "python_api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture
def path(tmp_path):
    """A configuration with dropout and a moving average, in float16 with a loss scale."""
    write_rows(tmp_path, "train", 30)
    write_rows(tmp_path, "eval", 9)
    model = {"name": "small_cnn", "args": {"width": 4}}
    sections = {"model": model, "train": {"epochs": 2, "ema_decay": 0.9}, "batch": {"global": 8, "accumulate": 2}}
    return write_yaml(tmp_path / "x.yaml", settings(tmp_path, **sections))


def process_state() -> dict[str, object]:
    """What a call must leave as it was."""
    log, matrix = logging.getLogger("harness"), torch.ones(2, 2)
    return {
        "handlers": log.handlers[:],
        "level": (log.level, log.propagate),
        "warnings": logging.getLogger("py.warnings").handlers[:],
        "signals": [signal.getsignal(getattr(signal, f"SIG{name}")) for name in ("INT", "TERM", "HUP", "USR1")],
        "streams": (torch.get_rng_state().sum().item(), np.random.get_state()[1].sum(), random.getstate()[1][:3]),
        "torch": (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, (matrix @ matrix).dtype,
                  torch.utils.deterministic.fill_uninitialized_memory),
        "variables": dict(os.environ),
    }  # fmt: skip


def weights(folder, name: str = "weights.safetensors") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{folder}/{name}")


def test_train_twice_and_predict(path, capsys):
    """The second call resumes the run; the process is as before after each call."""
    before = process_state()
    first = train(load_config(path))
    assert process_state() == before
    assert (first.finished, first.step, set(first.metrics)) == (True, 8, {"top1", "loss", "mean_class_accuracy"})
    assert [entry["step"] for entry in first.history] == [4, 8]
    log = capsys.readouterr().err
    assert "last validation, at step 8: top1 " in log
    assert re.search(
        rf"best top1 \d\.\d+ at step {first.best_step}; weights.safetensors has the weights of this step", log
    )
    assert re.search(r"epoch 2/2  step 8/8  validation on (\d+) of \1 rows: top1 \d\.\d+ \(best", log)
    assert f"; for other images: harness predict {first.folder} --images FOLDER" in log.splitlines()[-1]
    (table := path.parent / "train.csv").rename(path.parent / "moved.csv")
    with pytest.raises(DataError):
        train(load_config(path, {"train.epochs": 3}))
    assert reader.read(Path(first.folder)).state == "finished", "a start that could not begin made it a failed run"
    (path.parent / "moved.csv").rename(table)
    longer = train(load_config(path, {"train.epochs": 3}))
    assert (longer.finished, longer.step, longer.folder) == (True, 12, first.folder)
    assert longer.history[:2] == first.history
    capsys.readouterr()
    train(load_config(path, {"train.epochs": 2, "train.max_steps": 50}))
    hint = "to train longer, type train.epochs=N with N above 3 (now 2); for a new run, type name=NAME\n"
    said = capsys.readouterr().err
    assert f"nothing left to do: step 12 was the last; {hint}" in said
    assert "train rows: " not in said, "the description of a run that is over"
    assert reader.read(Path(longer.folder)).lengths == {
        "train.epochs": [(0, 2), (8, 3)], "train.max_steps": [(0, None)]
    }  # fmt: skip
    other = train(load_config(path, ["train.epochs=3", "name=other"]))  # not influenced by the calls before
    assert all(torch.equal(value, weights(other.folder)[name]) for name, value in weights(longer.folder).items())

    table = predict(longer.folder, path.parent / "eval.csv")
    assert process_state() == before
    assert list(table["label"]) == [str(row % 3) for row in range(9)]
    assert (table["prediction"].astype(str) == table["label"]).mean() == pytest.approx(longer.best)
    again = predict(longer.folder, pd.read_csv(path.parent / "eval.csv")[["path"]].assign(note="two\rlines"))
    pd.testing.assert_frame_equal(again, table.drop(columns="label").assign(note="two\rlines"))


def test_a_finished_run_that_starts_again_does_only_what_is_missing(path, monkeypatch):
    """A kill after the last checkpoint leaves no record of the end, perhaps with results of an earlier end."""
    from harness.training import loop

    evaluate, evaluated = loop.evaluate, []
    first = train(load_config(path))
    folder = Path(first.folder)
    predicted = (folder / "predictions.csv").read_bytes()
    log = (folder / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(loop, "evaluate", lambda run: evaluated.append(run.state.step) or evaluate(run))
    for _ in range(2):
        assert (train(load_config(path)), evaluated) == (first, [])
    assert (folder / "metrics.jsonl").read_bytes() == log
    for lost in ("predictions.csv", "summary.json", "logs/rank-0.exit.json", "metrics.jsonl"):
        (folder / lost).unlink()
        assert (train(load_config(path)), evaluated) == (first, [8]), lost
        assert (folder / "predictions.csv").read_bytes() == predicted
        evaluated.clear()
    assert train(load_config(path, {"train.epochs": 3})).history[:2] == first.history
    assert evaluated == [8, 12]


def test_errors_are_exceptions(path, tmp_path, caplog, monkeypatch):
    before = process_state()
    for wrong in ({"train.epoch": 3}, ["train.epoch=3"], "train.epoch=3", {"train": {"epoch": 3}}):
        with pytest.raises(
            ConfigError, match="^overrides: train.epoch: unknown key; did you mean train.epochs"
        ) as caught:
            load_config(path, wrong)
        assert caught.value.where == "overrides: train.epoch"
    with pytest.raises(ConfigError, match="2 problems in .*\n  overrides: seed: .*\n  overrides: train.epoch: "):
        load_config(path, {"train.epoch": 3, "seed": "x"})
    with pytest.raises(ConfigError, match="^overrides: seed: object is no type of the YAML: .*\n  -> give a number"):
        load_config(path, {"seed": object()})
    with pytest.raises(ConfigError, match="^config: a dict is neither a Config nor a path\n  -> pass the path"):
        train({"train.epochs": 1})
    with pytest.raises(ConfigError, match="^overrides: a loaded Config takes none"), open_run(load_config(path), ["x"]):
        pass
    with pytest.raises(ConfigError, match="^overrides: train.epoch: unknown key"), open_run(path, {"train.epoch": 3}):
        pass
    with pytest.raises(DataError, match="no such annotation file"):
        train(load_config(path, {"task.train_csv": "nothing.csv"}))
    with pytest.raises(ConfigError, match="failed at its start and has no weights: .*nothing.csv: no such annotation"):
        predict(tmp_path / "runs" / "small", path.parent / "eval.csv")
    assert train(str(path), {"name": "short", "train.max_steps": 1}).step == 1
    for call in (load_model, lambda run, overrides: predict(run, path.parent / "eval.csv", overrides)):
        with pytest.raises(ConfigError, match="^overrides: task.rot: unknown key; did you mean task.root"):
            call(tmp_path / "runs" / "short", {"task.rot": "x"})
    table = pd.DataFrame({"path": ["train_images/0.png", "gone.png"], "note": ["two\nlines", "b"]})
    with pytest.raises(DataError, match="^row 1 of the table: image not found: .*gone.png .missing: 1 of 2 rows"):
        predict(tmp_path / "runs" / "short", table, {"task.root": str(tmp_path), "data.num_workers": 0})
    with pytest.raises(DataError, match=r"^the table: no column 'path'; the columns are 'note'"):
        predict(tmp_path / "runs" / "short", table[["note"]])
    with pytest.raises(DataError, match="^the table: the header names a column twice: 'note'"):
        predict(tmp_path / "runs" / "short", table[["note", "note"]])
    row = {"path": "train_images/0.png", "label": "0"}
    with caplog.at_level("INFO", "harness"):
        predict(tmp_path / "runs" / "short", [row], {"task.root": str(tmp_path)})
    assert "labels of the table:\nrows evaluated: 1 of 1\ntop1: " in caplog.text
    assert "harness-" not in caplog.text
    (tmp_path / "train_images" / "7.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"train.csv:9: image cannot be decoded"):
        train(load_config(path))
    assert (tmp_path / "runs" / "small" / "failure.json").exists()

    import harness.training.loop

    monkeypatch.setattr(harness.training.loop, "train", lambda run: sys.exit(3))
    with pytest.raises(HarnessError, match=r"the code called sys.exit\(3\)"):
        train(load_config(path, {"name": "other"}))
    monkeypatch.setattr(harness.training.loop, "train", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(load_config(path, {"name": "third"}))
    assert process_state() == before


def test_a_signal_stops_with_a_checkpoint(path, monkeypatch):
    """As when the cell of a notebook is interrupted."""
    original = State.add_step

    def interrupting(state, skipped):
        original(state, skipped)
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(State, "add_step", interrupting)
    stopped = train(load_config(path))
    monkeypatch.undo()
    assert (stopped.finished, stopped.step) == (False, 3)
    resumed, whole = train(load_config(path)), train(load_config(path, {"name": "whole"}))
    assert (resumed.finished, resumed.history) == (True, whole.history)


@pytest.mark.parametrize(("every", "kept"), [("3 steps", True), ("2 steps", False)])
def test_the_best_weights_of_a_former_end_are_kept(path, capsys, every, kept):
    """A longer run evaluates at its own steps only, and forgets that end, which may have been the best."""
    asked = {"train.evaluate_every": every, "checkpoint.best_metric": "loss"}
    first = train(load_config(path, {**asked, "train.max_steps": 4}))
    assert first.best_step == 4
    before = weights(first.folder)
    longer = train(load_config(path, {**asked, "train.max_steps": 5}))
    file = Path(first.folder) / "weights.former.safetensors"
    assert [entry["step"] for entry in longer.history] == ([3, 5] if kept else [2, 4, 5])
    assert file.exists() == kept
    assert (f"its weights are kept as {file}" in "".join(capsys.readouterr())) == kept
    if kept:
        assert_close(weights(first.folder, file.name), before, rtol=0, atol=0)


def on_a_rank(path: str) -> tuple[int, dict[str, float], float]:
    result = train(load_config(path))
    with open_run(load_config(path)) as run:
        total = run.runtime.sum(torch.ones(1)).item()
    return result.step, result.metrics, total


def test_two_ranks(path):
    first, second = run_ranks(2, on_a_rank, str(path), group=False)
    assert first == second
    assert (first[0], first[2]) == (8, 2.0)


def test_a_trained_model(path, tmp_path, monkeypatch):
    """It computes what predict writes, without the training data, and leaves the process as it was."""
    result = train(load_config(path, {"precision.opt_level": "O0"}))
    expected = predict(result.folder, path.parent / "eval.csv")
    for name in ("train.csv", "eval.csv"):
        (tmp_path / name).rename(tmp_path / f"moved_{name}")
    before = process_state()
    model = load_model(result.folder)
    assert process_state() == before
    assert (model.training, list(model.classes), model.description["preprocessing"]["size"]) == (
        False,
        [0, 1, 2],
        [8, 8],
    )
    rows = pd.read_csv(tmp_path / "moved_eval.csv")[["path"]]
    inputs = model.preprocess(rows)
    assert inputs.shape == (9, 1, 8, 8)
    with torch.no_grad():
        scores = model(inputs).softmax(1)
    torch.testing.assert_close(
        scores.double(), torch.tensor(expected.filter(like="score_").to_numpy(np.float64)), atol=1e-6, rtol=0
    )
    assert torch.equal(model.preprocess(tmp_path / "moved_eval.csv"), inputs)
    assert torch.equal(model.preprocess(list(rows["path"])), inputs)
    assert torch.equal(model.preprocess(rows.to_dict("records")), inputs)
    assert torch.equal(model.preprocess(rows["path"][0]), inputs[:1])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / rows["path"][0]).rename(tmp_path / "elsewhere" / "new.png")
    (tmp_path / "elsewhere" / "deep").mkdir()
    shutil.copy(tmp_path / rows["path"][1], tmp_path / "elsewhere" / "deep" / "a.png")
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths of a caller are also those from the working folder
    assert torch.equal(model.preprocess("new.png"), inputs[:1])
    for place, ids in (("new.png", ["new.png"]), (tmp_path / "elsewhere", ["deep/a.png", "new.png"])):
        found = predict(result.folder, place)
        assert found["id"].tolist() == [str(tmp_path / "elsewhere" / name) for name in ids]
        assert found["prediction"].iloc[-1] == expected["prediction"][0]
    assert torch.equal(model.preprocess([tmp_path / "elsewhere" / "new.png", rows["path"][1]]), inputs[:2])
    with Image.open("new.png") as image:
        gray = image.convert("L")
    for given in (gray, gray.convert("RGB"), np.asarray(gray.convert("RGB"))):
        assert torch.equal(model.preprocess(given), inputs[:1])
        assert torch.equal(model.preprocess([rows["path"][1], given]), inputs[[1, 0]])
    for wrong, told in (
        (3, "not an image: int\n"),
        ([3], "not an image: int\n"),
        (np.zeros((8, 8, 3)), r"not an image: ndarray of float64, \(8, 8, 3\)\n"),
        (np.zeros((3, 8, 8), np.uint8), r"not an image: ndarray of uint8, \(3, 8, 8\)\n"),
        (["new.png", "a/gone.png"], "image 1: image not found: .*/a/gone.png, nor a/gone.png in the working folder\n"),
        (tmp_path / "gone.png", "image 0: image not found: .*/gone.png\n"),
    ):
        with pytest.raises(DataError, match=f"^{told}  -> give a path that .* or an array of uint8") as caught:
            model.preprocess(wrong)
        assert not re.search("table|CSV|row", str(caught.value))
    with pytest.raises(DataError, match="-> did you mean .*[.]png[?] give a path that"):
        model.preprocess([str(rows["path"][1]).replace(".png", ".jpg")])
    with pytest.raises(DataError, match="^row 1 of the table: image not found: .*gone.png"):
        model.preprocess(pd.DataFrame({"path": [rows["path"][1], "gone.png"]}))
    skipping = load_model(result.folder, {"task.on_bad_row": "skip"})
    with pytest.raises(DataError, match="^row 1 of the table: image not found: .*gone.png") as caught:
        skipping.preprocess(pd.DataFrame({"path": [rows["path"][1], "gone.png"]}))
    assert "on_bad_row" not in str(caught.value)
    Path("bad.jpg").write_text("<html>")
    with pytest.raises(DataError, match="^image 0: image cannot be decoded: .*/bad.jpg: the file is none of JPEG"):
        skipping.preprocess("bad.jpg")
    with pytest.raises(DataError, match="^scan.HEIC: this kind of image cannot be read\n  -> images are .*.jpg"):
        skipping.preprocess("scan.HEIC")


@pytest.mark.parametrize(
    ("rows", "what"),
    [("my sister paints", "there is no file 'my sister paints'"), ([("a",)], "rows are a list of tuple")],
)
def test_what_is_no_row_of_two_texts(rows, what):
    with (
        pytest.raises(DataError, match=f'{what}\n  -> use a file, .*: \\[{{"one": ..., "two": ...}}\\]'),
        as_file(rows, ["one", "two"]),
    ):
        pass


def test_pairs_of_texts():
    with as_file([("a", 'b "c",\nd'), ["e", ""]], ["one", "two"]) as (file, _):
        found = pd.read_csv(file, keep_default_na=False)
    assert found.to_dict("list") == {"one": ["a", "e"], "two": ['b "c",\nd', ""]}


def test_images_keep_their_values_and_other_errors_their_hints():
    for mode in ("I;16", "F"):
        with (
            pytest.raises(DataError, match=rf'mode {mode} is not .*\n  -> give its path, or image.convert\("RGB"\)'),
            as_file(Image.new(mode, (2, 2)), of_images=True),
        ):
            pass
    with pytest.raises(ConfigError, match="-> pip install s3fs"), as_file(["a.png"], ["path"], of_images=True):
        raise ConfigError("reading s3://b needs s3fs", where="task.root", hint="pip install s3fs")


def test_numbers_of_a_trained_model_are_in_the_unit_of_their_column(tmp_path):
    for split, number in (("train", 12), ("eval", 5)):
        lines = [f"{'a b' if row % 2 else 'c'},{1000 + row},{row / 1000}" for row in range(number)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,x,y", *lines]) + "\n")
    tree = settings(tmp_path, train={"epochs": 1}, model={"name": "text_cnn"}, precision={"opt_level": "O0"})
    tree["task"] = {"name": "text_csv", "labels": {"kind": "regression", "column": ["x", "y"]}}
    tree["task"] |= {f"{split}_csv": str(tmp_path / f"{split}.csv") for split in ("train", "eval")}
    result = train(load_config(write_yaml(tmp_path / "n.yaml", tree)))
    expected = predict(result.folder, tmp_path / "eval.csv")[["prediction_x", "prediction_y"]]
    model = load_model(result.folder)
    with torch.no_grad():
        found = model(model.preprocess(tmp_path / "eval.csv"))
        bare = model.module(model.preprocess(tmp_path / "eval.csv"))
    np.testing.assert_allclose(found.numpy(), expected.to_numpy(), rtol=1e-5)
    assert bare.abs().max() < 100
    of_texts = predict(result.folder, ["a b", "c"])
    assert torch.equal(model.preprocess("a b"), model.preprocess(["a b"]))
    with pytest.raises(DataError, match="there is no file 'gone'"):
        model.preprocess("gone")
    pd.testing.assert_frame_equal(of_texts, predict(result.folder, [{"text": "a b"}, {"text": "c"}]))
    assert list(model.description["columns"]) == ["x", "y"]
    assert "postprocessing" not in model.description


def test_a_trained_model_of_a_task_that_needs_its_data(tmp_path, capsys):
    """mnist cannot open other rows, but its model can be loaded while the images are there."""
    from tests.datasets import write_idx

    for split in ("train", "t10k"):
        write_idx(tmp_path / "MNIST" / "raw", split, 20)
    tree = settings(tmp_path, train={"epochs": 1})
    tree["task"] = {"name": "mnist", "root": str(tmp_path)}
    result = train(load_config(write_yaml(tmp_path / "m.yaml", tree)))
    assert "harness predict" not in capsys.readouterr().err.splitlines()[-1]
    model = load_model(result.folder)
    assert list(model.classes) == [str(digit) for digit in range(10)]
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ConfigError, match="the task mnist cannot predict the rows of a file"):
        model.preprocess("eval.csv")


def own_loop(
    path: str, steps: int, stop: bool = False, advances: bool = True, counts: bool = True, **overrides: object
) -> int:
    """Take ``steps`` steps in a loop that neither saves nor evaluates."""
    with open_run(load_config(path, overrides)) as run:
        for _, group in zip(range(steps), run.train_data.groups(run.state.epoch, run.state.segments), strict=False):
            for micro in group:
                run.task.loss(run.module(run.task.prepare(micro.batch.inputs)), micro.batch.targets).backward()
            run.optimizer.step()
            if advances:
                run.train_data.advance(run.state.segments)
            if counts:
                run.state.add_step(False)
        if stop:
            run.stop.request("enough for today")
    return run.state.step


class Begins:
    def before_training(self, run):
        self.__class__.steps.append(run.state.step)

    steps: ClassVar[list[int]] = []


def test_an_own_loop_begins_with_before_training(path):
    """At its start and at a resume, not at its end."""
    asked = {"precision.opt_level": "O0", "train.ema_decay": None, "hooks": [f"{__name__}.Begins"]}
    Begins.steps.clear()
    assert own_loop(path, 3, stop=True, **asked) == 3
    assert own_loop(path, 1, **asked) == 4
    assert Begins.steps == [0, 3]


def test_an_own_loop_ends_as_done(path, tmp_path, capsys):
    """With summary, best weights and predictions, wherever it ends; a loop that is stopped can resume."""
    folder, overrides = tmp_path / "runs" / "small", {"precision.opt_level": "O0", "train.ema_decay": None}
    assert own_loop(path, 0, **overrides) == 0
    assert reader.read(folder).state != "finished", "nothing was trained"
    assert own_loop(path, 1, stop=True, **overrides) == 1
    assert "enough for today" in capsys.readouterr().err
    assert (reader.read(folder).state, (folder / "predictions.csv").exists()) == ("stopped", False)
    assert own_loop(path, 1, **overrides) == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert (reader.read(folder).state, summary["step"], summary["best"]["step"]) == ("finished", 2, 2)
    assert len(pd.read_csv(folder / "predictions.csv")) == 9
    assert own_loop(path, 2, **overrides) == 4, "a longer loop goes on from there"
    assert (folder / "checkpoints" / "latest").read_text() == "step-4\n"


LOOP = next(block for block in BLOCKS if "def one_step" in block)


def loop_of_the_page(path: str, overrides: dict[str, object]) -> tuple[list[dict], dict[str, torch.Tensor]]:
    names: dict = {}
    exec(LOOP, names)
    config = load_config(path, overrides)
    names["my_training"](config)
    folder = Path(config.output, config.name)
    return json.loads((folder / "summary.json").read_text())["history"], weights(folder)


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_loop_of_the_page_gives_the_bits_of_train(path, ranks):
    """With logical ranks, accumulation, clipping, lower rates without progress, and evaluations within an epoch."""
    asked = {"train.ema_decay": None, "train.clip_norm": 1.0, "train.evaluate_every": "1 step",
             "schedule.name": "plateau", "schedule.args.patience": 1, "schedule.args.threshold": 0.5,
             "parallel.logical_ranks": ranks, "parallel.delay_allreduce": True}  # fmt: skip
    result = train(load_config(path, {**asked, "name": "by_train"}))
    history, tensors = loop_of_the_page(path, {**asked, "name": "by_loop"})
    assert [entry["step"] for entry in history] == [*range(1, 9)]
    assert history == result.history
    assert json.loads((Path(result.folder).parent / "by_loop" / "summary.json").read_text())["ended_early"] is None
    assert_close(tensors, weights(result.folder), rtol=0, atol=0)


def test_a_loop_that_is_killed_after_a_save_at_the_last_step_of_an_epoch_resumes_exactly(path):
    """The checkpoint then says that the epoch is not over."""
    names: dict = {}
    exec(LOOP.replace("% 20", "% 4"), names)
    config = load_config(path, {"train.ema_decay": None})
    save_run = names["save_run"]

    def killed(run):
        save_run(run)
        assert run.state.epoch, "killed"

    names["save_run"] = killed
    with pytest.raises(AssertionError, match="killed"):
        names["my_training"](config)
    with open_run(config) as run:
        assert (run.state.step, run.state.epoch, run.state.in_epoch, run.evaluation_due()) == (4, 1, False, True)


@pytest.mark.parametrize("enters", [False, True])
def test_a_loop_that_would_lose_logical_ranks_is_refused(path, enters):
    asked = {"train.ema_decay": None, "parallel.logical_ranks": 2, "parallel.delay_allreduce": True}

    def loop() -> None:
        empty = SimpleNamespace(rank=0, num_rows=0)
        with open_run(load_config(path, asked)) as run, run.parallel.micro_batch(empty, last=True):
            pass

    with pytest.raises(TrainingError, match="leaves out what parallel.logical_ranks needs"):
        loop() if enters else own_loop(path, 1, **asked)


class Quiet:
    def after_step(self, run):
        raise AssertionError("called")


def test_an_own_loop_is_told_what_it_must_do_itself(path, capsys):
    own_loop(path, 1, **{"train.ema_decay": None, "precision.opt_level": "O0"})
    assert "left to your loop" not in capsys.readouterr().err
    asked = {"train.clip_norm": 1.0, "hooks": ["tests.test_api.Quiet"], "name": "asked", "precision.opt_level": "O0"}
    own_loop(path, 1, **asked)
    left = "train.clip_norm, train.ema_decay, after_step of tests.test_api.Quiet, and train lines"
    assert capsys.readouterr().err.count(f"not done unless it does them: {left}") == 1


@pytest.mark.parametrize("advances", [True, False])
def test_an_own_loop_says_what_it_left_out(path, capsys, advances):
    asked = {"precision.opt_level": "O0", "train.ema_decay": None}
    assert own_loop(path, 3, advances=advances, **asked) == 3
    shown = capsys.readouterr().err
    assert ("your loop took 3 steps and never called run.train_data.advance()" in shown) is not advances
    assert shown.count("training ended early, at step 3: its loop has ended") == 1


def test_an_own_loop_that_forgets_a_call_is_told_which(path):
    asked = {"precision.opt_level": "O0", "train.ema_decay": None}
    with pytest.raises(TrainingError, match="used the groups of an epoch, and counted no step"):
        own_loop(path, 3, counts=False, **asked)
    with open_run(load_config(path, {**asked, "name": "other"})) as run:
        for _ in range(4):
            run.state.add_step(False)
            assert run.evaluation_due(), "as at the start of an epoch"
        run.state.add_step(False)
        with pytest.raises(TrainingError, match="5 steps of epoch 1, which has 4, and advanced by 0") as caught:
            run.evaluation_due()
    assert "call run.train_data.advance(run.state.segments)" in caught.value.hint


def test_an_own_loop_that_does_not_advance_ends(path):
    with open_run(load_config(path, {"precision.opt_level": "O0", "train.ema_decay": None})) as run:
        groups = run.train_data.groups
        for _ in range(2):  # maybe for statistics of the rows, before the steps
            assert len([*groups(run.state.epoch, run.state.segments)]) == 4
        for _ in range(4):
            assert len([*groups(0, [])]) == 4, "a list of its own, as to measure the training accuracy"
        for _ in range(2):
            assert len([*groups(run.state.epoch, run.state.segments)]) == 4
        with pytest.raises(TrainingError, match="epoch 1 have been used 2 times, and none was counted") as caught:
            next(groups(run.state.epoch, run.state.segments))
        for _ in range(4):
            run.train_data.advance(run.state.segments)
            run.state.add_step(False)
        for _ in range(2):
            assert [*groups(run.state.epoch, run.state.segments)] == []
        with pytest.raises(TrainingError) as forgotten:  # next_epoch
            next(groups(run.state.epoch, run.state.segments))
    assert "run.state.next_epoch()" in forgotten.value.hint
    assert "call run.train_data.advance(run.state.segments)" in caught.value.hint


def test_parts_keep_what_a_wrapper_has_of_its_own(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    average.update_parameters(torch.nn.Linear(1, 1))
    checkpoints = parts.Checkpoints(tmp_path, keep=1)
    parts.save(checkpoints, 1, {"average": average})
    again = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    assert parts.load(checkpoints, {"average": again}) == 1
    assert again.n_averaged == 1
    assert torch.equal(again.module.weight, average.module.weight)


def test_parts_of_a_model_whose_child_is_called_module(tmp_path):
    """And which saves none of its tensors."""

    def model() -> torch.nn.Module:
        outer, inner = torch.nn.Module(), torch.nn.Module()
        inner.register_buffer("positions", torch.rand(2), persistent=False)
        outer.module = inner
        return outer

    saved, again = model(), model()
    checkpoints = parts.Checkpoints(tmp_path, keep=1)
    parts.save(checkpoints, 1, {"model": saved})
    assert parts.load(checkpoints, {"model": again}) == 1
    assert torch.equal(again.module.positions, saved.module.positions)


EXAMPLE = textwrap.dedent(parts.__doc__.partition("::\n")[2])


def in_parts(folder: str, stop_at: int = 99) -> tuple[float, list[torch.Tensor], list[int]]:
    """The script of the docstring, on each rank in ``folder``; ``stop_at``: the step in which it dies."""
    from torch.nn import functional
    from torch.utils import data

    class Rows(data.TensorDataset):
        def __getitem__(self, row):
            seen.append(int(row))
            return super().__getitem__(row)

        __getitems__ = None

    def counted(outputs, targets):
        nonlocal stop_at
        if stop_at == 0:
            raise RuntimeError("planted")
        stop_at -= 1
        return loss(outputs, targets)

    seen, names, loss = list[int](), {}, functional.cross_entropy
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    warnings.filterwarnings("error", ".broadcast_buffers", FutureWarning)
    with mock.patch.object(data, "TensorDataset", Rows), mock.patch.object(functional, "cross_entropy", counted):
        try:
            exec(EXAMPLE, names)
        except RuntimeError as error:
            if str(error) != "planted":
                raise
        finally:
            parts.amp.reset()
    tensors = [tensor.detach().clone().numpy() for tensor in (*names["model"].state_dict().values(), torch.rand(3))]
    return names.get("accuracy", 0.0), tensors, seen


@pytest.mark.parametrize("world", [1, 2])
def test_parts_without_a_task(tmp_path, world):
    """An interrupted script resumes bit for bit, within an epoch too; each row is read once, in each epoch and in the
    evaluation."""
    whole = run_ranks(world, in_parts, str(tmp_path / "whole"), group=False)
    run_ranks(world, in_parts, str(tmp_path / "killed"), 17, group=False)
    resumed = run_ranks(world, in_parts, str(tmp_path / "killed"), group=False)
    size = 200 // world
    for rank in range(world):
        assert whole[rank][0] == resumed[rank][0] == whole[0][0] > 0.5
        assert all(np.array_equal(a, b) for a, b in zip(whole[rank][1], resumed[rank][1], strict=True))
        assert len(resumed[rank][2]) == 4 * size - 150, "from step 15 on"
    read = [[of_rank[2][first : first + size] for of_rank in whole] for first in range(0, 4 * size, size)]
    assert all(sorted(sum(of_ranks, [])) == [*range(200)] for of_ranks in read)
    assert read[0] != read[1] != read[2]


def test_every_part_is_on_the_page_and_in_the_script():
    section = PAGE.partition("## Parts, one by one")[2].partition("\n## ")[0]
    for name in parts.__all__:
        assert re.search(rf"\b{name}[(.]", section), name
        assert name == "Runtime" or name in EXAMPLE, name


@pytest.mark.parametrize("script", [*BLOCKS, EXAMPLE])
def test_scripts_import_harness_before_torch(script):
    """For then the threads of torch do not spin while they are idle."""
    found = re.findall(r"^(?:from|import) (harness|torch)\b", script, re.M)
    assert found[:1] != ["torch"]


def test_part_that_was_not_saved_is_named(tmp_path):
    checkpoints = parts.Checkpoints(tmp_path, keep=1)
    parts.save(checkpoints, 3, {"model": torch.nn.Linear(1, 1)})
    with pytest.raises(CheckpointError, match="has no part ema; it has model"):
        parts.load(checkpoints, {"model": torch.nn.Linear(1, 1), "ema": torch.nn.Linear(1, 1)})


def own_noise(folder: str) -> list[float]:
    """The next number of each rank's own generator, and after a load also of large parts."""
    noise = torch.Generator().manual_seed(0)
    generator = SimpleNamespace(state_dict=noise.get_state, load_state_dict=noise.set_state)
    with parts.open_runtime() as ranks:
        noise.manual_seed(ranks.rank)
        table, order = {"large": torch.full((1 << 19,), float(ranks.rank))}, {"order": [ranks.rank] * (1 << 20)}
        large = SimpleNamespace(state_dict=lambda: table, load_state_dict=table.update)
        sampler = SimpleNamespace(state_dict=mock.Mock(return_value=order), load_state_dict=order.update)
        own = {"noise": generator, "large": large, "sampler": sampler}
        checkpoints = parts.Checkpoints(Path(folder), keep=1)
        parts.save(checkpoints, 1, own, ranks)
        drawn = torch.rand(1, generator=noise).item()
        assert sampler.state_dict.call_count == 1
        parts.load(checkpoints, own, ranks)
        return [drawn, torch.rand(1, generator=noise).item(), table["large"][0].item(), order["order"][0]]


def test_each_rank_gets_back_its_own_small_parts(tmp_path):
    """Such as generators that are seeded by rank; large ones are those of rank 0."""
    first, second = run_ranks(2, own_noise, str(tmp_path), group=False)
    assert first[0] == first[1] != second[0] == second[1]
    assert first[2:] == second[2:] == [0.0, 0]


def slow_disk(folder: str) -> int:
    """Save and load while rank 0 needs longer for its files than a rank may be silent."""

    def slowly(work):
        def slow(*args, **options):
            time.sleep(0.0 if ranks.rank else 2.5)
            return work(*args, **options)

        return slow

    with parts.open_runtime(timeout_s=1.0) as ranks:
        checkpoints, model = parts.Checkpoints(Path(folder), keep=1), {"model": torch.nn.Linear(1, 1)}
        checkpoints.write, checkpoints.newest = slowly(checkpoints.write), slowly(checkpoints.newest)
        with mock.patch.object(parts, "read", slowly(parts.read)):
            parts.save(checkpoints, 7, model, ranks)
            return parts.load(checkpoints, model, ranks)


def test_parts_wait_for_a_slow_disk(tmp_path):
    assert run_ranks(2, slow_disk, str(tmp_path), group=False) == [7, 7]


def test_wrong_arguments_of_parts_are_named(tmp_path, caplog, monkeypatch):
    with pytest.raises(ConfigError, match="no tail 'dropp'\n  -> give tail='use' or tail='drop'"):
        parts.num_steps(10, 2, 3, "dropp")
    checkpoints, model = parts.Checkpoints(str(tmp_path / "saved"), 2), torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="the part 'x' is of type int, without state_dict"):
        parts.save(checkpoints, 2, {"m": model, "x": 3})
    parts.save(checkpoints, 2, {"m": model, "o": torch.optim.SGD(model.parameters())})
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    assert parts.load(checkpoints, {"m": model}) == 2
    assert "step-2 also holds o, which is not restored; add it to parts" in caplog.text


@pytest.mark.parametrize("wrapped", ["save", "load"])
def test_parts_with_and_without_a_wrapper(tmp_path, wrapped):
    """One of save and load has the model in a wrapper."""
    saved, loaded, checkpoints = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2), parts.Checkpoints(tmp_path, keep=1)
    saved(torch.rand(8, 2))
    wrap = torch.nn.DataParallel
    parts.save(checkpoints, 3, {"model": wrap(saved) if wrapped == "save" else saved})
    parts.load(checkpoints, {"model": wrap(loaded) if wrapped == "load" else loaded})
    assert_close(dict(loaded.state_dict()), dict(saved.state_dict()), rtol=0, atol=0)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    from harness.tools.data import digits

    digits.write(tmp_path / "data" / "digits")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    digits.write_config(Path("data/digits"))
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
def test_the_script_of_the_page(digits, capsys):
    """All blocks as the cells of a notebook. The own loop then resumes exactly after an error in the middle."""
    names: dict = {}
    for block in BLOCKS:
        exec(block.replace('"data/', f'"{digits}/data/'), names)
    parts.amp.reset()
    out, err = capsys.readouterr()
    assert re.search(r"^runs/notebook 46 0\.\d+\n\d+ of 360 wrong\n", out), out
    assert re.search(r"^\d: \d+%$", out, re.M), "a photo"
    assert out.endswith("\n0.75\n"), "a metric of the parts"
    assert (err.count("throughput:"), err.count("last validation")) == (1, 2), "the own loop does not count rows"
    own = reader.read(Path("runs/my_loop"))
    assert (own.state, len(pd.read_csv("runs/my_loop/predictions.csv"))) == ("finished", 360)
    assert len(predict("runs/my_loop", digits / "data" / "digits" / "eval.csv")) == 360
    config = load_config("configs/digits.yaml", {"name": "killed", "train.epochs": 1})
    one_step, steps = names["one_step"], []

    def failing(run, group):
        one_step(run, group)
        steps.append(run.state.step)
        if steps == [*range(1, 22)]:
            raise RuntimeError("planted")

    names["one_step"] = failing
    with pytest.raises(RuntimeError, match="planted"):
        names["my_training"](config)
    names["my_training"](config)
    assert steps == [*range(1, 22), 21, 22, 23]
    read = [
        torch.load(f"runs/{name}/checkpoints/step-23/state.pt", weights_only=True) for name in ("my_loop", "killed")
    ]
    assert all(torch.equal(value, read[1]["model"][name]) for name, value in read[0]["model"].items())


def test_names_that_are_typed_are_those_that_are_found():
    """Editors and mypy read the imports for types."""
    tree = ast.parse(Path(harness.__file__).read_text())
    (typed,) = [node.body for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    places, modules = {}, {}
    for node in typed:
        if isinstance(node, ast.ImportFrom):
            places |= {alias.asname: (node.module, alias.name) for alias in node.names if alias.asname}
            modules |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            for target, value in zip(node.targets[0].elts, node.value.elts, strict=True):
                places[target.id] = (modules[value.value.id], value.attr)
    assert {*places} == {*harness.__all__} - {"__version__"}
    for name, (module, inside) in places.items():
        assert getattr(harness, name) is getattr(importlib.import_module(module), inside), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(harness, "noth" + "ing")


# Of a run, but not for code of the user's.
INTERNAL = {
    "sizes", "gradient_hook", "health", "writer", "progress", "meter", "coverage", "first_look", "this_start",
    "uncounted", "ranks", "checkpoints", "ended_early", "steps_to_evaluation", "compiling", "close",
}  # fmt: skip


def test_the_page_lists_what_a_run_and_its_state_have():
    table = PAGE.partition("### What a run has")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*) \|$", table, re.M)
    listed = {name: kind for names, kind, _ in rows for name in re.findall(r"`(\w+)", names)}
    fields = {field.name: str(field.type) for field in dataclasses.fields(Run)}
    there = {name for name in {*vars(Run), *fields} if not name.startswith("_")}
    assert {*listed} | INTERNAL == there
    assert not {*listed} & INTERNAL
    for name, kind in listed.items():
        member = vars(Run).get(name)
        get = member.fget if isinstance(member, property) else member
        typed = fields.get(name) or get.__annotations__["return"]
        assert any(word in typed for word in re.findall(r"\w+", kind)) or kind == "context", name
    (counters,) = [meaning for names, _, meaning in rows if names == "`state`"]
    named = re.findall(r"`(\w+)`", counters)
    assert len(named) == 8
    assert {*named} <= {field.name for field in dataclasses.fields(State)}


def test_calls_on_the_page_take_their_arguments():
    calls = {"prepare": harness.prepare, "save_run": harness.save_run, "evaluate_run": harness.evaluate_run}
    run = {"train_data": TrainData, "parallel": ParallelStrategy, "precision": Precision, "state": State,
           "stop": Stop, "tracker": MetricsLog}  # fmt: skip
    table = PAGE.partition("### What a loop calls")[2].partition("###")[0]
    found = re.findall(r"^\| `(?:run\.(\w+)\.)?(\w+)\((.*?)\)`", table, re.M)
    assert len(found) == 13
    for part, name, arguments in found:
        function = getattr(run[part], name) if part else calls[name]
        names = [each for each in arguments.split(", ") if each and not each.startswith('"')]
        assert {*names} <= inspect.signature(function).parameters.keys(), name


class Careless(torch.nn.Module):
    """A model whose forward pass fails in the second step."""

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(1, num_classes), 0

    def forward(self, inputs):
        self.calls += self.training
        if self.calls == 2:
            raise KeyError("planted")
        return self.layer(inputs.flatten(1).mean(1, keepdim=True))


class CarelessHook:
    def after_step(self, run):
        raise KeyError("planted")


def test_an_own_exception_comes_out_as_it_is(path):
    plain = {"batch.accumulate": 1, "precision.opt_level": "O0"}
    with pytest.raises(KeyError, match="planted") as caught:
        train(load_config(path, {"model.name": "tests.test_api.Careless", **plain}))
    assert caught.traceback[-1].name == "forward"
    with pytest.raises(OwnCodeError) as wrapped:
        train(load_config(path, {"hooks": ["tests.test_api.CarelessHook"], "name": "hooked", **plain}))
    assert isinstance(wrapped.value.__cause__, KeyError)


def test_every_name_is_on_the_page_and_the_import_is_light():
    for name in harness.__all__:
        assert name == "__version__" or (re.search(rf"\b{name}\b", PAGE) and getattr(harness, name).__doc__), name
    program = (
        "import sys, harness, harness.train\n"
        "assert harness.train is harness.api.train and {*harness.__all__} <= {*dir(harness)}\n"
        "sys.exit(', '.join({'torch', 'numpy', 'pandas', 'pydantic'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("text", ["\N{GRINNING FACE} é", "a\u2028b", "a #b"])
def test_any_text_is_an_override(path, text):
    assert load_config(path, {"task.label_column": text}).task.label_column == text


def test_a_path_or_a_number_of_numpy_is_an_override(path, tmp_path):
    assert load_config(path, {"task.root": tmp_path}).task.root == str(tmp_path)
    assert load_config(path, {"seed": np.int64(3)}).seed == 3


def test_threads_and_variables_are_as_before(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    threads = torch.get_num_threads()
    with harness.api._as_before():
        torch.set_num_threads(threads + 1)
        os.environ |= {"NCCL_DEBUG": "INFO", "WANDB_DATA_DIR": "here"}
    assert torch.get_num_threads() == threads
    assert (os.environ["NCCL_DEBUG"], "WANDB_DATA_DIR" in os.environ) == ("WARN", False)


def of_tf32() -> list[object]:
    backends = torch.backends
    precisions: list[object] = [each.fp32_precision for each in determinism.tf32_places()]
    with suppress(RuntimeError):
        precisions += [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32]
    return precisions


@pytest.mark.parametrize("chosen", [{}, {0: "ieee"}, {0: "tf32"}, {1: "ieee"}, {0: "tf32", 1: "ieee", 2: "ieee"}])
def test_tf32_is_as_before_also_if_it_was_set_by_fp32_precision(chosen):
    places = determinism.tf32_places()
    with ExitStack() as after:  # of other tests, too: torch keeps both settings, and refuses to read unequal ones
        for place in places:
            after.callback(setattr, place, "fp32_precision", place.fp32_precision)
        for place in (torch.backends.cudnn, torch.backends.cuda.matmul):
            after.callback(setattr, place, "allow_tf32", place.allow_tf32)
        for at, value in chosen.items():
            places[at].fp32_precision = value
        before = of_tf32()
        for tf32 in (True, False):
            with harness.api._as_before():
                determinism.set_tf32(SimpleNamespace(tf32=tf32))
            assert of_tf32()[: len(before)] == before
    assert torch.backends.cudnn.allow_tf32
