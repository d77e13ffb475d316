"""Faults of an export, on a run of weights that were not trained. Real exports: end_to_end/test_predict.py."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.config import loader
from harness.data.batch import Batch
from harness.distributed.runtime import Runtime
from harness.errors import DataError, HarnessError
from harness.inference import export, trained_model
from harness.inference.formats import base
from harness.runs.files import write_sealed
from harness.runs.weights_file import save_weights
from harness.training.model.built_in import linear
from harness.training.rows import opening
from tests.fixtures import CountingTable, make_config, settings, write_rows, write_yaml


def linear_weights():
    model = linear.Model(3, 1)
    model(torch.zeros(2, 1, 8, 8))
    return model.state_dict()


@pytest.fixture
def run(tmp_path):
    """A run of a linear model on 12 validation rows, of which those that are unreadable are skipped."""
    write_rows(tmp_path, "train", 6)
    write_rows(tmp_path, "eval", 12)
    run, bad = tmp_path / "run", {"on_bad_row": "skip"}
    run.mkdir()
    task = opening.open_task(make_config(tmp_path), Runtime())
    (run / "task.json").write_text(json.dumps(task.learned))
    tree = settings(tmp_path)
    write_yaml(run / "config.yaml", {**tree, "task": {**tree["task"], **bad}})
    save_weights(linear_weights(), run / "weights.safetensors", {}, tmp_path / "work")
    return run


def test_a_run_that_is_not_finished_says_so(run, caplog):
    write_sealed(run / "summary.json", {"finished": False, "epoch": 1, "step": 3})
    save_weights(linear_weights(), run / "weights.safetensors", {"step": "2"}, run.parent / "work")
    trained_model.load(run, trust=True)
    checked(run)
    told = f"{run}: the run is not finished, its newest evaluation was after 1 of 10 epochs: weights of step 2"
    assert caplog.messages.count(told) == 2


class Positions(torch.nn.Module):
    """Looks up a vector for each position, of which it has 12, as BERT does."""

    def __init__(self, num_tokens: int, num_classes: int, same_length: bool = False) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(num_tokens, 4), torch.nn.Embedding(12, 4)
        self.output, self.same_length = torch.nn.Linear(4, num_classes), same_length
        self.register_buffer("numbers", torch.arange(12).expand(1, -1))

    def forward(self, ids):
        if self.same_length:
            ids = ids.view(-1, 6)
        return self.output((self.words(ids) + self.places(self.numbers[:, : ids.shape[1]])).mean(1))


class Bert(torch.nn.Module):
    """A tiny model of transformers with random weights."""

    def __init__(self, num_tokens: int, num_classes: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = BertConfig(vocab_size=num_tokens, num_labels=num_classes, max_position_embeddings=12, **sizes)
        self.bert = BertForSequenceClassification(config)

    def forward(self, ids):
        return self.bert(input_ids=ids, attention_mask=(ids > 0).long()).logits


def run_of_texts(folder, texts, model, tokenizer=None, **args):
    """The folder of a run of ``model`` on ``texts``, whose weights were not trained."""
    lines = ["text,label", *(f"{text},{row % 2}" for row, text in enumerate(texts))]
    tables = {f"{split}_csv": str(folder / f"{split}.csv") for split in ("train", "eval")}
    for table in tables.values():
        with open(table, "w") as file:
            file.write("\n".join(lines) + "\n")
    tree = settings(folder, model={"name": f"{__name__}.{model}", "args": args})
    tree["task"] = {"name": "text_csv", **tables, "tokenizer": {"name": "words", "max_length": 12, **(tokenizer or {})}}
    (run := folder / "run").mkdir()
    config = loader.load(write_yaml(run / "config.yaml", tree))
    task = opening.open_task(config, Runtime())
    (run / "task.json").write_text(json.dumps(task.learned))
    weights = task.model(config.model).state_dict()
    save_weights(
        {name: value.clone() for name, value in weights.items()}, run / "weights.safetensors", {}, folder / "x"
    )
    return run


TEXTS = ["a b c", "a d", "e f g h", "b", "c d e"] * 3


@pytest.mark.parametrize("texts", [TEXTS, ["a", "b"] * 6])
def test_a_model_with_a_bound_on_the_length(tmp_path, texts):
    """The bound of what is traced is the task's max_length; also if all texts of the trace have one token."""
    run = run_of_texts(tmp_path, texts, "Positions")
    assert checked(run, "torch_export")["rows"] == 12
    model = torch.export.load(tmp_path / "model").module()
    assert [len(model(torch.ones(3, length, dtype=torch.int64))) for length in (2, 12)] == [3, 3]
    with pytest.raises(AssertionError, match="12"):
        model(torch.ones(3, 13, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["torch_export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_bert(tmp_path, kind):
    for name in ("transformers", *base.find(kind).packages):
        pytest.importorskip(name)
    run = run_of_texts(tmp_path, TEXTS, "Bert")
    assert checked(run, kind)["rows"] == 12
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["inputs"] == [{"name": "tokens", "type": "int64", "shape": ["batch", "length"]}]
    if kind == "onnx":  # its axes are called the same
        (inputs,) = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "model").get_inputs()
        assert inputs.shape == ["batch", "length"]
    assert "max_length" not in described


def test_a_model_of_one_length(tmp_path):
    """All of torch's message is shown, and what to type then works."""
    texts, same = [" ".join("abcdef")] * 12, {"max_length": 6}
    run = run_of_texts(tmp_path, texts, "Positions", same, same_length=True)
    with pytest.raises(HarnessError) as caught:
        checked(run, "torch_export")
    assert len(caught.value.message.splitlines()) > 2
    assert "length" in caught.value.message.partition("\n")[2]
    word = re.search(r"add (task\.tokenizer\.pad=max_length);", caught.value.hint)[1]
    assert export.export(run, "torch_export", tmp_path / "model", [word], trust=True).exists()


def checked(run, kind="safetensors"):
    out = export.export(run, kind, run.parent / "model", trust=True)  # nobody started it: it was made by hand
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
