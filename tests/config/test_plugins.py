"""Built-in parts are the files of their folders."""

from __future__ import annotations

import colorsys

import pytest

from harness.config import plugins
from harness.errors import ConfigError, OwnCodeError

BUILT_IN = {
    "task": ["fashion_mnist", "image_csv", "mnist", "pet_names", "text_csv"],
    "model": ["char_gru", "char_lstm", "fashion_cnn", "linear", "mlp", "mnist_net", "small_cnn", "text_cnn"],
    "model library": ["hf", "timm", "torchvision"],
    "strategy": ["ddp", "dp", "fsdp", "none"],
    "tracker": ["mlflow", "tensorboard", "trackio", "wandb"],
    "format": ["sharded", "whole"],
    "export format": ["huggingface", "onnx", "peft", "safetensors", "torch_export"],
    "engine": ["dask", "flyte", "local", "slurm", "torchrun"],
    "engine settings": ["dask", "flyte", "local", "slurm", "torchrun"],
}


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_built_in_parts_are_found(kind):
    assert plugins.names(kind) == BUILT_IN[kind]
    for name in plugins.names(kind):
        if name not in ("dask", "flyte", "mlflow", "tensorboard", "trackio", "wandb"):  # which import optional packages
            part = plugins.find(kind, name, "here")
            held = ("Task", "Model", "Format", "Strategy", "Settings", "engine", name)
            assert getattr(part, "__name__", "").rpartition(".")[2] in held


@pytest.mark.parametrize(("kind", "name"), [("task", "fashion_mnist"), ("model", "linear")])
def test_leftover_folder_of_an_earlier_version_is_ignored(tmp_path, monkeypatch, kind, name):
    parts = tmp_path / plugins.KINDS[kind].folder
    (parts / name / "__pycache__").mkdir(parents=True)
    (parts / f"{name}.py").touch()
    monkeypatch.setattr(plugins, "_HARNESS", tmp_path)
    assert plugins.names(kind) == [name]
    plugins.find(kind, name, "here")


def test_unknown_part_names_the_nearest_or_all():
    with pytest.raises(ConfigError, match="here: unknown engine 'Slurmm'\n  -> did you mean slurm"):
        plugins.find("engine", "Slurmm", "here")
    with pytest.raises(ConfigError, match="use one of mlflow, tensorboard, trackio, wandb, or your own package.module"):
        plugins.find("tracker", "zzz", "here")
    names = ["linear", "mlp"]
    assert plugins.unknown("model", "liner", names, "here", "or install it").hint == "did you mean linear?"
    for name, near in (("adamv", "adam or adamw"), ("fused_adm", "fused_adam"), ("Adamx", "adamax or adam")):
        known = ["adam", "adamax", "adamw", "nadam", "radam", "sgd", "fused_adam", "fused_sgd", "fused_lamb"]
        assert plugins.unknown("optimizer", name, known, "here").hint == f"did you mean {near}?"
    assert plugins.unknown("model", "zzz", names, "here", "or install it").hint == "or install it"


def test_own_module_without_a_dot_or_as_a_file_is_named_as_it_must_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waves.py").touch()
    for name in ("colorsys", "sys"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "mnists").mkdir()
    (tmp_path / "mnists" / "digits.py").touch()
    for kind, name, hint in (
        ("task", "waves", "for your own waves.py, write waves.Task, with the name of the class in it"),
        ("task", "mnists", "for your own task in the folder mnists, write mnists.digits"),
        ("task", "sea/waves.py", "write sea.waves, without .py and with dots between folders"),
        ("model", "nets.py", "write nets.Model, without .py and with dots between folders"),
        ("engine", "waves", "use one of dask, "),
        ("task", "colorsys.Task", f"the module colorsys that Python imports is {colorsys.__file__}, not your"),
        ("task", "sys.tasks.Task", "the module sys that Python imports is built in, not your sys.py: rename yours"),
    ):
        with pytest.raises(ConfigError) as caught:
            plugins.find(kind, name, "here")
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("name", ["tests.config.test_plugins", "tests.config.test_plugins.Task"])
def test_own_part_is_a_module_or_a_class_in_it(name):
    assert plugins.find("task", name, "here") is Task
    assert plugins.import_own("verb", "tests.config.test_plugins", "here").Task is Task


@pytest.mark.parametrize("raised", ["SystemExit(0)", "GeneratorExit()", "Odd()"])
def test_module_that_ends_the_program_is_an_error(tmp_path, monkeypatch, raised):
    odd = "class Odd(BaseException):\n    def __str__(self): raise ValueError\n"
    (tmp_path / "ends.py").write_text(f"{odd}raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OwnCodeError, match=r"ends\.py:3: the model 'ends.Model' cannot be imported"):
        plugins.import_own("model", "ends.Model", "here")


class Task:
    """Found by its dotted name."""
