"""The task image_csv: classes, augmentation, model, loss, report and options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.config.schema import ModelSection
from harness.errors import ConfigError, DataError
from harness.tasks.image_csv.config import Task
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


def test_classes_are_the_labels_of_training(folder):
    task = opened(folder)
    assert task.classes == (0, 1, 2)
    assert task.summary == {"train rows": 9, "eval rows": 5, "classes": 3}
    assert task.eval.batch(np.arange(5), None).targets.tolist() == [0, 1, 2, 0, 1]


def test_label_has_the_same_class_in_both_tables(folder):
    (folder / "train.csv").write_text(
        "path,label\n" + "".join(f"train_images/{i}.png,{x}\n" for i, x in enumerate("cab"))
    )
    (folder / "eval.csv").write_text("path,label\neval_images/0.png,c\neval_images/1.png,b\n")
    task = opened(folder)
    assert task.classes == ("a", "b", "c")
    assert task.train.batch(np.arange(3), None).targets.tolist() == [2, 0, 1]
    assert task.eval.batch(np.arange(2), None).targets.tolist() == [2, 1]


def test_unknown_evaluation_label_is_named(folder):
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


def test_fingerprint_depends_on_the_annotations(folder):
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


def test_model_gets_classes_channels_and_size(folder):
    for options in ({}, {"color": "rgb"}, {"color": "rgb", "image_size": [16, 12]}):
        task = opened(folder, **options)
        model = task.model(ModelSection(name="mlp"))
        assert model(task.prepare(task.train.batch(np.arange(2), 0).inputs)).shape == (2, 3)


def test_image_size_is_that_of_the_first_readable_image(folder):
    (folder / "train_images" / "0.png").unlink()
    with pytest.raises(DataError, match="not found"):
        opened(folder).model(ModelSection(name="linear"))
    assert opened(folder, on_bad_image="skip").model(ModelSection(name="linear")).layer.in_features == 64


def test_model_with_other_channels_is_rejected(folder):
    with pytest.raises(ConfigError, match="cannot process a batch of shape"):
        opened(folder).model(ModelSection(name="resnet18"))  # gray images, three channels wanted


def test_prepare(folder):
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert opened(folder).prepare(pixels).flatten().tolist() == [-1.0, 1.0]
    assert opened(folder, mean=[0.0], std=[2.0]).prepare(pixels).flatten().tolist() == [0.0, 0.5]
    rgb = opened(folder, color="rgb", mean=[0.0, 0.5, 1.0], std=[1.0, 0.5, 1.0])
    assert rgb.prepare(pixels.expand(1, 3, 1, 2))[0, :, 0].tolist() == [[0.0, 1.0], [-1.0, 1.0], [-1.0, 0.0]]


def test_label_smoothing_applies_to_training_only(folder):
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    plain, smooth = opened(folder), opened(folder, label_smoothing=0.2)
    log = outputs.log_softmax(1)
    expected = -log[torch.arange(6), targets].mean()
    torch.testing.assert_close(plain.loss(outputs, targets), expected)
    torch.testing.assert_close(smooth.loss(outputs, targets), 0.8 * expected - 0.2 * log.mean())
    loss, count = smooth.evaluate(outputs, targets)["loss"]
    torch.testing.assert_close(loss / count, expected)


def test_report_has_every_metric(folder):
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
def test_invalid_options(folder, options, message):
    with pytest.raises(ConfigError) as caught:
        make_config(folder, task=options)
    assert message in str(caught.value)
    assert "1 problem in" in str(caught.value)


# Augmentation


def training_images(folder, epochs: int = 1, **options):
    task = opened(folder, **options)
    return [task.train.batch(np.arange(9), epoch).inputs for epoch in range(epochs)]


@pytest.mark.parametrize(
    ("augment", "size"),
    [
        ({"crop_padding": 2}, None),
        ({"rotation": 30.0}, None),
        ({"random_resized_crop": True}, (5, 7)),
        ({"crop_padding": 1, "rotation": 10.0, "horizontal_flip": 0.5}, (10, 6)),
    ],
)
@pytest.mark.parametrize("color", ["gray", "rgb"])
def test_augmentation_changes_pixels_but_not_the_shape(folder, augment, size, color):
    options = {"color": color, "image_size": size and list(size)}
    first, second = training_images(folder, 2, augment=augment, **options)
    assert first.dtype is torch.uint8
    assert first.shape == (9, {"gray": 1, "rgb": 3}[color], *(size or (8, 8)))
    assert not torch.equal(first, second)
    plain = opened(folder, augment=augment, **options).train.batch(np.arange(9), None).inputs
    assert torch.equal(plain, training_images(folder, **options)[0])


def test_flip_mirrors_every_image(folder):
    (plain,), (flipped,) = training_images(folder), training_images(folder, augment={"horizontal_flip": 1.0})
    assert torch.equal(flipped, plain.flip(3))


def test_crop_padding_shifts_in_every_direction(folder):
    (plain,) = training_images(folder)
    padded = torch.nn.functional.pad(plain, [1] * 4)
    crops = {(y, x): padded[..., y : y + 8, x : x + 8] for y in range(3) for x in range(3)}
    seen = set()
    for images in training_images(folder, 12, augment={"crop_padding": 1}):
        for row, image in enumerate(images):
            shifts = {shift for shift, crop in crops.items() if torch.equal(crop[row], image)}
            assert shifts
            seen |= shifts
    assert seen == set(crops)


@pytest.mark.parametrize(
    "facts",
    [{}, {"classes": [], "image_size": [8, 8]}, {"classes": "ab", "image_size": [8, 8]},
     {"classes": [None], "image_size": [8, 8]}, {"classes": [1], "image_size": [8]},
     {"classes": [1], "image_size": [8, -8]}, {"classes": {"a": 1}, "image_size": {}}],
)  # fmt: skip
def test_damaged_facts_of_the_training_data(folder, facts):
    task = make_config(folder).task
    with pytest.raises(ConfigError, match="the run's task.json does not hold the classes and the image size"):
        task.open_new(facts, str(folder / "eval.csv"), folder / "cache")


def test_images_larger_than_the_memory(folder, monkeypatch):
    opened = make_config(folder, task={"image_size": [65536, 65536]}).task.open(0, folder / "cache")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 22, "SC_PAGE_SIZE": 1 << 12}[name])
    message = "task.image_size: two images of 65536x65536 take 32.0 GiB, but this machine has 16.0 GiB of memory"
    with pytest.raises(ConfigError, match=message):
        opened.model(ModelSection(name="small_cnn"))
