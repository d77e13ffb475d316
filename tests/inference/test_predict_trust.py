"""Run folders of someone else: their configuration sets values, and names code only with ``--trust``."""

from __future__ import annotations

import shutil
import sys

import pandas as pd
import pytest
import torch
import yaml

from harness import cli
from harness.runs import ownership
from harness.runs.weights_file import save_weights
from harness.training.model.built_in.linear import Model as Linear
from tests.fixtures import settings, write_rows

MODULE = """
import pathlib
from harness.training.model.built_in.linear import Model
from harness.tasks.image_csv.config import Task as ImageCsv

pathlib.Path("imported").touch()

class Net(Model):
    pass

class Task(ImageCsv):
    name: str
"""

BUILD = {"name": "strange.Net", "args": {}, "known": {}, "example": 0}  # a function of ours that imports its argument


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with rows to predict, an importable module ``strange``, and the run of someone else, ``run``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SECRET", "a secret")
    (tmp_path / "strange.py").write_text(MODULE)
    write_rows(tmp_path, "new", 5)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "task.json").write_text('{"classes": [0, 1, 2], "image_size": [8, 8]}')
    model = Linear(3, 1)
    model(torch.zeros(2, 1, 8, 8))
    save_weights(model.state_dict(), tmp_path / "run" / "weights.safetensors", {}, tmp_path / "work")
    return tmp_path


def predict(folder, *words, **sections):
    tree = settings(folder, **{"data": {"cache_dir": str(folder / "theirs")}, **sections})
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    return cli.main(["predict", "run", "--csv", "new.csv", "--out", "out.csv", *words])


def test_values_of_a_stranger_are_used(folder):
    assert predict(folder) == 0
    assert len(pd.read_csv(folder / "out.csv")) == 5
    assert not (folder / "theirs").exists(), "files are not written where a stranger says"
    assert predict(folder, hooks=["strange.Net"], train={"on_gradients": "strange.f"}) == 0, (
        "only training imports them"
    )
    other = {"model": {"name": "resnet18", "args": {"num_classes": 3}}, "task": {"color": "rgb"}}
    assert predict(folder, **other) == 70, "allowed, but the weights are of another model"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"name": "strange.Net"}}, "model.name: imports strange.Net"),
        ({"task": {"name": "strange.Task"}}, "task.name: imports strange.Task"),
        ({"checkpoint": {"format": "strange.Net"}}, "checkpoint.format: imports strange.Net"),
        ({"optimizer": {"name": "strange.Net"}}, "optimizer.name: imports strange.Net"),
        ({"schedule": {"name": "strange.Net"}}, "schedule.name: imports strange.Net"),
        ({"parallel": {"strategy": "strange.Net"}}, "parallel.strategy: imports strange.Net"),
        ({"task": {"transforms": {"eval": [{"strange.Net": {"x": 1}}]}}}, "task.transforms.eval: imports strange.Net"),
        (
            {"task": {"transforms": {"train": [{"RandomApply": {"transforms": ["torch.hub.load"]}}]}}},
            "task.transforms.train: imports torch.hub.load",
        ),
        ({"task": {"loss": {"name": "strange.loss"}}}, "task.loss.name: imports strange.loss"),
        ({"task": {"metrics": ["top1", {"name": "strange.metric", "better": "max"}]}}, "task.metrics: imports strange"),
        ({"task": {"tokenizer": {"name": "strange.tokens"}}}, "task.tokenizer.name: imports strange.tokens"),
        ({"model": {"name": "torchvision.models.resnet18"}}, "model.name: imports torchvision.models.resnet18"),
        (
            {"model": {"name": "harness.training.model.model_builder.build", "args": BUILD}},
            "model.name: imports harness.",
        ),
        ({"task.name": "image_csv", "task": {"name": "strange.Task"}}, "task.name: imports strange.Task"),
        ({"task": {"transforms": {"eval": [{"Compose": {"x": {"y": "strange.Net"}}}]}}}, "imports strange.Net"),
        ({"model": {"name": "linear", "args": {"pretrained": True}}}, "model.args.pretrained: reads weights"),
        ({"model": {"name": "linear", "args": {"checkpoint_path": "w"}}}, "model.args.checkpoint_path: reads weights"),
        ({"model": {"name": "linear", "args": {"x": {"file": "../w.pt"}}}}, "model.args.x.file: '../w.pt' is not"),
        ({"task": {"root": "http://127.0.0.1:9/images"}}, "task.root: reads http://127.0.0.1:9/images"),
        ({"model": {"name": "subprocess.Popen", "args": {"args": ["touch", "imported"]}}}, "subprocess.Popen"),
        ({"name": "${oc.env:SECRET}"}, "name: ${oc.env:SECRET} reads a value from outside this file"),
        ({"task": {"train_csv": ["${oc.env:SECRET}"]}}, "task.train_csv: "),
        ({"extends": "/etc/passwd"}, "extends: reads /etc/passwd"),
    ],
)
def test_more_than_values_needs_trust(folder, capfd, sections, problem):
    assert predict(folder, **sections) == 2
    shown = capfd.readouterr().err
    assert problem in shown
    assert "if you trust its author, add --trust" in shown
    assert "a secret" not in shown
    assert sorted(path.name for path in folder.iterdir() if path.name in ("imported", "out.csv")) == []


def test_tags_of_yaml_make_no_objects(folder, capfd):
    (folder / "run" / "config.yaml").write_text("name: !!python/object/apply:os.system ['touch imported']\n")
    for words in ([], ["--trust"]):
        assert cli.main(["predict", "run", "--csv", "new.csv", "--out", "out.csv", *words]) == 2
        assert "invalid YAML: could not determine a constructor" in capfd.readouterr().err
    assert not (folder / "imported").exists()


def test_with_trust_or_as_an_own_run_code_is_imported(folder, capfd):
    own = {"model": {"name": "strange.Net"}}
    assert predict(folder, "--trust", **own) == 0
    (folder / "imported").unlink()
    ownership.remember((folder / "run" / "config.yaml").read_text())
    assert predict(folder, **own) == 0
    shutil.copytree(folder / "run", folder / "moved")
    words = ["--format", "safetensors", "task.train_csv=new.csv", "task.eval_csv=new.csv"]
    assert cli.main(["export", "moved", *words]) == 0
    config = folder / "moved" / "config.yaml"
    config.write_text(config.read_text() + "seed: 3\n")
    assert cli.main(["export", "moved", *words]) == 2, "someone has changed it"
    assert cli.main(["export", "moved", *words, "--trust"]) == 0
    # What is not a model is not called, whoever names it.
    assert predict(folder, "--trust", model={"name": "os.mkdir", "args": {"path": "made"}}) == 2
    assert "os.mkdir is not a torch.nn.Module" in capfd.readouterr().err
    assert not (folder / "made").exists()


def test_names_on_the_command_line_are_the_users_own(folder):
    assert predict(folder, "batch.global=2", model={"name": "strange.Net"}) == 2, "another setting is no reason"
    assert predict(folder, "model.name=strange.Net", model={"name": "evil.Net"}) == 0
    assert predict(folder, f"task.root={folder}", task={"root": "http://127.0.0.1:9/images"}) == 0
