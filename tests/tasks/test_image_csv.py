"""Image classification from a CSV: classes, batches, augmentation, model, loss and report."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.config.schema import ModelSection
from harness.errors import ConfigError, DataError
from harness.tasks.image_csv.config import Augment, Task
from harness.tasks.image_csv.task import _pipeline, _Shift
from harness.training.metrics import Sums
from tests.fixtures import make_config, write_rows


def opened(folder, **options):
    task = make_config(folder, task=options).task
    return task.open(0, folder / "cache")


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path, "train", 9)
    write_rows(tmp_path, "eval", 5)
    return tmp_path


# Opening


def test_classes_are_the_training_labels(folder):
    task = opened(folder)
    assert task.classes == (0, 1, 2)
    assert task.summary == {"train rows": 9, "eval rows": 5, "classes": 3}
    assert task.eval.batch(np.arange(5), None).targets.tolist() == [0, 1, 2, 0, 1]


def test_classes_of_evaluation_are_those_of_training(folder):
    """A label has one class index, though the two files may hold different labels."""
    (folder / "train.csv").write_text(
        "path,label\n" + "".join(f"train_images/{i}.png,{x}\n" for i, x in enumerate("cab"))
    )
    (folder / "eval.csv").write_text("path,label\neval_images/0.png,c\neval_images/1.png,b\n")
    task = opened(folder)
    assert task.classes == ("a", "b", "c")
    assert task.train.batch(np.arange(3), None).targets.tolist() == [2, 0, 1]
    assert task.eval.batch(np.arange(2), None).targets.tolist() == [2, 1]


def test_label_that_was_not_trained_is_named(folder):
    (folder / "train.csv").write_text("path,label\ntrain_images/0.png,cat\ntrain_images/1.png,dog\n")
    (folder / "eval.csv").write_text(
        "path,label\neval_images/0.png,dog\neval_images/1.png,cta\neval_images/2.png,cta\n"
    )
    with pytest.raises(DataError) as caught:
        opened(folder)
    assert str(caught.value) == (
        f"{folder}/eval.csv:3: 1 label(s) that {folder}/train.csv does not have: 'cta'\n  -> did you mean 'cat'?"
    )


def test_missing_file_and_column(folder):
    with pytest.raises(DataError, match=r"nope\.csv"):
        opened(folder, train_csv=str(folder / "nope.csv"))
    with pytest.raises(DataError, match="lable"):
        opened(folder, label_column="lable")


def test_fingerprint_is_of_the_annotations(folder):
    first = opened(folder).fingerprint
    assert opened(folder, label_smoothing=0.1).fingerprint == first
    with open(folder / "eval.csv", "a") as file:
        file.write("eval_images/0.png,2\n")
    assert opened(folder).fingerprint != first


def test_label_counts(folder):
    task = opened(folder)
    assert task.label_counts(0, 9).tolist() == [3, 3, 3]
    assert task.label_counts(4, 6).tolist() == [0, 1, 1]
    assert task.label_counts(3, 3).tolist() == [0, 0, 0]


# Model, loss, report


def test_model_knows_classes_channels_and_size(folder):
    for options in ({}, {"color": "rgb"}, {"color": "rgb", "image_size": [16, 12]}):
        task = opened(folder, **options)
        model = task.model(ModelSection(name="mlp"))
        assert model(task.prepare(task.train.batch(np.arange(2), 0).inputs)).shape == (2, 3)


def test_model_s_size_is_that_of_the_first_image_that_can_be_read(folder):
    (folder / "train_images" / "0.png").unlink()
    with pytest.raises(DataError, match="not found"):
        opened(folder).model(ModelSection(name="linear"))
    assert opened(folder, on_bad_image="skip").model(ModelSection(name="linear")).layer.in_features == 64


def test_model_that_does_not_fit(folder):
    with pytest.raises(ConfigError, match="cannot take a batch of shape"):
        opened(folder).model(ModelSection(name="resnet18"))  # gray images, three channels wanted


def test_prepare(folder):
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert opened(folder).prepare(pixels).flatten().tolist() == [-1.0, 1.0]
    assert opened(folder, mean=[0.0], std=[2.0]).prepare(pixels).flatten().tolist() == [0.0, 0.5]
    rgb = opened(folder, color="rgb", mean=[0.0, 0.5, 1.0], std=[1.0, 0.5, 1.0])
    assert rgb.prepare(pixels.expand(1, 3, 1, 2))[0, :, 0].tolist() == [[0.0, 1.0], [-1.0, 1.0], [-1.0, 0.0]]


def test_loss_is_a_mean_and_smoothing_is_of_training_alone(folder):
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    plain, smooth = opened(folder), opened(folder, label_smoothing=0.2)
    log = outputs.log_softmax(1)
    expected = -log[torch.arange(6), targets].mean()
    torch.testing.assert_close(plain.loss(outputs, targets), expected)
    torch.testing.assert_close(smooth.loss(outputs, targets), 0.8 * expected - 0.2 * log.mean())
    loss, count = smooth.evaluate(outputs, targets)["loss"]
    torch.testing.assert_close(loss / count, expected)


def test_report_has_every_metric_that_can_decide(folder):
    task = opened(folder)
    sums = Sums()
    sums.add(task.evaluate(torch.eye(3)[[0, 1, 1]], torch.tensor([0, 1, 2])))
    report = task.report(sums)
    assert set(Task.metrics) <= set(report)
    assert report["top1"] == pytest.approx(2 / 3)
    assert report["class_accuracy"] == {"0": 1.0, "1": 1.0, "2": 0.0}
    assert next(iter(Task.metrics)) == "top1"


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "task.mean: 3 values, but task.color=gray has 1 channel"),
        ({"color": "rgb", "std": [0.5]}, "task.std: 1 values, but task.color=rgb has 3 channel"),
        ({"std": [0.0]}, "task.std"),
        ({"augment": {"random_resized_crop": True}}, "task.augment: random_resized_crop scales to task.image_size"),
        ({"image_size": [8]}, "task.image_size"),
        ({"image_size": [0, 8]}, "task.image_size.0"),
        ({"label_smoothing": 1.0}, "task.label_smoothing"),
        ({"augment": {"horizontal_flip": 1.5}}, "task.augment.horizontal_flip"),
    ],
)
def test_options_that_mean_nothing(folder, options, message):
    with pytest.raises(ConfigError) as caught:
        make_config(folder, task=options)
    assert message in str(caught.value)
    assert "1 problem in" in str(caught.value)


# Augmentation


@pytest.mark.parametrize(
    ("augment", "size"),
    [
        ({}, None),
        ({"crop_padding": 2}, None),
        ({"horizontal_flip": 1.0}, None),
        ({"rotation": 30.0}, None),
        ({"random_resized_crop": True}, (5, 7)),
        ({"crop_padding": 1, "rotation": 10.0, "horizontal_flip": 0.5}, (10, 6)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_keep_their_kind(augment, size, channels):
    image = torch.randint(0, 256, (channels, 8, 8), dtype=torch.uint8)
    changed = _pipeline(Augment(**augment), size)(image)
    assert changed.dtype is torch.uint8
    assert changed.shape == (channels, *(size or (8, 8)))
    assert _pipeline(None, size)(image).shape == (channels, *(size or (8, 8)))


def test_flip_and_shift():
    image = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    assert torch.equal(_pipeline(Augment(horizontal_flip=1.0), None)(image), image.flip(2))
    assert torch.equal(_pipeline(Augment(), None)(image), image)
    torch.manual_seed(0)
    corners = {tuple(_Shift(1)(image + 1)[0, 4, [3, 4]].tolist()) for _ in range(200)}
    assert corners == {(36 + down * 8 + right, 37 + down * 8 + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert torch.equal(_Shift(0)(image), image)
