"""Faults of an export, on a run of weights that were not trained. Real exports: end_to_end/test_predict.py."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.data.batch import Batch
from harness.distributed.runtime import Runtime
from harness.errors import DataError, HarnessError
from harness.inference import export
from harness.runs.weights_file import save_weights
from harness.training import build
from harness.training.models import linear
from tests.fixtures import CountingTable, make_config, settings, write_rows, write_yaml


@pytest.fixture
def run(tmp_path):
    """A run of a linear model on 12 validation rows, of which those that are unreadable are skipped."""
    write_rows(tmp_path, "train", 6)
    write_rows(tmp_path, "eval", 12)
    run, bad = tmp_path / "run", {"on_bad_image": "skip"}
    run.mkdir()
    task = build.open_task(make_config(tmp_path), Runtime())
    (run / "task.json").write_text(json.dumps(task.learned))
    tree = settings(tmp_path)
    write_yaml(run / "config.yaml", {**tree, "task": {**tree["task"], **bad}})
    model = linear.Model(3, 1)
    model(torch.zeros(2, 1, 8, 8))
    save_weights(model.state_dict(), run / "weights.safetensors", {}, tmp_path / "work")
    return run


def checked(run, kind="safetensors"):
    out = export.export(run, kind, run.parent / "model")
    return json.loads(out.with_name("model.json").read_text())["checked"]


def damage(run, rows):
    for row in rows:
        (run.parent / "eval_images" / f"{row}.png").write_bytes(b"no image")


def with_outputs(monkeypatch, change):
    """Let the model's outputs be changed, in place, by ``change``."""

    class Changed(linear.Model):
        def forward(self, images):
            outputs = super().forward(images)
            change(outputs)
            return outputs

    monkeypatch.setattr(linear, "Model", Changed)


@pytest.mark.parametrize(("bad", "rows"), [((), 12), ((0, 8), 10), (range(8), 4), (range(1, 12), 1)])
def test_rows_that_are_compared(run, bad, rows):
    damage(run, bad)
    assert checked(run)["rows"] == rows


def test_one_readable_row_is_enough_to_trace(run):
    damage(run, range(1, 12))
    assert checked(run, "torch_export")["rows"] == 1


def test_no_readable_row(run, monkeypatch):
    monkeypatch.setattr(CountingTable, "batch", lambda *_: Batch(torch.zeros(0, 2), torch.zeros(0), np.zeros(0)))
    task = SimpleNamespace(eval=CountingTable(12), prepare=lambda inputs: inputs)
    with pytest.raises(DataError, match="none of the first 12 validation rows can be read"):
        export._samples(torch.nn.Linear(2, 2), task)


def test_outputs_that_are_not_a_number_are_refused(run, monkeypatch):
    with_outputs(monkeypatch, lambda outputs: outputs.mul_(torch.nan))
    with pytest.raises(HarnessError, match="differ from the original's by nan on real rows"):
        checked(run)
    assert not (run.parent / "model").exists()


def test_infinite_outputs_may_be_equal(run, monkeypatch):
    with_outputs(monkeypatch, lambda outputs: outputs[:, 1].fill_(-torch.inf))
    assert checked(run, "torch_export")["largest_difference"] < 1e-5


def test_an_error_leaves_the_last_export_with_its_description(run, monkeypatch):
    checked(run)
    before = [(run.parent / name).read_bytes() for name in ("model", "model.json")]

    def fails(*_):
        raise RuntimeError

    monkeypatch.setattr(export, "_facts", fails)
    with pytest.raises(RuntimeError):
        checked(run, "torch_export")
    assert [(run.parent / name).read_bytes() for name in ("model", "model.json")] == before


def test_a_file_that_the_model_misses_is_not_the_output(run, monkeypatch):
    def fails(outputs):
        if len(outputs) > 2:  # as when the model is built
            raise FileNotFoundError("lookup.bin")

    with_outputs(monkeypatch, fails)
    with pytest.raises(FileNotFoundError, match="lookup"):
        checked(run)
