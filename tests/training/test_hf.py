"""Models and tokenizers of transformers (``hf:FOLDER``), LoRA, and the export of both. All models are tiny and random.

transformers and peft: pip install 'apex-harness[huggingface]'.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import random
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from harness import load_model, predict
from harness.cli import main
from harness.config import hugging_face_names, loader, reference, schedules
from harness.config.trust import require_harmless
from harness.data import hub
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError, HarnessError
from harness.inference import export
from harness.runs import files, hub_copies, layout
from harness.training import build
from harness.training.check import preflight
from harness.training.model import lora, module_names, weights
from harness.training.optimizer.built_in_schedule import BuiltInSchedule
from harness.training.rows import opening
from tests.conftest import ROOT
from tests.end_to_end.experiment import Kill, last_checkpoint, losses, run, run_folder
from tests.end_to_end.processes import drivers
from tests.fixtures import settings, write_photos, write_yaml
from tests.ranks import wait_for

INSTALL = "pip install 'apex-harness[huggingface]'"
transformers = pytest.importorskip("transformers", reason=f"transformers is not installed: {INSTALL}")
peft = pytest.importorskip("peft", reason=f"peft is not installed: {INSTALL}")
hub_errors = pytest.importorskip("huggingface_hub.errors", reason=f"huggingface_hub is not installed: {INSTALL}")

WORDS = ["good", "bad", "film", "day", "sun", "rain", "yes", "no", "maybe", "it", "is", "the", "a", "not", "very"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PLACES = 24


def write_tokenizer(folder: Path, words: list[str] = WORDS) -> int:
    """Write a BERT tokenizer of ``words``; return the size of its vocabulary."""
    every = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(every)}).save_pretrained(folder)
    return len(every)


def write_bert(folder: Path, kind: str = "BertForMaskedLM", words: list[str] = WORDS, **options: object) -> Path:
    torch.manual_seed(0)
    size = write_tokenizer(folder, words)
    config = transformers.BertConfig(vocab_size=size, max_position_embeddings=PLACES, **SIZES, **options)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A pretrained BERT, which has no layer for classes."""
    return write_bert(tmp_path_factory.mktemp("hub") / "bert")


def write_pairs(folder: Path, label: object = None) -> None:
    draws = random.Random(0)
    for split, number in (("train", 30), ("eval", 11)):
        with open(folder / f"{split}.csv", "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["premise", "hypothesis", "label"])
            for row in range(number):
                texts = [" ".join(draws.choices(WORDS, k=draws.randint(1, 6))) for _ in range(2)]
                out.writerow([*texts, f"class {row % 2}" if label is None else label])


def tree_of(folder: Path, bert: Path, **sections: object) -> dict:
    tree = settings(folder, model={"name": f"hf:{bert}"}, name="run", precision={"opt_level": "O0"})
    tree["task"] = {
        "name": "text_csv",
        "train_csv": str(folder / "train.csv"),
        "eval_csv": str(folder / "eval.csv"),
        "text_column": ["premise", "hypothesis"],
        "tokenizer": {"name": f"hf:{bert}", "max_length": 20},
    }
    tree |= {"batch": {"global": 6}, "optimizer": {"name": "adamw", "lr": 0.01}, "train": {"epochs": 2, "log_every": 1}}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


@pytest.fixture
def make(tmp_path, bert):
    """Write the configuration of sentence pairs, with ``sections`` merged into it and ``overrides``, and load it."""
    write_pairs(tmp_path)

    def make(*overrides: str, **sections: object):
        return loader.load(write_yaml(tmp_path / "config.yaml", tree_of(tmp_path, bert, **sections)), overrides)

    return make


def built(config):
    task = opening.open_task(config, Runtime())
    return task, build.build_model(config, task)


# Tokens


@pytest.mark.parametrize("pad", ["batch", "max_length"])
def test_pairs_with_masks(make, bert, pad):
    """As transformers encodes them, in each of the last dimension's columns."""
    task = opening.open_task(make(f"task.tokenizer.pad={pad}"), Runtime())
    rows = np.asarray([3, 0, 7])
    inputs = task.train.batch(rows, 0).inputs
    texts = [task.train.table.strings(column, rows) for column in ("premise", "hypothesis")]
    padding = "longest" if pad == "batch" else "max_length"
    own = transformers.AutoTokenizer.from_pretrained(str(bert))
    expected = own(*texts, padding=padding, max_length=20, return_tensors="pt")
    assert inputs.shape[1] == 20 if pad == "max_length" else inputs.shape[1] < 20
    for index, name in enumerate(("input_ids", "attention_mask", "token_type_ids")):
        assert torch.equal(inputs[..., index], expected[name]), name
    assert task.known(rows)["hypothesis"] == task.eval.table.strings("hypothesis", rows)


def test_pair_loses_the_end_of_the_longer_text_first(make, bert):
    task = opening.open_task(make("task.tokenizer.max_length=10"), Runtime())
    found = hub.tokenizer(f"hf:{bert}", pairs=True)
    pair = [["good bad film day sun rain"], ["yes no maybe it"]]
    for length, kept in ((13, "good bad film day sun rain [SEP] yes no maybe it"), (12, "good bad film day sun [SEP] "
                         "yes no maybe it"), (9, "good bad film [SEP] yes no maybe")):  # fmt: skip
        ids = found.padded(pair, length, False)[0, :, 0]
        assert found.tokenizer.decode(ids) == f"[CLS] {kept} [SEP]"
    assert found.lengths(pair).tolist() == [13]
    assert " rows looked at " in task.summary["tokens"]


def test_padding_does_not_change_the_outputs(make):
    task, model = built(make())
    inputs = task.train.batch(np.arange(4), None).inputs
    padded = torch.nn.functional.pad(inputs, (0, 0, 0, 20 - inputs.shape[1]))
    torch.testing.assert_close(model.eval()(inputs), model(padded))


def test_empty_texts_have_a_place(tmp_path):
    """Also with a tokenizer that adds nothing to a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    rules = Tokenizer(models.WordLevel({"<pad>": 0, "good": 1, "<unk>": 2}, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        tmp_path
    )
    (tmp_path / "config.json").write_text("{}")
    found = hub.tokenizer(f"hf:{tmp_path}")
    assert not found.separates_pairs
    made = found.padded([["", ""]], 8, False)
    assert made.shape[:2] == (2, 1)
    assert not made[..., 1].any()
    assert found.padded([["good good", ""]], 8, False)[..., 1].tolist() == [[1, 1], [0, 0]]


# Weights


BARE = {
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": PLACES},
    "Llama": {**SIZES, "max_position_embeddings": PLACES, "pad_token_id": 7},
    "Bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "max_position_embeddings": PLACES, "pad_token_id": 0, "eos_token_id": 3},
    "Bert": {**SIZES, "max_position_embeddings": PLACES},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "eos_token_id": 3},
}  # fmt: skip


def write_bare(folder: Path, kind: str, head: str = "Model", **options: object) -> Path:
    """A model without a last layer, unless ``head``; the tokenizer of a decoder has no padding of its own."""
    size = write_tokenizer(folder)
    if kind in ("GPT2", "Llama"):
        backend = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]"
        ).save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(vocab_size=size, **BARE[kind], **options)
    getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "labels"), [*zip(BARE, ("single_label", "regression", "single_label", "regression"), strict=False)]
)
def test_a_bare_model_of_texts_gets_a_new_last_layer(make, tmp_path, kind, labels):
    """Which reads the last token of a decoder, or the last one that ends a text: not the padding."""
    place = f"hf:{write_bare(tmp_path / kind, kind)}"
    task = {"tokenizer": {"name": place, "max_length": 20}, "labels": {"kind": labels}}
    config = make(model={"name": place}, task=task)
    if labels == "regression":
        write_numbers(tmp_path)
    task, model = built(config)
    summary = weights.load(model, config)["summary"]
    assert re.search("not in the file, so newly initialized: (score|class)[^;]*$", summary)
    rows = np.arange(4)
    found = model.eval()(task.train.batch(rows, None).inputs)
    assert found.shape == (4, 2 if labels == "single_label" else 1)
    wide = dataclasses.replace(task.train, fixed=True).batch(rows, None).inputs
    torch.testing.assert_close(found, model(wide))


@pytest.mark.parametrize("separates", [True, False])
def test_pairs_without_a_separator_are_named(make, monkeypatch, separates):
    monkeypatch.setattr(
        hub.HubTokenizer, "separates_pairs", property(lambda _: separates, lambda *_: None), raising=False
    )
    warned = [note for note in opening.open_task(make(), Runtime()).notes if "no token between both" in note]
    assert len(warned) == (not separates)
    assert not opening.open_task(make("task.text_column=premise"), Runtime()).notes


def test_weights_are_those_of_from_pretrained(make, bert):
    config = make()
    with pytest.raises(ConfigError, match=f"did you mean model.weights=hf:{bert}\\?"):
        weights.load(built(config)[1], make(f"model.weights={bert}"))
    task, model = built(config)
    before = model.classifier.weight.clone()
    facts = weights.load(model, config)
    there = transformers.AutoModel.from_pretrained(str(bert))
    for name, value in there.state_dict().items():
        if not name.startswith("pooler"):
            assert torch.equal(value, model.state_dict()[f"bert.{name}"]), name
    assert torch.equal(model.classifier.weight, before)
    assert "not in the file, so newly initialized: bert.pooler.dense.weight" in facts["summary"]
    assert make("model.weights=random").model.start_weights is None
    assert len(facts["sha256"]) == 64


def test_published_weights_are_located_once(make, tmp_path, monkeypatch):
    """A folder that is called as torchvision's word for them is none of the model."""
    config = make("model.weights=pretrained")
    _, model = built(config)
    asked, locate = [], hub.weights
    monkeypatch.setattr(hub, "weights", lambda *args: asked.append(args) or locate(*args))
    (tmp_path / "pretrained").mkdir()
    monkeypatch.chdir(tmp_path)
    weights.load(model, config)
    assert asked == [(config.model.name, "model.weights")]


def test_a_last_layer_of_other_outputs_is_new(make, tmp_path):
    other = write_bert(tmp_path / "three", "BertForSequenceClassification", num_labels=3)
    config = make(f"model.weights=hf:{other}")
    task, model = built(config)
    assert "classifier.bias) is not loaded but newly initialized: 3 outputs" in weights.load(model, config)["summary"]
    assert model(task.train.batch(np.arange(2), None).inputs).shape == (2, 2)


@pytest.mark.parametrize("kind", ["Bert", "Bart"])
@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ("class 1, class 0", "class 0, class 1", "; its classes {} are put in the order {}"),
        ("bad, good", "class 0, class 1", "newly initialized: the classes are {} in the file, {} here"),
        ("bad, good", "0, 1", "; its classes {} are taken for {}"),
        ("LABEL_0, LABEL_1", "class 0, class 1", ""),
    ],
)
def test_outputs_follow_the_names_of_the_classes(make, tmp_path, kind, theirs, ours, told):
    folder, names = tmp_path / kind, theirs.split(", ")
    torch.manual_seed(1)
    write_bare(folder, kind, "ForSequenceClassification", id2label=dict(enumerate(names)))
    config = make(model={"name": f"hf:{folder}"}, task={"tokenizer": {"name": f"hf:{folder}", "max_length": 20}})
    if ours == "0, 1":
        for file in tmp_path.glob("*.csv"):
            file.write_text(file.read_text().replace("class ", ""))
    task, model = built(config)
    *_, last, _ = model.parameters()
    before = last.detach().clone()
    summary = weights.load(model, config, task)["summary"]
    assert summary.endswith(told.format(theirs, ours) or " tensors")
    there = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    inputs = task.train.batch(np.arange(4), None).inputs
    expected = there(**dict(zip(model.token_inputs, inputs.unbind(-1), strict=True))).logits
    assert torch.equal(last, before) == ("newly" in told)
    if "newly" not in told:
        expected = expected[:, [1, 0]] if "order" in told else expected
        torch.testing.assert_close(model.eval()(inputs), expected)


class Wrapped(torch.nn.Module):
    """A model of one's own around a part that has published weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"text": transformers.BertModel(transformers.BertConfig(
            vocab_size=len(WORDS) + 5, max_position_embeddings=PLACES, **SIZES))})  # fmt: skip
        self.out = torch.nn.Linear(16, 2)


def test_names_are_mapped_by_their_prefix(make, bert, tmp_path):
    """bert.* in the file is encoder.text.* in the model; what is missing is named, and allowed with strict=false."""
    model, config = Wrapped(), make(f"model.weights=hf:{bert}", "model.name=text_cnn", "model.strict=false")
    facts = weights.load(model, config)
    assert "(bert.* as encoder.text.*)" in facts["summary"]
    there = load_file(bert / "model.safetensors")
    for name, value in model.encoder["text"].state_dict().items():
        if "pooler" not in name:
            assert torch.equal(value, there[f"bert.{name}"]), name
    with pytest.raises(ConfigError, match="missing: encoder.text.pooler"):
        weights.load(model, make(f"model.weights=hf:{bert}", "model.name=text_cnn"))
    whole = {f"a.b.{name}": value * 0 for name, value in model.state_dict().items()}
    save_file(whole, tmp_path / "whole.safetensors")
    weights.load(model, make(f"model.weights={tmp_path}/whole.safetensors", "model.name=text_cnn"))
    assert not any(value.any() for value in model.state_dict().values())


def test_weights_of_a_run_with_and_without_lora(make, tmp_path):
    """A run with LoRA starts from one without: its base has the old weights, its matrices are new."""
    _, plain = built(make())
    save_file({name: value.clone() for name, value in plain.state_dict().items()}, tmp_path / "plain.safetensors")
    config = make(f"model.weights={tmp_path}/plain.safetensors", model={"lora": {"targets": ["query"]}})
    _, adapted = built(config)
    with torch.no_grad():
        adapted.bert.encoder.layer[0].attention.self.query.base_layer.weight.zero_()
    warning = weights.load(adapted, config)["warning"]
    assert "plain.safetensors: harness export --format peft" in warning, "before the training, not after it"
    assert not weights.load(adapted, make(model={"lora": {"targets": ["query"]}}))["warning"]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"(?s)adapter is an adapter of peft, .* -> give a whole model, as"):
        weights.find(str(tmp_path / "adapter"), config.model.name)
    weights.load(adapted, config)
    own = adapted.bert.encoder.layer[0].attention.self.query
    assert torch.equal(own.base_layer.weight, plain.bert.encoder.layer[0].attention.self.query.weight)


# LoRA


@pytest.mark.parametrize(
    ("targets", "number"),
    [(["query", "value"], 4), (["bert.encoder.layer.1.*"], 6), (["layer.1"], 6), ([], 13), (["all-linear"], 13)],
)
def test_only_matrices_and_the_last_layer_are_trained(make, targets, number):
    config = make(model={"lora": {"r": 3, "targets": targets}})
    _, model = built(config)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name for name in trained if module_names.LORA not in name} == {"classifier.weight", "classifier.bias"}
    assert len(trained) == 2 * number + 2
    plan = preflight.examine(str(Path(config.output).parent / "config.yaml"), [], 1, 0.1)
    count = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert not plan.errors
    assert plan.facts["model"].endswith(f"of which {count:,} are trained")
    assert plan.facts["lora"].startswith(f"r 3, alpha 16, on {number} layers (")
    if targets == ["query", "value"]:
        assert plan.facts["lora"].endswith(" (query, value)")
    loaded, own = re.search(r", (\d+) of (\d+) tensors", plan.facts["weights"]).groups()
    assert int(own) == len([name for name in model.state_dict() if module_names.LORA not in name]) > int(loaded)
    assert plan.facts["weights"].endswith(f"; {2 * number} new LoRA matrices")


def test_modules_to_save_are_trained_whole(make):
    """They are not adapted, also if targets names them; the weights to start from are loaded into them."""
    config = make(model={"lora": {"targets": ["query", "dense"], "modules_to_save": ["layer.1.output", "pooler"]}})
    _, model = built(config)
    weights.load(model, config)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    whole = {name for name in trained if module_names.LORA not in name}
    assert {name.rpartition(".")[0] for name in whole} == {
        "classifier", "bert.pooler.dense", "bert.encoder.layer.1.output.dense", "bert.encoder.layer.1.output.LayerNorm"
    }  # fmt: skip
    assert len(trained) - len(whole) == 2 * 7
    with pytest.raises(ConfigError, match="no layer of the model matches 'poler'\n  -> did you mean pooler") as caught:
        built(make(model={"lora": {"modules_to_save": ["poler"]}}))
    assert caught.value.where == "model.lora.modules_to_save"
    with pytest.raises(ConfigError, match="no linear layers to adapt but .* modules_to_save"):
        built(make(model={"lora": {"modules_to_save": ["bert"]}}))


@pytest.mark.parametrize("frozen", [True, False])
def test_dora_starts_at_the_norms_of_the_loaded_weights(make, bert, tmp_path, frozen):
    """So it changes no output yet; norms that a file has are kept, and those that are frozen stay so."""
    options = {"use_dora": True, "use_rslora": True, "r": 4, "targets": ["query", "dense", "word_embeddings"]}
    config = make(model={"lora": options, "freeze": ["*lora*"] * frozen})
    task, model = built(config)
    weights.load(model, config)
    trained = [name for name, param in model.named_parameters() if param.requires_grad and ".lora_" in name]
    assert len(trained) == (0 if frozen else 3 * len(lora.adapted(model)))
    assert {layer.scaling["default"] for layer in map(model.get_submodule, lora.adapted(model))} == {16 / 4**0.5}
    assert "r 4, alpha 16, rsLoRA, DoRA, on 10 layers" in lora.summary(model, config.model.lora)
    plain = built(make())[1]
    own = {each.replace(lora.BASE_LAYER, "."): value for each, value in model.state_dict().items()}
    plain.load_state_dict(own, strict=False)
    inputs = task.train.batch(np.arange(4), None).inputs
    torch.testing.assert_close(model.eval()(inputs), plain.eval()(inputs))
    with torch.no_grad():
        for layer in map(model.get_submodule, lora.adapted(model)):
            layer.lora_magnitude_vector["default"].weight.add_(1)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "a.safetensors")
    config = make(f"model.weights={tmp_path}/a.safetensors", model={"lora": options})
    again = built(config)[1]
    weights.load(again, config)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize(
    ("freeze", "left"),
    [
        ("bert.*", {"A", "B", "classifier"}),
        ("*", {"A", "B"}),
        ("classifier", {"A", "B"}),
        ("*.lora_A.*", {"B", "classifier"}),
        ("*lora*", {"classifier"}),
    ],
)
def test_frozen_layers_keep_their_matrices(make, freeze, left, caplog):
    _, model = built(make(model={"freeze": [freeze], "lora": {"targets": ["query"]}}))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name.partition(".lora_")[2][:1] or name.partition(".")[0] for name in trained} == left
    assert ("'bert.*' changes nothing" in caplog.text) == (freeze == "bert.*")


def test_a_pattern_that_freezes_nothing_is_refused(make):
    with pytest.raises(ConfigError, match="matches only matrices of LoRA") as caught:
        built(make(model={"freeze": ["*.default.weight"], "lora": {"targets": ["query"]}}))
    assert caught.value.where == "model.freeze"


def test_lora_of_a_model_without_transformers(make):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    )
    lora.apply(net, make(model={"lora": {}}).model.lora)
    trained = [name for name, param in net.named_parameters() if param.requires_grad]
    assert trained == ["2.lora_A.default.weight", "2.lora_B.default.weight", "3.weight", "3.bias"]
    inputs = torch.randn(3, 1, 3, 3)
    with torch.no_grad():
        net[2].lora_B.default.weight.normal_()
        before = net(inputs)
        lora.merge(net)
        torch.testing.assert_close(net(inputs), before)
    assert type(net[2]) is torch.nn.Linear


# What is shipped


@pytest.mark.parametrize("with_lora", [False, True])
def test_shipped_configuration_of_the_hub(tmp_path, monkeypatch, capsys, with_lora):
    """Its settings, and those of its comment, with tables like those of the hub and a model of the same kind. It is
    none of configs/*.yaml, which train without the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_tokenizer(tmp_path / "tiny")
    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
    config = transformers.DistilBertConfig(vocab_size=len(WORDS) + 5, **sizes)
    transformers.DistilBertForMaskedLM(config).save_pretrained("tiny")
    draws = random.Random(0)
    for split, number in (("train", 64), ("validation", 20)):
        columns = {f"sentence{n}": [" ".join(draws.choices(WORDS, k=4)) for _ in range(number)] for n in (1, 2)}
        (tmp_path / "data" / "mrpc").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns | {"label": [row % 2 for row in range(number)]}), f"data/mrpc/{split}.parquet")
    path = ROOT / "configs" / "hub" / "text_pairs.yaml"
    text = path.read_text()
    assert (path.parent / re.search(r"\$schema=(\S+)", text).group(1)).resolve() == ROOT / "configs" / "schema.json"
    words = ["model.name=hf:tiny", "task.tokenizer.name=hf:tiny"]
    if with_lora:
        words += shlex.split(re.search(r"Fewer weights to train: (.*)", text).group(1))
    assert main(["check", str(path), *words]) == 0
    assert ("lora: r 8" in capsys.readouterr().out) is with_lora
    words += ["train.epochs=1", "runtime.device=cpu"]
    terminal = tmp_path / "terminal.txt"
    assert wait_for(drivers(1, ["-c", str(path), *words], terminal), 90) == [0], terminal.read_text()
    assert len(Path("runs/text_pairs/predictions.csv").read_text().splitlines()) == 21


def test_table_of_training_arguments():
    """The page names arguments of the installed transformers, settings, values that they take, and the defaults; hints
    and ``harness settings`` name the same settings."""
    section = (ROOT / "docs" / "fine_tuning.md").read_text().partition("### From TrainingArguments\n")[2]
    fields = {each.name: each.default for each in dataclasses.fields(transformers.TrainingArguments)}
    keys = {setting.key for chapter in reference.chapters() for setting in chapter.settings}
    config = ROOT / "configs" / "hub" / "text_pairs.yaml"
    rows = re.findall(r"^\| (`[a-z].*) \| (.*) \|$", section.partition("\n## ")[0], re.M)
    assert len(rows) == 21
    others = {"Trainer", "EarlyStoppingCallback", "LoraConfig"}
    parameters = [
        inspect.signature(getattr(transformers, each)).parameters for each in ("EarlyStoppingCallback", "Trainer")
    ]
    of_lora = inspect.signature(peft.LoraConfig).parameters
    known = {*fields, *of_lora, *parameters[0], *parameters[1]}
    for theirs, ours in rows:
        names = set(re.findall(r"`(.*?)`", theirs)) - others
        assert names <= known
        hints = {hugging_face_names.setting(name) for name in names}
        keys_here = {named.partition("=")[0] for named in re.findall(r"`(.*?)`", ours)}
        assert {hint.partition("=")[0] for hint in hints} <= keys_here
        for named in re.findall(r"`(.*?)`", ours):
            key, given, _ = named.partition("=")
            assert key in keys or key.startswith(("optimizer.args.", "task.loss.args.")), named
            loader.load(config, shlex.split(named) if given else [])
    ours = {hint.partition("=")[0] for hint in hugging_face_names.SETTINGS.values()}
    assert {key for key in ours if not key.startswith(("optimizer.args.", "task.loss.args."))} <= keys
    assert set(hugging_face_names.SCHEDULES) <= {each.value for each in transformers.SchedulerType}
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.S)[1])
    assert shown == {
        "batch": {"per_rank": fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"]},
        "optimizer": {"name": fields["optim"].split("_")[0], "lr": fields["learning_rate"],
                      "weight_decay": fields["weight_decay"]},
        "schedule": {"name": {"linear": "polynomial"}[fields["lr_scheduler_type"]]},
        "precision": {"opt_level": {False: "O0"}[fields["fp16"] or fields["bf16"]]},
        "train": {"epochs": fields["num_train_epochs"], "clip_norm": fields["max_grad_norm"]},
    }  # fmt: skip
    adamw = inspect.signature(torch.optim.AdamW).parameters
    assert (fields["adam_epsilon"], fields["label_smoothing_factor"]) == (adamw["eps"].default, 0)
    assert (fields["adam_beta1"], fields["adam_beta2"]) == adamw["betas"].default


def test_linear_of_transformers():
    """It is polynomial; the first update of its warm-up has the rate 0, ours that of the second."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, 4, 12)
    rates = []
    for _ in range(12):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    section = schedules.section("polynomial")(name="polynomial", warmup="4 steps")
    ours = BuiltInSchedule(section, 1.0, 1.0, 4, 12)
    assert [ours.lr(step) for step in range(12)] == pytest.approx([*rates[1:5], *rates[4:]])


# What is refused


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"torchvision.io": None}, "torchvision cannot be imported: .*\n  -> .*torch torchvision"),
        ({}, "model.name: transformers cannot import hf:.*/bert: No module named 'flash'\n  -> .*: pip install flash$"),
    ],
)
def test_a_library_that_the_model_needs_is_named(make, monkeypatch, broken, message):
    def from_config(*_, **__):
        try:
            raise ModuleNotFoundError("No module named 'flash'", name="flash.attention")
        except ImportError as error:
            raise ModuleNotFoundError("Could not import module 'BertForSequenceClassification'") from error

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_config", from_config)
    for name, module in broken.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(HarnessError, match=message) as caught:
        built(make())
    assert isinstance(caught.value, ConfigError) != bool(broken)


def renamed(bert: Path, folder: Path, **keys: object) -> Path:
    """A copy of the configuration in ``bert`` alone, with ``keys``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**json.loads((bert / "config.json").read_text()), **keys}))
    return folder


SIDES = {"in_features": 1, "out_features": 3}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "hf:TMP/none"}}, "there is no folder TMP/none"),
        ({"model": {"name": "hf:TMP/empty"}}, "the folder TMP/empty has no config.json -> give a folder"),
        (
            {"model": {"name": "hf:TMP/run"}},
            "has no config.json -> it is a run: .* model.weights=TMP/run; or .* export",
        ),
        ({"model": {"name": "hf:TMP/outer"}}, "has no config.json -> did you mean hf:TMP/outer/checkpoint-5?"),
        (
            {"model": {"name": "hf:owner/name"}},
            "no folder owner/name, and the hub's owner/name is not in the cache -> HF_HUB_OFFLINE is set",
        ),
        (
            {"model": {"name": "hf:tinybrt"}},
            "there is no folder tinybrt, and the hub's tinybrt is not in the cache -> did you mean hf:.*tinybert\\?$",
        ),
        ({"model": {"name": "hf:TMP/tinybrt"}}, "there is no folder TMP/tinybrt -> did you mean hf:TMP/tinybert\\?$"),
        (
            {"model": {"args": {"hidden_sizes": 3}}},
            "BertConfig has no setting hidden_sizes -> did you mean hidden_size",
        ),
        ({"model": {"args": {"num_labels": 3}}}, "num_labels is set by the task -> remove it"),
        ({"model": {"args": {"dtype": "bfloat16"}}}, "dtype is not the precision .* -> set precision.opt_level"),
        ({"model": {"args": {"torch_dtype": "auto"}}}, "torch_dtype is not the precision of the training"),
        ({"model": {"args": {"trust_remote_code": True}}}, "code of the folder's own is not run"),
        ({"model": {"args": {"revision": "main"}}}, "revision is a part of the name -> set .*@REVISION"),
        ({"model": {"name": "hf:TMP/adapter"}}, "TMP/adapter has no config.json -> it is an adapter of peft: give a"),
        ({"model": {"name": "hf:TMP/vit", "weights": "random"}}, "type vit, .* no classification of texts"),
        (
            {"model": {"name": "hf:TMP/of_timm"}},
            "is a model of timm -> set model.name=timm:vit_x model.weights=hf:TMP/of",
        ),
        ({"model": {"name": "hf:TMP/strange", "weights": "random"}}, "config.json cannot be used"),
        (
            {"task": {"tokenizer": {"name": "words"}}},
            "not trained on the tokens of .* words -> set task.tokenizer.name=hf:",
        ),
        ({"task": {"tokenizer": {"name": "hf:TMP/config"}}}, "there is no tokenizer in TMP/config"),
        (
            {"model": {"name": "hf:TMP/large", "weights": "random"}, "task": {"tokenizer": {"name": "hf:TMP/large"}}},
            "the tokenizer has 26 ids, but hf:.* only 20 -> .*model.resize_token_embeddings",
        ),
        ({"model": {"name": "torch.nn.Linear", "args": SIDES}}, "-> write forward.* 0 is input_ids, 1 attention_mask"),
        ({"task": {"tokenizer": {"name": "hf:TMP/other"}}}, "hf:TMP/other has other tokens than hf:"),
        (
            {"task": {"tokenizer": {"max_length": 25}}},
            "cannot process a batch .*: it has 24 positions -> set task.tokenizer.max_length=24: the model has no more",
        ),
        (
            {"model": {"name": "hf:TMP/t5"}},
            'decoder_start_token_id.* -> add "decoder_start_token_id": 0, .* config.json',
        ),
        ({"model": {"lora": {"targets": ["querry"]}}}, "no layer of the model matches 'querry' -> did you mean query"),
        ({"model": {"lora": {"targets": ["xyz"]}}}, "the model has .*, bert.encoder.layer.\\*.attention.self.query, "),
    ],
)
def test_refused_before_training(make, bert, tmp_path, monkeypatch, sections, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for folder in ("empty", "run", "outer/checkpoint-5", "adapter"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "outer" / "checkpoint-5" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    renamed(bert, tmp_path / "tinybert")
    renamed(bert, tmp_path / "vit", model_type="vit")
    renamed(bert, tmp_path / "strange", model_type="strange")
    (tmp_path / "of_timm").mkdir()
    (tmp_path / "of_timm" / "config.json").write_text(
        '{"architecture": "vit_x", "num_classes": 2, "pretrained_cfg": {}}'
    )
    for name, words in (("large", [*WORDS, *"uvwxyz"]), ("other", WORDS[::-1])):
        write_tokenizer(renamed(bert, tmp_path / name), words)
    renamed(bert, tmp_path / "config")
    write_bare(tmp_path / "t5", "T5")
    text = json.dumps(sections).replace("TMP", str(tmp_path))
    changed = json.loads(text)
    if options := changed.get("task", {}).get("tokenizer"):
        changed["task"]["tokenizer"] = {"name": f"hf:{bert}", "max_length": 20, **options}
        if options.get("name") == "words":
            changed["task"]["text_column"] = "premise"
    with pytest.raises(HarnessError, match="(?s)" + message.replace("TMP", str(tmp_path)).replace(" -> ", "\n  -> ")):
        built(make(**changed))


def test_a_hub_out_of_reach_is_one_short_reason(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise hub_errors.LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match="(?s)there is no folder smal_bert, and the hub cannot be reached\n  -> "):
        hub.folder("hf:smal_bert", "model.name")


def test_the_positions_that_roberta_keeps_for_padding_are_not_counted(make, bert, tmp_path):
    config = transformers.RobertaConfig(vocab_size=20, max_position_embeddings=PLACES + 1, pad_token_id=0, **SIZES)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "roberta")
    model, tokenizer = {"name": f"hf:{tmp_path}/roberta", "weights": "random"}, {"name": f"hf:{bert}"}
    with pytest.raises(ConfigError, match=f"set task.tokenizer.max_length={PLACES}: the model has no more positions"):
        built(make(model=model, task={"tokenizer": {**tokenizer, "max_length": PLACES + 1}}))
    built(make(model=model, task={"tokenizer": {**tokenizer, "max_length": PLACES}}))


def test_refused_settings(make):
    for columns in (["a", "a"], ["a", "b", "c"], []):
        with pytest.raises(ConfigError, match="takes one column, or a list of two different ones"):
            make(task={"text_column": columns})
    with pytest.raises(ConfigError, match="the tokenizer words takes one; hf:FOLDER_OR_NAME takes pairs"):
        make(task={"tokenizer": {"name": "words"}})


def test_a_folder_without_weights(make, bert, tmp_path):
    folder = renamed(bert, tmp_path / "config")
    write_tokenizer(folder)
    config = make(model={"name": f"hf:{folder}"}, task={"tokenizer": {"name": f"hf:{folder}", "max_length": 20}})
    with pytest.raises(ConfigError, match="(?s)has no weights: .*-> set model.weights=random"):
        weights.load(built(config)[1], config)


def test_weights_that_could_run_code_are_refused(make, bert, tmp_path):
    shutil.copytree(bert, tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save({"classifier.bias": Path("a file")}, tmp_path / "bert" / "pytorch_model.bin")
    config = make(model={"name": f"hf:{tmp_path}/bert"})
    with pytest.raises(ConfigError, match="cannot be read: they hold more than tensors and could run code\n"):
        weights.load(built(config)[1], config)


def test_a_folder_that_someone_else_named_needs_trust(make, tmp_path):
    make()
    with pytest.raises(ConfigError, match="(?s)task.tokenizer.name: reads hf:.*model.name: reads hf:"):
        require_harmless(tmp_path / "config.yaml", [])


def test_missing_library_is_named(make, monkeypatch):
    config = make(model={"lora": {}})
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"(?s)needs peft, which is not installed.*harness\[huggingface\]"):
        built(config)


# Runs


LORA = {
    "lora": {"r": 4, "targets": ["query", "value"], "dropout": 0.1, "modules_to_save": ["pooler"], "use_dora": True}
}


@pytest.mark.parametrize("model", [{}, LORA], ids=["whole", "lora"])
def test_a_killed_run_resumes_exactly(make, bert, tmp_path, model, monkeypatch):
    """On two ranks, after the folder of the model was moved; what is not trained has no state of the optimizer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    old, new = (f"hf:{tmp_path}/{name}" for name in ("bert", "moved"))
    shutil.copytree(bert, tmp_path / "bert")
    tokenizer = {"name": old, "max_length": 20}
    make(task={"tokenizer": tokenizer}, model={"name": old, **model}, checkpoint={"every": 2})
    config, base = tmp_path / "config.yaml", tmp_path / "base"
    assert run(config, 2, f"output={base}") == [0, 0], (tmp_path / "terminal-0.txt").read_text()
    assert any(run(config, 2, kill=Kill(1, 3)))
    (tmp_path / "bert").rename(tmp_path / "moved")
    named = [f"model.name={new}", f"task.tokenizer.name={new}"] if model else []  # else: the copy in the run folder
    plan = preflight.examine(str(config), named, 2, 1.0)
    assert not plan.errors
    assert ("the run resumes from its own copy" in plan.facts.get("warning", "")) is (not model)
    assert run(config, 2, *named) == [0, 0]
    folder = run_folder(config)
    log = (folder / "logs" / "rank-0.log").read_text()
    assert ("the same files" in log, "resuming from the copy" in log) == (bool(model), not model)
    assert losses(folder) == losses(base / "run")
    content = last_checkpoint(folder)
    before = last_checkpoint(base / "run")
    assert all(torch.equal(value, before["model"][name]) for name, value in content["model"].items())
    trained = len(content["optimizer"]["state"])
    assert trained == (16 if model else len(content["model"]))


@pytest.mark.parametrize("model", [{}, LORA], ids=["whole", "lora"])
def test_from_texts_to_from_pretrained(make, tmp_path, monkeypatch, model):
    """Predictions of the run, of ``predict`` and of the exported folder agree, without the harness."""
    monkeypatch.chdir(tmp_path)
    make(model=model)
    assert run(tmp_path / "config.yaml") == [0], (tmp_path / "terminal-0.txt").read_text()
    folder = run_folder(tmp_path / "config.yaml")
    words = ["predict", str(folder), "--csv", "eval.csv"]
    assert main([*words, "--out", "new.csv"]) == 0
    assert (tmp_path / "new.csv").read_text() == (folder / "predictions.csv").read_text()
    assert main(["export", str(folder), "--format", "huggingface", "--out", "out"]) == 0
    page = (tmp_path / "out" / "README.md").read_text()
    there, own = (eval(line.replace("FOLDER", "out")) for line in re.findall("^    (.*)", page, re.M))
    best = json.loads((folder / "summary.json").read_text())["best"]
    assert f"Validation: top1 {best['top1']:.4f}, loss " in page
    assert own.model_max_length == 20
    again = [*words, "--out", "again.csv", "task.tokenizer.name=hf:out"]
    assert main(again) == 0
    assert (tmp_path / "new.csv").read_text() == (tmp_path / "again.csv").read_text()
    with open(folder / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    encoded = own(
        [row["premise"] for row in rows], [row["hypothesis"] for row in rows], padding=True, return_tensors="pt"
    )
    pairs = [(row["premise"], row["hypothesis"]) for row in rows]
    assert predict(folder, pairs)["prediction"].tolist() == [row["prediction"] for row in rows]
    ready = load_model(folder)
    assert torch.equal(ready.preprocess(pairs[0]), ready.preprocess(pairs[:1]))
    scores = there(**encoded).logits.softmax(1)
    assert [there.config.id2label[index] for index in scores.argmax(1).tolist()] == [row["prediction"] for row in rows]
    expected = torch.tensor([[float(row["score_class 0"]), float(row["score_class 1"])] for row in rows])
    torch.testing.assert_close(scores.detach(), expected, atol=1e-5, rtol=1e-4)
    assert json.loads((tmp_path / "out.json").read_text())["checked"]["rows"] == 12
    with pytest.raises(ConfigError, match="(?s)it exists already.*-> remove it"):
        export.export(folder, "huggingface", tmp_path / "out")


@pytest.mark.parametrize("targets", [["query", "value"], []], ids=["dora", "all"])
@pytest.mark.parametrize("kind", ["single_label", "regression"])
def test_an_adapter_for_peft(make, tmp_path, monkeypatch, kind, targets):
    """It has the modules that the base lacks, such as the pooler of this one, and computes what the run predicts."""
    monkeypatch.chdir(tmp_path)
    options = {"r": 4, "targets": targets, "modules_to_save": ["layer.1.output.LayerNorm"]}
    options |= {"use_dora": True, "use_rslora": True} if targets else {}
    make(model={"lora": options}, task={"labels": {"kind": kind}}, train={"epochs": 1})
    if kind == "regression":
        write_numbers(tmp_path)
    assert run(tmp_path / "config.yaml") == [0], (tmp_path / "terminal-0.txt").read_text()
    folder = run_folder(tmp_path / "config.yaml")
    assert main(["export", str(folder), "--format", "peft", "--out", "out"]) == 0
    size = sum(len(value.flatten()) for value in load_file("out/adapter_model.safetensors").values())
    lines = re.findall("^    (.*)", Path("out/README.md").read_text(), re.M)
    there, on_base = (eval(line.replace("FOLDER", "out")) for line in lines)  # with the names
    names = {0: "class 0", 1: "class 1"} if kind == "single_label" else {0: "label"}
    assert there.config.id2label == on_base.config.id2label == names
    inputs = json.loads(Path("out.json").read_text())["inputs"]
    assert [each["name"] for each in inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert inputs[0]["shape"] == ["batch", "length"]
    assert size < sum(param.numel() for param in there.get_base_model().parameters()) / 2
    own = transformers.AutoTokenizer.from_pretrained("out")
    with open(folder / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    texts = [[row[column] for row in rows] for column in ("premise", "hypothesis")]
    inputs = own(*texts, padding=True, return_tensors="pt")
    found = there.eval()(**inputs).logits.detach()
    torch.testing.assert_close(on_base.eval()(**inputs).logits.detach(), found)
    if kind == "regression":
        torch.testing.assert_close(found[:, 0].tolist(), [float(row["prediction"]) for row in rows], atol=0.05, rtol=0)
        return
    expected = torch.tensor([[float(row["score_class 0"]), float(row["score_class 1"])] for row in rows])
    torch.testing.assert_close(found.softmax(1), expected, atol=1e-5, rtol=1e-4)
    other = write_bert(tmp_path / "other", initializer_range=0.5)
    expected = "(?s)beside the matrices are not those of hf:.*-> use --format huggingface.* train from model.name=hf:"
    with pytest.raises(ConfigError, match=expected):
        export.export(folder, "peft", tmp_path / "none", [f"model.name=hf:{other}"])


def test_a_frozen_last_layer_in_another_order_is_exported(make, tmp_path, monkeypatch):
    """The matrices change nothing yet, so what is exported computes the logits of the folder, in our order."""
    monkeypatch.chdir(tmp_path)
    names = {"id2label": {0: "class 1", 1: "class 0"}}
    write_bert(tmp_path / "flipped", "BertForSequenceClassification", **names)
    model = {"name": "hf:flipped", "freeze": ["classifier"], "lora": {"targets": ["query"]}}
    make(model=model, optimizer={"lr": 1e-12}, train={"epochs": 1})
    assert run(tmp_path / "config.yaml") == [0], (tmp_path / "terminal-0.txt").read_text()
    folder = run_folder(tmp_path / "config.yaml")
    for kind in ("huggingface", "peft"):
        assert main(["export", str(folder), "--format", kind, "--out", kind]) == 0
    ids = torch.randint(5, 15, (3, 9), generator=torch.Generator().manual_seed(0))
    classes = transformers.AutoModelForSequenceClassification
    expected = classes.from_pretrained("flipped").eval()(ids).logits[:, [1, 0]]
    whole = classes.from_pretrained("huggingface").eval()
    assert whole.config.id2label == {0: "class 0", 1: "class 1"}
    adapter = peft.AutoPeftModelForSequenceClassification.from_pretrained("peft").eval()
    for there in (whole, adapter):
        torch.testing.assert_close(there(ids).logits, expected, atol=1e-5, rtol=1e-4)


def subject(model: torch.nn.Module, name="hf:none", signature=(), tokenizer=None) -> SimpleNamespace:
    facts = {"name": name}
    return SimpleNamespace(model=model, facts=facts, signature=dict(signature), tokenizer=tokenizer, metrics={})


def test_the_page_of_the_adapter_of_a_decoder_has_its_padding(make, tmp_path):
    """Without which transformers takes one text at a time."""
    from harness.inference.formats.peft import Format

    place = f"hf:{write_bare(tmp_path / 'gpt2', 'GPT2')}"
    config = make(model={"name": place, "lora": {}}, task={"tokenizer": {"name": place, "max_length": 20}})
    task, model = built(config)
    weights.load(model, config)
    facts = {"preprocessing": {"max_length": 20}, "classes": ["a", "b"]}
    Format().write(subject(model.eval(), place, facts, task.tokenizer.tokenizer), tmp_path / "out")
    inputs = task.train.batch(np.arange(4), None).inputs
    lines = re.findall("^    (.*)", (tmp_path / "out" / "README.md").read_text(), re.M)
    for line in lines:
        found = eval(line.replace("FOLDER", f"{tmp_path}/out")).eval()(inputs[..., 0], attention_mask=inputs[..., 1])
        torch.testing.assert_close(found.logits, model(inputs))
    assert len(lines) == 2


def test_a_model_without_matrices_is_no_adapter(make):
    from harness.inference.formats import peft

    with pytest.raises(ConfigError, match="(?s)the model has no matrices of LoRA\n  -> train with model.lora.r=8, or"):
        peft.Format().write(subject(built(make())[1]), Path("none"))
    with pytest.raises(
        ConfigError, match="(?s)the model is none of transformers\n  -> train with model.name=hf:FOLDER"
    ):
        peft.Format().write(subject(torch.nn.Linear(2, 2)), Path("none"))


def test_a_task_without_names_of_classes_is_exported(bert, tmp_path):
    from harness.inference.formats import huggingface
    from harness.training.model.libraries import hf

    inputs, model = torch.ones(2, 4, dtype=torch.long), hf.build(f"hf:{bert}", 3, num_tokens=5).eval()
    there = huggingface.Format().write(subject(model), tmp_path / "out")
    assert torch.equal(there(inputs), model(inputs))


def write_numbers(folder: Path) -> None:
    write_pairs(folder)
    for split in ("train", "eval"):
        lines = (folder / f"{split}.csv").read_text().splitlines()
        rows = [f"{line.rpartition(',')[0]},{1000 + 5 * place}" for place, line in enumerate(lines[1:])]
        (folder / f"{split}.csv").write_text("\n".join([lines[0], *rows]) + "\n")


@pytest.mark.parametrize("model", [{}, {"lora": {"targets": ["query", "classifier"]}}], ids=["whole", "lora"])
def test_numbers_are_exported_in_the_unit_of_their_column(make, tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    make(model=model, task={"labels": {"kind": "regression"}}, train={"epochs": 1})
    write_numbers(tmp_path)
    assert run(tmp_path / "config.yaml") == [0], (tmp_path / "terminal-0.txt").read_text()
    folder = run_folder(tmp_path / "config.yaml")
    assert main(["export", str(folder), "--format", "huggingface", "--out", "out"]) == 0
    assert "its numbers are in the unit of their column" in capsys.readouterr().err
    there = transformers.AutoModelForSequenceClassification.from_pretrained("out").eval()
    own = transformers.AutoTokenizer.from_pretrained("out")
    with open(folder / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    texts = [[row[column] for row in rows] for column in ("premise", "hypothesis")]
    found = there(**own(*texts, padding=True, return_tensors="pt")).logits[:, 0]
    torch.testing.assert_close(found.tolist(), [float(row["prediction"]) for row in rows], atol=0.05, rtol=0)
    described = json.loads((tmp_path / "out.json").read_text())
    assert (described["columns"], "postprocessing" in described) == (["label"], False)
    assert main(["export", str(folder), "--format", "torch_export", "--out", "out.pt2"]) == 0
    assert "standardized: multiply them by std and add mean, which are in out.pt2.json" in capsys.readouterr().err
    assert "mean" in json.loads((tmp_path / "out.pt2.json").read_text())["postprocessing"]
    monkeypatch.setattr("harness.inference.formats.huggingface.to_units", lambda *_: False)
    assert main(["export", str(folder), "--format", "huggingface", "--out", "as_is"]) == 0
    assert "by output_std and add output_mean, which are in as_is/config.json" in capsys.readouterr().err
    kept = json.loads((tmp_path / "as_is" / "config.json").read_text())
    assert (kept["output_mean"], kept["output_std"]) == tuple(
        json.loads((folder / "task.json").read_text())[key] for key in ("mean", "std")
    )


def test_only_a_linear_last_layer_with_a_bias_takes_the_unit():
    from harness.inference.formats import huggingface

    def net(*last: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 3), *last)

    mean, std, inputs = torch.tensor([5.0, -2000.0]), torch.tensor([0.1, 30.0]), torch.randn(4, 3)
    model = net(torch.nn.Linear(3, 2))
    before = model(inputs)
    assert huggingface.to_units(model, mean, std)
    torch.testing.assert_close(model(inputs), before * std + mean)
    for other in (
        net(torch.nn.Linear(3, 2, bias=False)),
        net(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)),
        net(torch.nn.Linear(3, 4)),
    ):
        before = other(inputs)
        assert not huggingface.to_units(other, mean, std)
        assert torch.equal(other(inputs), before)


def test_a_tokenizer_that_changed_is_refused(make, bert, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(train={"epochs": 1})
    assert run(tmp_path / "config.yaml") == [0]
    folder = run_folder(tmp_path / "config.yaml")
    write_tokenizer(renamed(bert, tmp_path / "other"), WORDS[::-1])
    changed = [f"task.tokenizer.name=hf:{tmp_path}/other", f"model.name=hf:{tmp_path}/other"]
    assert main(["predict", str(folder), "--csv", "eval.csv", "--out", "new.csv", *changed]) == 2
    assert "is no longer the tokenizer that the run was trained with" in capsys.readouterr().err


def test_prediction_from_another_folder(make, bert, tmp_path, capsys, monkeypatch):
    """A relative folder is also looked for where the run was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(bert, "small 🐻")
    make(
        train={"epochs": 1},
        task={"tokenizer": {"name": "hf:small 🐻", "max_length": 20}},
        model={"name": "hf:small 🐻"},
    )
    assert run(tmp_path / "config.yaml") == [0]
    folder = run_folder(tmp_path / "config.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    words = ["predict", str(folder), "--csv", "../eval.csv", "--out", "new.csv"]
    assert main(words) == 0
    assert Path("new.csv").read_text() == (folder / "predictions.csv").read_text()
    Path("numbers.csv").write_text(Path("../eval.csv").read_text().replace("class ", ""))
    assert main(["predict", str(folder), "--csv", "numbers.csv", "--out", "numbers.parquet"]) == 0
    told = "11 rows with labels that the model was not trained on, and never predicts: "
    assert re.search(told + r"'\d' \(numbers\.csv:2\), '\d' \(numbers\.csv:\d\);", capsys.readouterr().err)
    (tmp_path / "small 🐻").rename(tmp_path / "moved")
    both = ["task.tokenizer.name=hf:../moved", "model.name=hf:../moved"]
    assert main([*words, *both]) == 0
    monkeypatch.setattr("harness.data.hub._nearest", lambda _: "")
    assert main([*words, "task.tokenizer.name=hf:my_bert"]) == 2
    hint = f"not in {Path.cwd()}, type the whole path: task.tokenizer.name=hf:/PATH model.name=hf:/PATH; of the hub: HF"
    assert hint in capsys.readouterr().err


def test_another_folder_is_another_recipe_if_a_file_differs(bert, tmp_path):
    """Also the weights that the run started from, unless there are none."""
    was, now = f"hf:{bert}", f"hf:{tmp_path}/new"
    starts = [{}, {"weights": {"source": was, "sha256": files.sha256(bert / "model.safetensors")}}]
    assert not hub_copies.is_same_folder(tmp_path, starts, was, now)
    hub.keep(was, tmp_path / layout.of_hub(str(bert)), renew=False)
    shutil.copytree(bert, tmp_path / "new")
    assert hub_copies.is_same_folder(tmp_path, starts, was, now)
    hub.keep(now, tmp_path / layout.of_hub(f"{tmp_path}/new"), renew=False)
    (tmp_path / "new").rename(tmp_path / "newer")
    assert hub_copies.is_same_folder(tmp_path, starts, now, f"{now}er")
    (tmp_path / "newer" / "model.safetensors").write_bytes(b"others")
    assert not hub_copies.is_same_folder(tmp_path, starts, now, f"{now}er")
    (tmp_path / "newer").rename(tmp_path / "new")
    assert not hub_copies.is_same_folder(tmp_path, starts, was, now)
    assert hub_copies.is_same_folder(tmp_path, [], was, now)
    (tmp_path / "new" / "model.safetensors").unlink()
    assert hub_copies.is_same_folder(tmp_path, starts, was, now)
    (tmp_path / "new" / "tokenizer.json").write_text("{}")
    assert not hub_copies.is_same_folder(tmp_path, starts, was, now)


def test_files_of_the_model_and_its_tokenizer_are_kept(make, bert):
    """Another setting may begin with hf: too, such as an argument of an own model."""
    config = make().model_copy(update={"name": "hf:big/backbone"})
    assert "big/backbone" in hub_copies.places_of_hub(config).values()
    assert hub_copies.kept_places(config) == {str(bert)}


def test_copies_in_a_run_folder(bert, tmp_path, caplog, monkeypatch):
    """They are made again before the first checkpoint; one that fails is a warning; no name is too long."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(bert, tmp_path / "bert")
    place, copy = f"hf:{tmp_path}/bert", tmp_path / layout.of_hub("bert")
    hub.keep(place, copy, renew=False)
    (tmp_path / "bert" / "config.json").write_text("{}")
    hub.keep(place, copy, renew=False)
    assert (copy / "config.json").read_bytes() == (bert / "config.json").read_bytes()
    hub.keep(place, copy, renew=True)
    assert (copy / "config.json").read_text() == "{}"
    hub.keep("hf:no/where", tmp_path / "none", renew=False)
    assert "later commands need hf:no/where" in caplog.text
    assert len(layout.of_hub("/" + 80 * "long/" + "bert")) < 60
    assert layout.of_hub("a/b-c") != layout.of_hub("a-b/c")


def test_a_run_is_used_without_the_folder_of_its_model(make, bert, tmp_path, capsys, monkeypatch):
    """It has copies of the small files; only an adapter needs the weights, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(bert, "models/bert")
    tokenizer = {"name": "hf:models/bert", "max_length": 20}
    make(train={"epochs": 1}, task={"tokenizer": tokenizer}, model={"name": "hf:models/bert", "lora": {}})
    assert run(tmp_path / "config.yaml") == [0]
    folder = run_folder(tmp_path / "config.yaml")
    Path("models").rename("moved")
    copies = {file.name for file in (folder / layout.of_hub("models/bert")).iterdir()}
    assert copies == {file.name for file in bert.iterdir()} - {"model.safetensors"}
    assert main(["predict", str(folder), "--csv", "eval.csv", "--out", "new.csv"]) == 0
    assert Path("new.csv").read_text() == (folder / "predictions.csv").read_text()
    assert main(["export", str(folder), "--format", "huggingface", "--out", "out"]) == 0
    words = ["export", str(folder), "--format", "peft", "--out", "adapter"]
    assert main(words) == 2
    assert "-> type where the model is now: model.name=hf:FOLDER" in capsys.readouterr().err
    assert main([*words, "model.name=hf:moved/bert"]) == 0


def test_images(tmp_path, monkeypatch):
    """A vision transformer: its statistics are compared with the task's, and its folder has the preprocessing."""
    monkeypatch.chdir(tmp_path)
    for split, number in (("train", 12), ("eval", 6)):
        write_photos(tmp_path, split, number)
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=5, **{**SIZES, "num_hidden_layers": 1})
    transformers.ViTForImageClassification(config).save_pretrained("vit")
    Path("vit/preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    task = {"color": "rgb", "image_size": [16, 16]}
    tree = settings(tmp_path, name="run", task=task, model={"name": "hf:vit"}, precision={"opt_level": "O0"})
    path = write_yaml(tmp_path / "config.yaml", {**tree, "train": {"epochs": 1}})
    plan = preflight.examine(str(path), [], 1, 0.1)
    assert not plan.errors
    assert "5 outputs in the file, 3 here" in plan.facts["weights"]
    assert "set task.mean=[0.1, 0.1, 0.1] task.std=[0.2, 0.2, 0.2]" in plan.facts["warning"]
    remedies = {
        "task.color=gray": "-> set task.color=rgb, if the task has this setting, or model.args.num_channels=1",
        "task.image_size=[8,24]": "-> set task.image_size=[16,16]",
    }
    for wrong, message in remedies.items():
        assert message in str(preflight.examine(str(path), [wrong], 1, 0.1).errors[0])
    assert run(path, 1, f"model.name=hf:{tmp_path}/vit") == [0], (tmp_path / "terminal-0.txt").read_text()
    assert main(["export", "runs/run", "--format", "huggingface", "--out", "out"]) == 0
    assert len({file.stat().st_mode for file in Path("out").iterdir()}) == 1
    there = transformers.AutoModelForImageClassification.from_pretrained("out").eval()
    processor = transformers.AutoImageProcessor.from_pretrained("out")
    pixels = np.random.default_rng(0)
    for height, width in ((16, 16), (20, 24), (41, 18), (9, 14)):
        image = Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
        ours = load_model("runs/run").preprocess(image)
        theirs = processor(image, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert there(ours).logits.shape == (1, 3)


@pytest.mark.parametrize(("name", "kind"), [("ViT", "single_label"), ("ResNet", "regression")])
def test_a_bare_model_of_images_gets_a_new_last_layer(tmp_path, name, kind):
    for split, number in (("train", 12), ("eval", 6)):
        write_photos(tmp_path, split, number)
    sizes = {"image_size": 16, "patch_size": 8, **SIZES}
    if name == "ResNet":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / "bare")
    task = {"color": "rgb", "image_size": [16, 16], "labels": {"kind": kind}}
    tree = settings(tmp_path, task=task, model={"name": f"hf:{tmp_path}/bare"}, precision={"opt_level": "O0"})
    plan = preflight.examine(str(write_yaml(tmp_path / "config.yaml", tree)), [], 1, 0.1)
    assert not plan.errors
    assert "not in the file, so newly initialized: classifier" in plan.facts["weights"]


def test_only_a_model_of_transformers_is_exported_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split, number in (("train", 12), ("eval", 6)):
        write_photos(tmp_path, split, number)
    tree = settings(tmp_path, name="run", task={"image_size": [8, 8]}, train={"epochs": 1})
    assert run(write_yaml(tmp_path / "config.yaml", tree)) == [0]
    with pytest.raises(ConfigError, match="the model is none of transformers"):
        export.export(tmp_path / "runs" / "run", "huggingface", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
