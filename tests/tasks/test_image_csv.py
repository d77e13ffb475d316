"""The task image_csv: classes, augmentation, model, loss, report and options."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision.io import decode_image, write_png

from harness.config.schema import ModelSection
from harness.data.loader import BatchRequest, Loader
from harness.data.rank_data import TrainData
from harness.data.seeds import seeded_torch
from harness.data.shards import Segment
from harness.distributed.machine import Memory
from harness.errors import ConfigError, DataError
from harness.tasks.image_csv import task as images_task
from harness.training.evaluation.sums import Sums
from harness.training.task import laid_out, prepare
from tests.fixtures import make_config, write_rows

Image = pytest.importorskip("PIL.Image")


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
    assert task.objective.labels.names == (0, 1, 2)
    assert task.summary == {
        "train rows": 9, "eval rows": 5, "classes": "3: 0, 1, 2", "loss": "cross_entropy",
        "metrics": "top1, loss, mean_class_accuracy",
    }  # fmt: skip
    assert task.eval.batch(np.arange(5), None).targets.tolist() == [0, 1, 2, 0, 1]


def test_images_of_validation_among_those_of_training_are_a_warning(folder):
    assert not opened(folder).notes
    for table in ("train", "eval"):
        with open(folder / f"{table}.csv", "a") as file:
            file.write(",0\n")  # which task.on_bad_row can leave out
    assert not opened(folder).notes
    with open(folder / "train.csv", "a") as file:
        file.write("eval_images/3.png,0\neval_images/1.png,1\n")
    (note,) = opened(folder).notes
    assert "train.csv:12: 2 training rows have images that" in note


def test_copied_images_are_a_warning(folder, monkeypatch):
    def add(table: str, name: str, image: str, label: int) -> None:
        shutil.copy(folder / image, folder / f"{table}_images" / name)
        with open(folder / f"{table}.csv", "a") as file:
            file.write(f"{table}_images/{name},{label}\n")

    add("train", "same.png", "train_images/1.png", 1)  # with the same label, in the same table
    assert not opened(folder).notes
    add("train", "leak.png", "eval_images/4.png", 1)
    (note,) = opened(folder).notes
    assert "eval.csv:6: eval_images/4.png and " in note
    assert "train.csv:12: train_images/leak.png; the metrics of validation will be too good" in note
    add("eval", "other.png", "eval_images/0.png", 2)
    _, note = opened(folder).notes
    assert "eval.csv:2: eval_images/0.png and " in note
    assert "eval.csv:7: eval_images/other.png; correct the labels" in note
    assert len(opened(folder, on_bad_row="skip", labels={"column": "label", "kind": "regression"}).notes) == 1
    (folder / "train_images" / "1.png").unlink()
    os.mkfifo(folder / "train_images" / "1.png")  # which nobody writes to
    assert len(opened(folder).notes) == 2
    with monkeypatch.context() as patch:
        patch.setattr(images_task, "_COMPARING_S", -1)
        assert not opened(folder).notes


def test_label_has_the_same_class_in_both_tables(folder):
    (folder / "train.csv").write_text(
        "path,label\n" + "".join(f"train_images/{i}.png,{x}\n" for i, x in enumerate("cab"))
    )
    (folder / "eval.csv").write_text("path,label\neval_images/0.png,c\neval_images/1.png,b\n")
    task = opened(folder)
    assert task.objective.labels.names == ("a", "b", "c")
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
        f"{folder}/eval.csv:3: 1 label that {folder}/train.csv does not have: 'cta'\n  -> did you mean 'cat'?"
    )
    (folder / "eval.csv").write_text("path,label\n" + "".join(f"eval_images/{i}.png,photo{i}\n" for i in range(5)))
    with pytest.raises(DataError, match="nearly every row has its own label: set task.label_column"):
        opened(folder)


def test_missing_file_and_column(folder):
    with pytest.raises(DataError, match=r"nope\.csv"):
        opened(folder, train_csv=str(folder / "nope.csv"))
    for options, hint in (
        ({"label_column": "lable"}, "did you mean task.label_column=label?"),
        ({"path_column": "image"}, "set task.path_column=path"),
        ({"labels": {"column": "kind"}}, "set task.labels.column=label"),
    ):
        with pytest.raises(DataError, match=r"no column '\w+'; the columns are 'path', 'label'") as caught:
            opened(folder, **options)
        assert caught.value.hint == hint


def test_fingerprint_depends_on_the_annotations(folder):
    first = opened(folder).fingerprint
    assert opened(folder, loss={"args": {"label_smoothing": 0.1}}).fingerprint == first
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
    assert opened(folder, on_bad_row="skip").model(ModelSection(name="linear")).layer.in_features == 64


def test_model_with_other_channels_is_rejected(folder):
    with pytest.raises(ConfigError, match="cannot process a batch of shape"):
        opened(folder).model(ModelSection(name="resnet18"))  # gray images, three channels wanted


def test_model_with_other_outputs_is_rejected(folder):
    with pytest.raises(ConfigError, match=r"Flatten returns \(2, 64\) for 2 rows, not 3 outputs for each"):
        opened(folder).model(ModelSection(name="torch.nn.Flatten"))


def test_prepare(folder):
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert opened(folder).prepare(pixels).flatten().tolist() == [-1.0, 1.0]
    assert opened(folder, mean=[0.0], std=[2.0]).prepare(pixels).flatten().tolist() == [0.0, 0.5]
    rgb = opened(folder, color="rgb", mean=[0.0, 0.5, 1.0], std=[1.0, 0.5, 1.0])
    assert rgb.prepare(pixels.expand(1, 3, 1, 2))[0, :, 0].tolist() == [[0.0, 1.0], [-1.0, 1.0], [-1.0, 0.0]]


def test_label_smoothing_applies_to_training_only(folder):
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    plain, smooth = opened(folder), opened(folder, loss={"args": {"label_smoothing": 0.2}})
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
    assert list(report)[:3] == ["top1", "loss", "mean_class_accuracy"]
    assert report["top1"] == pytest.approx(2 / 3)
    assert report["class_accuracy"] == {"0": 1.0, "1": 1.0, "2": 0.0}


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "task.mean: 3 values, but task.color=gray has 1 channel"),
        ({"color": "rgb", "std": [0.5]}, "task.std: 1 value, but task.color=rgb has 3 channel"),
        ({"std": [0.0]}, "task.std"),
        ({"image_size": [8]}, "task.image_size"),
        ({"image_size": [0, 8]}, "task.image_size.0"),
        ({"class_weights": "balanced"}, "unknown key; did you mean task.loss.class_weights?"),
        (
            {"transforms": {"training": []}},
            "task.transforms.training: unknown key; did you mean task.transforms.train?",
        ),
        ({"transforms": {"train": "RandAugment"}}, "task.transforms.train: it should be a list"),
        ({"transforms": {"train": [{"RandomErasing": None, "p": 0.1}]}}, "indent the arguments below the name"),
        ({"transforms": {"eval": [3]}}, "task.transforms.eval.0: it should be a name such as RandomHorizontalFlip, or"),
    ],
)
def test_invalid_options(folder, options, message):
    with pytest.raises(ConfigError) as caught:
        make_config(folder, task=options)
    assert message in str(caught.value)
    assert "1 problem in" in str(caught.value)


# Transforms


def training_images(folder, epochs: int = 1, **options):
    task = opened(folder, **options)
    return [task.train.batch(np.arange(9), epoch).inputs for epoch in range(epochs)]


@pytest.mark.parametrize("color", ["gray", "rgb"])
@pytest.mark.parametrize("size", [None, (10, 6)])
def test_lists_change_pixels_in_training_and_evaluation(folder, size, color):
    train = [{"RandomCrop": {"size": 8, "padding": 1}}, {"RandomRotation": 10}, "RandomHorizontalFlip"]
    lists = {"train": train, "eval": [{"RandomHorizontalFlip": 1.0}]}
    options = {"color": color, "image_size": size and list(size)}
    first, second = training_images(folder, 2, transforms=lists, **options)
    assert first.dtype is torch.uint8
    assert first.shape == (9, {"gray": 1, "rgb": 3}[color], *(size or (8, 8)))
    assert not torch.equal(first, second)
    task, (plain,) = opened(folder, transforms=lists, **options), training_images(folder, **options)
    assert torch.equal(task.train.batch(np.arange(9), None).inputs, plain.flip(3))  # only the list for evaluation
    assert task.prepare(first).shape == first.shape


def test_random_crop_shifts_in_every_direction(folder):
    (plain,) = training_images(folder)
    padded = torch.nn.functional.pad(plain, [1] * 4)
    crops = {(y, x): padded[..., y : y + 8, x : x + 8] for y in range(3) for x in range(3)}
    seen = set()
    for images in training_images(folder, 12, transforms={"train": [{"RandomCrop": {"size": 8, "padding": 1}}]}):
        for row, image in enumerate(images):
            shifts = {shift for shift, crop in crops.items() if torch.equal(crop[row], image)}
            assert shifts
            seen |= shifts
    assert seen == set(crops)


def test_image_size_keeps_the_aspect_ratio(tmp_path):
    """A circle stays one, in training and in validation, whatever the shape of the image around it."""
    for split in ("train", "eval"):
        write_rows(tmp_path, split, 3)
        for row, (height, width) in enumerate([(30, 30), (30, 90), (60, 30)]):
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            circle = (y - height / 2) ** 2 + (x - width / 2) ** 2 < 10**2
            write_png((circle * 200).to(torch.uint8)[None], str(tmp_path / f"{split}_images" / f"{row}.png"))
    task = opened(tmp_path, image_size=[60, 60])
    for images in (task.train.batch(np.arange(3), 0).inputs, task.eval.batch(np.arange(3), None).inputs):
        for image in images[:, 0] > 100:
            rows, columns = image.any(1).sum().item(), image.any(0).sum().item()
            assert rows == columns == 38, "19 pixels, where 30 pixels become 60"


def test_float_lists_are_not_normalized_again(folder):
    floats = [{"ToDtype": {"dtype": "float32", "scale": True}}, {"Normalize": {"mean": [0.25], "std": [0.5]}}]
    task = opened(folder, transforms={"train": floats, "eval": floats})
    batch = task.eval.batch(np.arange(5), None).inputs
    plain = opened(folder, mean=[0.25], std=[0.5])
    torch.testing.assert_close(task.prepare(batch), plain.prepare(plain.eval.batch(np.arange(5), None).inputs))
    assert task.model(ModelSection(name="linear"))(task.prepare(batch)).shape == (5, 3)
    assert "mean" not in task.signature["preprocessing"]
    assert task.signature["preprocessing"]["transforms"] == floats


def test_training_and_evaluation_may_differ_in_size(folder):
    lists = {"train": [{"RandomResizedCrop": 6}], "eval": [{"Resize": 12}, {"CenterCrop": 10}]}
    task = opened(folder, transforms=lists)
    assert task.learned == {"classes": [0, 1, 2], "image_size": [10, 10]}
    assert task.model(ModelSection(name="small_cnn")).training
    with pytest.raises(ConfigError, match=r"model mlp cannot process a batch of shape \(2, 1, 6, 6\)"):
        task.model(ModelSection(name="mlp"))
    preprocessing = task.signature["preprocessing"]
    assert (preprocessing["transforms"], preprocessing["size"]) == (lists["eval"], [10, 10])
    new = make_config(folder, task={"transforms": lists}).task.open_new(
        task.learned, str(folder / "eval.csv"), folder / "cache"
    )
    assert torch.equal(new.eval.batch(np.arange(5), None).inputs, task.eval.batch(np.arange(5), None).inputs)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"transforms": {"train": [{"RandomResizedCrop": 6}]}},
         "task.transforms.eval: training images are 6x6, but evaluation images are 8x8 (height x width)", "image_size"),
        ({"transforms": {"train": [{"ToDtype": {"dtype": "float32", "scale": True}}]}},
         "task.transforms: the transforms return float32 in training but uint8 in evaluation", "or neither"),
        ({"transforms": {key: [{"ToDtype": {"dtype": "float32", "scale": True}}] for key in ("train", "eval")},
          "std": [0.5]}, "task.std: the transforms return floats, to which task.mean and task.std are not applied",
         "remove task.mean and task.std"),
        ({"transforms": {"train": ["RandomCropp"]}}, "task.transforms.train.0: unknown transform", "mean RandomCrop?"),
    ],
)  # fmt: skip
def test_lists_that_do_not_match_are_refused_before_training(folder, options, message, hint):
    with pytest.raises(ConfigError) as caught:
        opened(folder, **options).model(ModelSection(name="linear"))
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_null_is_no_transforms(folder):
    for nothing in (None, {}, {"train": None, "eval": []}):
        assert make_config(folder, task={"transforms": nothing}) == make_config(folder)


# The layout in memory


def test_channels_last_from_the_loader_on(photos):
    """The pixels do not depend on the layout, and floats are never copied for it."""
    task = opened(photos, transforms=SCALING, color="rgb")
    rows, formats, seen = np.arange(6), {}, []
    for channels_last in (False, True):
        config = make_config(photos, model={"channels_last": channels_last})
        for epoch in (0, None):
            loader = Loader(laid_out(task.train, config), 1, torch.device("cpu"))
            (batch,) = loader.fetch([BatchRequest(rows, epoch)])
            loader.close()
            formats[channels_last] = (torch.contiguous_format, torch.channels_last)[channels_last]
            assert batch.inputs.is_contiguous(memory_format=formats[channels_last])
            assert torch.equal(batch.inputs, task.train.batch(rows, epoch).inputs)
        spy = SimpleNamespace(prepare=lambda inputs: seen.append(inputs) or task.prepare(inputs))
        prepared = prepare(SimpleNamespace(config=config, task=spy), task.train.batch(rows, 0).inputs)
        assert prepared.is_contiguous(memory_format=formats[channels_last])
        assert seen[-1].is_contiguous(memory_format=formats[channels_last])
        assert torch.equal(prepared, task.prepare(task.train.batch(rows, 0).inputs))


@pytest.mark.parametrize("after", [[], ["RandomHorizontalFlip", {"RandomErasing": {"p": 0.9}}], [{"ColorJitter": 0.4}]])
def test_faster_crops_are_those_of_torchvision(photos, after):
    """Also through a list whose later transforms compute something else from another layout."""
    image = decode_image(str(photos / "1_plain.jpg"))
    for entry in (24, {"size": [9, 300], "antialias": False}, {"size": 200, "interpolation": "bicubic"}):
        lists = {"train": [{"RandomResizedCrop": entry}, *after], "eval": SCALING["eval"]}
        pipeline = opened(photos, transforms=lists, color="rgb", image_size=[24, 24]).train.for_training
        for seed in range(8):
            with seeded_torch(seed):
                expected = image
                for step in pipeline.steps.values():
                    expected = step(expected)
            with seeded_torch(seed):
                found = replace(pipeline, size=None)(image)
            assert torch.equal(found, expected)


# Reduced decoding

SCALING = {"train": [{"RandomResizedCrop": 24}, "RandomHorizontalFlip"], "eval": [{"Resize": 32}, {"CenterCrop": 24}]}
LISTS = {"lists": {"transforms": SCALING}, "image_size alone": {"image_size": [24, 24]}}


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


PHOTOS = {  # how each is saved, and whether it can be decoded at a reduced size
    "plain.jpg": ("RGB", {}, True),
    "progressive.jpg": ("RGB", {"progressive": True}, True),
    **{f"{orientation}.jpg": ("RGB", {"exif": turned(orientation)}, True) for orientation in range(2, 9)},
    "gray.jpg": ("L", {}, True),
    "all_colors.jpg": ("RGB", {"subsampling": 0}, True),
    "cmyk.jpg": ("CMYK", {}, False),
    "plain.png": ("RGB", {}, False),
}


ALL = np.arange(2 * len(PHOTOS))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A row for each of PHOTOS, then those of a third of their size. Each channel rises along another direction, by one
    level per pixel in the smaller ones."""
    folder = tmp_path_factory.mktemp("photos")
    lines = ["path,label"]
    for scale in (3, 1):
        y, x = np.mgrid[: 160 * scale, : 203 * scale] / scale
        image = Image.fromarray(np.stack([x + 20, y + 50, 240 - x], 2).round().astype(np.uint8))
        for name, (mode, options, _) in PHOTOS.items():
            image.convert(mode).save(folder / f"{scale}_{name}", quality=95, **options)
            lines.append(f"{scale}_{name},{len(lines) % 3}")
    for split in ("train", "eval"):
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def both(folder, rows=ALL, **options):
    """The images of training in epochs 0 to 3 and of evaluation, decoded in full and reduced."""
    for decode in ("full", "reduced"):
        task = opened(folder, decode=decode, **options)
        yield torch.cat([task.train.batch(rows, epoch).inputs for epoch in (0, 1, 2, 3, None)]).float()


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("lists", LISTS)
def test_reduced_decoding_shows_the_same_part_of_the_image(photos, lists, color):
    """A ramp that is averaged and then sampled is the same ramp. Both ways round to whole levels, and a pixel of the
    result is about 1.5 to 9 levels from the next, so a part that is off by one pixel of it would differ by more."""
    full, reduced = both(photos, color=color, **LISTS[lists])
    difference = (full - reduced).abs().mean((1, 2, 3)).view(5, -1)
    assert difference.max() < 0.75
    can = torch.tensor([can for _, _, can in PHOTOS.values()])
    large = difference[:, : len(PHOTOS)]
    assert (large[:, ~can] == 0).all(), "decoded in full"
    assert (large[:, can] > 0).any(0).all(), "decoded at a reduced size"


def test_reduced_decoding_is_full_decoding_where_no_reduction_fits(photos):
    full, reduced = both(photos, transforms={**SCALING, "train": [{"RandomResizedCrop": 300}]}, image_size=[9, 9])
    changed = (full != reduced).flatten(1).any(1).view(5, -1)
    assert not changed[:4].any(), "no crop of 480x609 pixels has 600x600"
    assert changed[4].any()
    for entry in (
        {"Resize": {"size": 24, "antialias": False}},
        {"RandomResizedCrop": {"size": 24, "interpolation": "nearest"}},
    ):
        full, reduced = both(photos, np.arange(3), transforms={**SCALING, "train": [entry]}, image_size=[24, 24])
        assert torch.equal(full[:12], reduced[:12])


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (3, 1)])
def test_reduced_decoding_depends_on_seed_epoch_and_row_only(photos, world, workers):
    """Also not on what is left of an epoch after a resume, nor on the image that a row replaces."""
    images = opened(photos, decode="reduced", transforms=SCALING, on_bad_row="skip").train
    whole = images.batch(ALL, 5).inputs
    seen = []
    for rank in range(world):
        loader = Loader(images, workers, torch.device("cpu"))
        groups = TrainData(loader, "global", range(rank, rank + 1), world, 3, 1, seed=1).groups(
            5, [Segment(world, 3, 1)]
        )
        for batch in (micro.batch for group in groups for micro in group if micro.num_rows):
            assert torch.equal(batch.inputs, whole[batch.rows])
            seen += batch.rows.tolist()
        loader.close()
    assert len(set(seen)) == len(ALL) - 3 * world
    content = (photos / "3_plain.jpg").read_bytes()
    try:
        (photos / "3_plain.jpg").write_bytes(content[: len(content) // 2])
        batch = images.batch(np.arange(2), 5)
        assert (batch.rows.tolist(), batch.bad) == ([1, 1], [0])
        assert torch.equal(batch.inputs, whole[[1, 1]])
        images.on_bad_row = "stop"
        with pytest.raises(DataError, match=r"train.csv:2: image cannot be decoded: .*/3_plain.jpg: "):
            images.batch(np.arange(2), 5)
    finally:
        (photos / "3_plain.jpg").write_bytes(content)


def test_reduced_decoding_needs_a_list_that_scales_first(photos):
    for transforms in (
        {},
        {"train": ["RandomHorizontalFlip", {"RandomResizedCrop": 24}], "eval": [{"CenterCrop": 24}]},
    ):
        with pytest.raises(ConfigError, match="task.decode: no image can be decoded at a reduced size") as caught:
            opened(photos, decode="reduced", transforms=transforms)
        assert "RandomResizedCrop or Resize" in caught.value.hint
    task = opened(photos, decode="reduced", transforms=SCALING, color="rgb")
    assert "1/8" in task.signature["preprocessing"]["decode"]
    assert "decode" not in opened(photos, transforms=SCALING, color="rgb").signature["preprocessing"]
    with pytest.raises(ConfigError, match="task.decode"):
        opened(photos, decode="half")
    with pytest.raises(
        ConfigError, match="task.transforms.train.0: RandomResizedCrop cannot process an image of 480x609"
    ):
        opened(
            photos, decode="reduced", transforms={"train": [{"RandomResizedCrop": {"size": 24, "scale": ["a", "b"]}}]}
        ).train.batch(np.arange(1), 0)


@pytest.mark.parametrize(
    "facts",
    [{}, {"classes": [], "image_size": [8, 8]}, {"classes": "ab", "image_size": [8, 8]},
     {"classes": [None], "image_size": [8, 8]}, {"classes": [1], "image_size": [8]},
     {"classes": [1], "image_size": [8, -8]}, {"classes": {"a": 1}, "image_size": {}},
     {"classes": 3, "image_size": [8, 8]}, {"classes": [1], "image_size": [8, 8], "mean": 5},
     {"classes": [1], "image_size": "x"}, {"classes": [1], "image_size": [True, 8]}],
)  # fmt: skip
def test_damaged_facts_of_the_training_data(folder, facts):
    task = make_config(folder).task
    with pytest.raises(ConfigError, match="the run's task.json lacks "):
        task.open_new(facts, str(folder / "eval.csv"), folder / "cache")


def test_images_larger_than_the_memory(folder, monkeypatch):
    """Refused before the pixels are in memory."""
    size, message = 65536, "two images of 65536x65536 take 32.0 GiB, but only 16.0 of this machine's 16.0 GiB"
    opened = make_config(folder, task={"image_size": [size, size]}).task.open(0, folder / "cache")
    monkeypatch.setattr("harness.distributed.machine.memory", lambda: Memory(1 << 34, 1 << 34))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=f"task.image_size: {message}"):
        opened.model(ModelSection(name="small_cnn"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB
