"""Models by name: built in, torchvision's and the user's own; and what is wrong with a name or its arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.config import plugins
from harness.data.seeds import Purpose
from harness.distributed.machine import Memory
from harness.errors import ConfigError, HarnessError, OwnCodeError
from harness.training.model.model_builder import build
from harness.training.reproducibility import rng

KNOWN = {"num_classes": 4, "in_channels": 1}
GRAY, RGB = torch.zeros(2, 1, 8, 8), torch.zeros(2, 3, 32, 32)


class Own(nn.Module):
    """Takes the number of classes, but not of channels."""

    def __init__(self, num_classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, num_classes), scale

    def forward(self, images):
        return self.layer(images.flatten(1)) * self.scale


class Dictionary(Own):
    def forward(self, images):
        return {"logits": super().forward(images)}


class Picky(Own):
    """Asserts the size of its input, like torchvision's transformers."""

    def __init__(self, num_classes: int, silent: bool = False) -> None:
        super().__init__(num_classes)
        self.silent = silent

    def forward(self, images):
        if self.silent:
            raise AssertionError
        torch._assert(images.shape[-1] == 224, "wrong image height")


def not_a_module(num_classes: int) -> dict:
    raise AssertionError("only what is annotated to return a module is called")


def unannotated(num_classes):
    raise AssertionError("only what is annotated to return a module is called")


def made(num_classes: int) -> Own:
    return Own(num_classes, 3.0)


IMAGES = SimpleNamespace(image_size=None, transforms=None, color=None)
CHARACTER_MODELS = ("char_lstm", "char_gru")


@pytest.mark.parametrize("name", [name for name in plugins.names("model") if not name.startswith(("char_", "text_"))])
def test_image_model(name):
    model = build(name, {}, KNOWN, GRAY)
    assert model.training
    assert model(torch.rand(5, 1, 8, 8)).shape == (5, 4)
    assert not any(isinstance(param, nn.UninitializedParameter) for param in model.parameters())
    assert all(param.dtype is torch.float32 for param in model.parameters())
    assert model(torch.rand(1, 1, 8, 8)).shape == (1, 4)


@pytest.mark.parametrize("name", CHARACTER_MODELS)
def test_character_model_is_causal(name):
    """The logits at a position depend on the characters up to it, and on none after it."""
    model = build(name, {"hidden": 8, "num_layers": 2}, {"num_characters": 5}, torch.zeros(2, 3, dtype=torch.int64))
    assert model.training
    codes = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 4]])
    logits = model.eval()(codes)
    assert logits.shape == (2, 4, 5)
    assert torch.allclose(logits[0, :2], logits[1, :2])
    assert not torch.allclose(logits[0, 2], logits[1, 2])


def test_tutorial_models_have_the_sizes_of_the_tutorials():
    image, codes = torch.zeros(2, 1, 28, 28), torch.zeros(2, 8, dtype=torch.int64)

    def shapes(name, example):
        known = {"num_characters": 31} if example is codes else {"num_classes": 10, "in_channels": 1}
        return [tuple(p.shape) for p in build(name, {}, known, example).parameters() if p.dim() > 1]

    assert shapes("mnist_net", image) == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 9216), (10, 128)]
    assert shapes("fashion_cnn", image) == [(32, 1, 3, 3), (64, 32, 3, 3), (600, 2304), (120, 600), (10, 120)]
    assert shapes("char_lstm", codes) == [(512, 31), *[(512, 128)] * 7, (31, 128)]


def test_a_wrong_argument_is_placed_at_its_own_key():
    with pytest.raises(ConfigError) as caught:
        build("mlp", {"hidden": 8, "widht": 8}, {"num_classes": 2}, torch.zeros(2, 4), 2)
    assert caught.value.where == "model.args.widht"


def test_published_weights_are_no_argument():
    with pytest.raises(ConfigError, match="(?s)model.args.pretrained: .* -> remove it, and set model.weights=DEFAULT"):
        build("resnet18", {"pretrained": True}, KNOWN, RGB)


def test_arguments():
    model = build("small_cnn", {"width": 8, "batch_norm": True, "dropout": 0.5}, {**KNOWN, "in_channels": 3}, RGB)
    assert model.features[0].in_channels == 3
    assert model.features[0].out_channels == 8
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 3
    assert model.dropout.p == 0.5


def test_torchvision_model_gets_the_number_of_classes():
    model = build("resnet18", {"zero_init_residual": True}, KNOWN, RGB)
    assert model(RGB).shape == (2, 4)


def test_own_model():
    model = build("tests.training.test_model_builder.Own", {"scale": 2.0}, KNOWN, GRAY)
    assert isinstance(model, Own)
    assert model.scale == 2.0
    assert model.layer.out_features == 4


class OfLogits(Own):
    def forward(self, images):
        return {"logits": super().forward(images)}


def test_a_model_that_returns_a_dictionary_is_told_to_return_a_tensor():
    with pytest.raises(ConfigError, match="returns an object of type dict .*\n  -> let forward\\(\\) return a tensor"):
        build("tests.training.test_model_builder.OfLogits", {}, KNOWN, GRAY, 4)


def test_function_that_is_annotated_to_return_a_model():
    assert build("tests.training.test_model_builder.made", {}, KNOWN, GRAY).scale == 3.0
    assert build("torchvision.models.resnet18", {"num_classes": 4}, KNOWN, RGB)(RGB).shape == (2, 4)


def test_first_weights_depend_on_the_seed_alone():
    def weights(seed):
        rng.seed_all(Purpose.INITIAL_WEIGHTS, seed)
        return [param.clone() for param in build("mlp", {}, KNOWN, GRAY).parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not torch.equal(weights(1)[0], weights(2)[0])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("bert-base-x", {}, "a model of Hugging Face is model.name=hf:bert-base-x; or use one of"),
        ("small_cnm", {}, "model.name: unknown model 'small_cnm'\n  -> did you mean small_cnn?"),
        ("zzzzzzzz", {}, "use one of char_gru, char_lstm, fashion_cnn, linear"),
        ("tests.training.test_model_builder.Nope", {}, "cannot be imported"),
        ("tests.training.test_model_bilder.Own", {}, "-> did you mean tests.training.test_model_builder.Own?"),
        ("tests.trainin.test_model_builder.Own", {}, "-> did you mean tests.training.test_model_builder.Own?"),
        ("test.training.test_model_builder.Own", {}, "cannot be imported"),
        ("tests.training.test_model_builder.not_a_module", {}, "not_a_module is not a torch.nn.Module"),
        ("tests.training.test_model_builder.unannotated", {}, "annotated to return one: def make(...) -> torch.nn.Mod"),
        ("subprocess.Popen", {"args": ["touch", "executed"]}, "subprocess.Popen is not a torch.nn.Module"),
        ("small_cnn", {"widht": 8}, "-> it takes: num_classes, in_channels, width, dropout, batch_norm"),
        ("small_cnn", {"in_channels": 3}, "cannot process a batch of shape (2, 1, 8, 8)"),
        ("mobilenet_v3_small", {}, "-> set task.color=rgb, which torchvision models need; or"),
        (f"{__name__}.Picky", {}, "cannot process a batch of shape (2, 1, 8, 8): wrong image height"),
        (f"{__name__}.Picky", {"silent": True}, "of shape (2, 1, 8, 8): AssertionError\n  -> write forward() for this"),
        ("torch.nn.Flatten", {}, "returns (2, 64) for 2 rows, not 4 outputs for each"),
        ("tests.training.test_model_builder.Dictionary", {}, "returns an object of type dict for 2 rows"),
    ],
)
def test_model_that_cannot_be_built(name, args, message):
    with pytest.raises(HarnessError) as caught:
        build(name, args, KNOWN, GRAY, outputs=4, task=IMAGES)
    assert message in str(caught.value)
    assert type(caught.value) is (OwnCodeError if "Picky" in name else ConfigError)


@pytest.mark.parametrize(
    ("example", "hint"),
    [
        (torch.zeros(2, 7), "check model.args, and the shape of the inputs that the task gives the model"),
        (torch.zeros(2, 5, dtype=torch.float64), "return float32 from batch() of the dataset, or from prepare() of"),
    ],
)
def test_hint_for_a_task_without_settings_for_images(example, hint):
    with pytest.raises(ConfigError) as caught:
        build("torch.nn.Linear", {"in_features": 5, "out_features": 1}, {}, example)
    assert caught.value.hint.startswith(hint)


class Segmentation(nn.Conv2d):
    def __init__(self, num_classes: int) -> None:
        super().__init__(1, num_classes, 3, padding=1)


@pytest.mark.parametrize(("name", "outputs"), [("Segmentation", None), ("Dictionary", None), ("Own", 4)])
def test_shape_of_the_outputs_is_only_for_the_task_to_declare(name, outputs):
    """That a model takes num_classes says nothing about what it returns."""
    model = build(f"{__name__}.{name}", {}, KNOWN, GRAY, outputs)
    assert next(model.parameters()).shape[0] == 4


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("small_cnn", {"width": -4}, "cannot build model small_cnn with width=-4: Trying to create tensor with"),
        ("small_cnn", {"width": 10**7}, " memory "),
        ("small_cnn", {"width": 10**30}, "cannot build model small_cnn with width=1000"),
        ("mlp", {"hidden": 2**36}, "1,024.0 GiB"),
        ("mobilenet_v2", {"round_nearest": 0}, "cannot build model mobilenet_v2 with round_nearest=0: "),
        ("resnet18", {"weights": "nope"}, "cannot build model resnet18 with weights='nope': there is no 'nope'"),
    ],
)
def test_arguments_that_no_machine_can_build(name, args, message):
    """No traceback, and no process that the system kills while it fills the memory."""
    with pytest.raises(ConfigError) as caught:
        build(name, args, KNOWN, RGB if name in ("resnet18", "mobilenet_v2") else GRAY)
    assert message in caught.value.message
    assert caught.value.where in ("model.args", "model.name")
    assert "alloc_cpu" not in str(caught.value)


def test_weights_larger_than_the_memory_are_refused_before_they_are_filled(monkeypatch):
    monkeypatch.setattr("harness.distributed.machine.memory", lambda: Memory(8192, 8192))
    with pytest.raises(ConfigError, match="the weights of small_cnn take .* GiB, but only .* is free"):
        build("small_cnn", {}, KNOWN, GRAY)


def test_weights_are_compared_with_the_memory_that_was_free_before(monkeypatch):
    """The layers built so far have filled some of it."""
    free = iter([2**30])
    monkeypatch.setattr("harness.distributed.machine.memory", lambda: Memory(2**30, next(free, 0)))
    build("small_cnn", {}, KNOWN, GRAY)
