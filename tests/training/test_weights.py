"""``model.weights``: what is loaded, what is refused, and how a run starts from it."""

from __future__ import annotations

import functools
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from harness.cli import main
from harness.config import loader
from harness.errors import ConfigError
from harness.runs import fetch
from harness.runs.files import sha256
from harness.training.model import model_builder, weights
from harness.training.model.libraries import base
from tests.end_to_end.experiment import run, run_folder, train, write_config, write_images


def model(num_classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))


@pytest.fixture
def config(tmp_path):
    """Load a configuration with these keys in its section ``model``."""
    path = write_config(tmp_path, write_images(tmp_path / "data"))

    def make(**section: object):
        return loader.load(path, [f"model.{key}={value}" for key, value in section.items()])

    return make


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_both_kinds_of_files_are_read(tmp_path, name):
    (save_file if name.endswith("safetensors") else torch.save)({"x": torch.ones(2)}, tmp_path / name)
    assert weights.read(weights.WeightsFile(name, tmp_path / name))["x"].tolist() == [1.0, 1.0]


def wrapped(state: dict, *prefixes: str) -> dict:
    for prefix in prefixes:
        state = {f"{prefix}.{name}": value for name, value in state.items()}
    return state


@pytest.mark.parametrize(
    "kept",
    [
        lambda state: state,
        lambda state: wrapped(state, "module"),
        lambda state: {"state_dict": wrapped(state, "_orig_mod", "module"), "epoch": 3},
        lambda state: {"model": {name: value * 0 for name, value in state.items()}, "model_ema": state},
        lambda state: {
            "ema": {"num_updates": 3, "average": list(state.values())},
            "model": state,
            "ema_state_dict": {},
        },
        lambda state: {"n_averaged": torch.tensor(5), **wrapped(state, "module")},
    ],
    ids=["plain", "ddp", "nested", "moving average", "checkpoint", "averaged model"],
)
def test_a_file_as_training_scripts_write_it(tmp_path, config, kept):
    there, here = model(), model()
    torch.save(kept(there.state_dict()), tmp_path / "given.pth")
    facts = weights.load(here, config(weights=tmp_path / "given.pth"))
    assert all(torch.equal(value, here.state_dict()[name]) for name, value in there.state_dict().items())
    assert facts["summary"].endswith("9 of 9 tensors")
    assert len(facts["sha256"]) == 64


def test_last_layer_with_other_outputs_starts_fresh(tmp_path, config):
    there, here = model(10), model(3)
    torch.save(there.state_dict(), tmp_path / "given.pth")
    before = here[3].weight.clone()
    facts = weights.load(here, config(weights=tmp_path / "given.pth"))
    assert torch.equal(here[0].weight, there[0].weight)
    assert torch.equal(here[3].weight, before)
    assert (
        "the last layer (3.weight, 3.bias) is not loaded but newly initialized: 10 outputs in the file, "
        "3 here" in facts["summary"]
    )


class Words(nn.Module):
    """A model with tables whose first dimension is no number of outputs."""

    def __init__(self, words: int, places: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 4)
        self.places = nn.Parameter(torch.zeros(places, 4))
        self.aux, self.head = nn.Linear(4, outputs), nn.Linear(4, outputs)


@pytest.mark.parametrize(("words", "places", "name"), [(120, 9, "embedding.weight"), (100, 7, "places")])
def test_a_table_of_another_size_is_no_last_layer(tmp_path, config, words, places, name):
    torch.save(Words(100, 9, 5).state_dict(), tmp_path / "given.pth")
    with pytest.raises(ConfigError, match=rf"5 of this model's 6 weights are in the file .*\n  {name}: "):
        weights.load(Words(words, places, 5), config(weights=tmp_path / "given.pth"))
    facts = weights.load(Words(100, 9, 3), config(weights=tmp_path / "given.pth"))
    assert "last layer (aux.weight, aux.bias, head.weight, head.bias) is not loaded" in facts["summary"]


def test_what_is_missing_or_unexpected(tmp_path, config):
    state = model().state_dict()
    state["3.weights"] = state.pop("3.weight")
    torch.save(state, tmp_path / "given.pth")
    with pytest.raises(ConfigError, match=r"missing: 3\.weight \(the file has 3\.weights\)"):
        weights.load(model(), config(weights=tmp_path / "given.pth"))
    facts = weights.load(model(), config(weights=tmp_path / "given.pth", strict="false"))
    assert "not in the file, so newly initialized: 3.weight; in the file only: 3.weights" in facts["summary"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda state: {**state, "0.weight": torch.zeros(4, 3, 3, 3)},
            r"0\.weight: \(4, 3, 3, 3\) in the file, \(4, 1,",
        ),
        (lambda state: {**state, "0.bias": torch.full((4,), float("nan"))}, r"infinite or NaN in 0\.bias"),
        (
            lambda state: {"head.w": torch.zeros(1), "tail.w": torch.zeros(1)},
            "none of this model's weights: it has head.w",
        ),
        (
            lambda state: {"0.bias": state["0.bias"], "head.w": torch.zeros(1)},
            r"1 of this model's 9 weights are in the file with the same name and shape\n  missing: 0\.weight\n(.*\n)*"
            "  -> it seems to be of another model: set model.name and model.args to those that it was trained with",
        ),
        (lambda state: {"epoch": 3}, "no tensors; its keys are epoch"),
        (lambda state: [1, 2], "it holds an object of type list, not a dictionary of weights"),
        (lambda state: {"model": Path("x")}, "it is damaged, or it holds more than tensors and plain data"),
    ],
    ids=["other shape", "nan", "no model", "other model", "no tensors", "list", "code"],
)
def test_a_file_that_does_not_fit(tmp_path, config, content, message):
    torch.save(content(model().state_dict()), tmp_path / "given.pth")
    with pytest.raises(ConfigError, match=message):
        weights.load(model(), config(weights=tmp_path / "given.pth"))


def test_places_that_do_not_exist(tmp_path, config, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    (tmp_path / "damaged.pth").write_bytes(b"x")
    for place, name, message in [
        (tmp_path / "none.pth", "mlp", "no such file"),
        (tmp_path / "damagd.pth", "mlp", "did you mean .*damaged.pth"),
        (tmp_path / "damaged.pth", "mlp", "it is damaged, or it holds more"),
        ("DEFAULT", "mlp", "model mlp has no published weights"),
        ("IMAGENET1K_V3", "resnet50", "use one of IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("http://127.0.0.1:9/a.pth", "mlp", "ConnectionRefusedError: Connection refused\n.*set model.weights=FILE"),
    ]:
        with pytest.raises(ConfigError, match=message):
            weights.load(model(), config(weights=place, name=name))


def test_a_file_behind_an_address_is_downloaded_once(tmp_path, config, monkeypatch):
    """From a server of this machine, in more than one block."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    there, here = model(), model()
    torch.save({**there.state_dict(), "unused": torch.zeros(1 << 19)}, tmp_path / "given.pth")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/given.pth"
        weights.load(here, config(weights=address, name="mlp", strict="false"))
        server.shutdown()
    assert all(torch.equal(*pair) for pair in zip(here.state_dict().values(), there.state_dict().values(), strict=True))
    (kept,) = (tmp_path / "cache").rglob("*given.pth")
    assert kept.read_bytes() == (tmp_path / "given.pth").read_bytes()
    weights.load(model(), config(weights=address, name="mlp", strict="false"))  # the server is gone


def test_published_weights_are_verified_and_kept(tmp_path, config, monkeypatch):
    """A download that stands for torchvision's server."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    torch.save(model_builder.build("resnet18", {}, {"num_classes": 1000}, torch.zeros(1, 3, 32, 32)).state_dict(),
               tmp_path / "published.pth")  # fmt: skip
    asked = []

    def transfer(url: str, path: Path, accept: object) -> None:
        asked.append(url)
        path.write_bytes((tmp_path / "published.pth").read_bytes())

    monkeypatch.setattr(fetch, "_transfer", transfer)
    here = model_builder.build("resnet18", {}, {"num_classes": 7}, torch.zeros(1, 3, 32, 32))
    with pytest.raises(ConfigError, match="its content is not the published one"):
        weights.load(here, config(weights="DEFAULT", name="resnet18"))
    monkeypatch.setattr(base, "sha256", lambda path: "f37072fd")
    for _ in range(2):
        facts = weights.load(here, config(weights="DEFAULT", name="resnet18"))
    assert asked == ["https://download.pytorch.org/models/resnet18-f37072fd.pth"] * 2  # the refused one, and one
    assert facts["summary"].startswith("resnet18 IMAGENET1K_V1 (resnet18-f37072fd.pth), 120 of 122 tensors; the last")
    assert facts["warning"].endswith("set task.mean=[0.485, 0.456, 0.406] task.std=[0.229, 0.224, 0.225]")


def test_weights_of_a_run_with_other_statistics(tmp_path, config):
    """A warning says what to set. ``null`` stands for 0.5; a run of a task without statistics expects none."""
    folder, here = tmp_path / "given", model()
    folder.mkdir()
    save_file(here.state_dict(), folder / "weights.safetensors")

    def warning(written: str, source: Path = folder) -> str:
        (folder / "config.yaml").write_text(written)
        return weights.load(here, config(weights=source))["warning"]

    other = "task: {name: image_csv, mean: [0.4], std: null}"
    expected = "these weights expect images normalized with different statistics: set task.mean=[0.4] task.std=[0.5]"
    assert warning(other) == warning(other, folder / "weights.safetensors") == expected
    for same in ("mean: null, std: [0.5]", "channels: 1", "mean: 3, std: 4"):
        assert warning(f"task: {{name: image_csv, {same}}}") == ""
    assert warning("[") == ""


@pytest.mark.slow
def test_a_model_of_timm(tmp_path, config):
    pytest.importorskip("timm", reason="timm is not installed: pip install 'apex-harness[timm]'")
    known, example = {"num_classes": 5, "in_channels": 1}, torch.zeros(2, 1, 32, 32)
    there = model_builder.build("timm:resnet10t", {}, known, example)
    torch.save({"state_dict": there.state_dict()}, tmp_path / "given.pth")
    here = model_builder.build("timm:resnet10t", {}, {**known, "num_classes": 3}, example)
    facts = weights.load(here, config(weights=tmp_path / "given.pth", name="timm:resnet10t"))
    assert (
        "the last layer (fc.weight, fc.bias) is not loaded but newly initialized: 5 outputs in the file, "
        "3 here" in facts["summary"]
    )
    with pytest.raises(ConfigError, match="did you mean timm:resnet10t"):
        model_builder.build("timm:resnet10", {}, known, example)


def test_weights_of_timm_come_from_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="timm is not installed: pip install 'apex-harness[timm]'")
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match="has no model.safetensors\n  -> set model.weights=FILE"):
        weights.find("pretrained", "timm:resnet18")
    asked.clear()
    (tmp_path / "model.safetensors").touch()
    found = weights.find("pretrained", "timm:resnet18")
    assert asked == [("timm/resnet18.a1_in1k", None, ["model.safetensors"])]
    assert found[:2] == ("timm:resnet18 timm/resnet18.a1_in1k", tmp_path / "model.safetensors")
    assert found.statistics == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with pytest.raises(ConfigError, match="no such file: nope"):  # before anything is downloaded
        weights.located("nope", "timm:resnet18")


def test_a_tag_that_timm_does_not_know(monkeypatch):
    pytest.importorskip("timm", reason="timm is not installed: pip install 'apex-harness[timm]'")
    for tag, hint in (("a1_in1", "did you mean timm:resnet18.a1_in1k?"), ("nope", "use timm:resnet18, or one of resn")):
        with pytest.raises(ConfigError, match=f"no weights '{tag}' of resnet18") as caught:
            model_builder.build(f"timm:resnet18.{tag}", {}, {"num_classes": 5}, torch.zeros(2, 3, 32, 32))
        assert caught.value.where == "model.name"
        assert hint in caught.value.hint
    monkeypatch.setattr("timm.list_pretrained", lambda pattern: [])  # of a model without published weights
    with pytest.raises(ConfigError, match="-> use timm:resnet18$"):
        model_builder.build("timm:resnet18.nope", {}, {"num_classes": 5}, torch.zeros(2, 3, 32, 32))


def test_missing_timm_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'apex-harness\[timm\]'"):
        model_builder.build("timm:resnet10t", {}, {}, torch.zeros(1))
    with pytest.raises(ConfigError, match=r"pip install 'apex-harness\[timm\]'"):
        weights.located("pretrained", "timm:resnet10t")


def test_the_prefix_of_torchvision_may_be_written():
    make, library = model_builder.find("torchvision:resnet18")
    assert (make, library) == model_builder.find("resnet18")
    assert weights.located("pretrained", "torchvision:resnet18")
    with pytest.raises(ConfigError, match="unknown model 'resnet19'\n  -> did you mean"):
        model_builder.find("torchvision:resnet19")


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "level"), [(1, "O2"), (2, "O0")])
def test_a_run_starts_from_another_runs_weights(tmp_path, capsys, world_size, level):
    """On rank 0, and on all ranks from there; not when it resumes, when they need not exist any more."""
    data = write_images(tmp_path / "data")
    sections = {"model": {"name": "mlp", "args": {"hidden": 8}}, "precision": {"opt_level": level}}
    given = tmp_path / "given"
    train(tmp_path / "first", data, world_size, **sections, train={"epochs": 2}).rename(given)
    best = load_file(given / "weights.safetensors")
    frozen, *_, trained = best
    tuned = {**sections, "model": {**sections["model"], "weights": str(given), "freeze": [frozen]}}
    config = write_config(
        tmp_path / "second", data, **tuned, train={"epochs": 1, "ema_decay": 0.9}, optimizer={"lr": 1e-3}
    )
    assert main(["check", "-c", str(config)]) == 0
    assert f"{given}, 4 of 4 tensors" in capsys.readouterr().out
    assert run(config, world_size) == [0] * world_size
    logs = run_folder(config) / "logs"
    assert [(logs / f"rank-{rank}.log").read_text().count("4 of 4 tensors") for rank in range(world_size)] == [
        int(rank == 0) for rank in range(world_size)
    ]
    after = load_file(run_folder(config) / "weights.safetensors")
    for name, weight in best.items():
        torch.testing.assert_close(after[name].float(), weight.float(), rtol=0, atol=0.02)
    assert torch.equal(after[frozen], best[frozen])
    assert not torch.equal(after[trained], best[trained])
    (start,) = json.loads((run_folder(config) / "provenance.json").read_text())
    assert start["weights"]["sha256"] == sha256(given / "weights.safetensors")
    given.rename(tmp_path / "gone")
    assert run(config, world_size, "train.epochs=2") == [0] * world_size
    assert "resumed from" in (logs / "rank-0.log").read_text()
