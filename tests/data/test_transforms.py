"""Lists of transforms: built from the YAML, checked against torchvision's signatures, reproducible, of one size."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from harness.config.transforms import TransformsSection
from harness.data import transforms
from harness.data.seeds import seeded_torch
from harness.data.transforms import fitted
from harness.errors import ConfigError
from harness.training.rows import mixing
from tests.conftest import ROOT
from tests.fixtures import make_config, write_photos

IMAGE = torch.arange(3 * 40 * 56, dtype=torch.int64).mul_(7).remainder_(251).to(torch.uint8).view(3, 40, 56)


def pipelines(train=(), size=None, channels=3, eval_=()):
    section = TransformsSection.model_validate({"train": list(train), "eval": list(eval_)})
    return transforms.build(section, size, channels)


def applied(entries, image=IMAGE, seed=5, **options):
    with seeded_torch(seed):
        return pipelines(entries, channels=len(image), **options)[0](image)


BILINEAR = v2.InterpolationMode.BILINEAR
SAME = {  # an entry of the YAML, and what it means
    "name alone": ("RandomHorizontalFlip", v2.RandomHorizontalFlip()),
    "null": ({"RandomVerticalFlip": None}, v2.RandomVerticalFlip()),
    "arguments": ({"RandomResizedCrop": {"size": 24, "scale": [0.5, 1.0]}}, v2.RandomResizedCrop(24, (0.5, 1.0))),
    "first argument": ({"CenterCrop": 24}, v2.CenterCrop(24)),
    "first argument, a list": ({"Resize": [24, 30]}, v2.Resize([24, 30])),
    "interpolation": (
        {"RandomRotation": {"degrees": 20, "interpolation": "bilinear"}}, v2.RandomRotation(20, BILINEAR)
    ),
    "policy": ({"AutoAugment": {"policy": "cifar10"}}, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)),
    "type": ({"ToDtype": {"dtype": "float32", "scale": True}}, v2.ToDtype(torch.float32, scale=True)),
    "nested": (
        {"RandomApply": {"transforms": [{"ColorJitter": {"hue": 0.4}}, {"GaussianBlur": 3}], "p": 1.0}},
        v2.RandomApply([v2.ColorJitter(hue=0.4), v2.GaussianBlur(3)], p=1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAME)
def test_entry_is_the_class_of_torchvision(what):
    entry, expected = SAME[what]
    for seed in range(3):
        with seeded_torch(seed):
            wanted = expected(IMAGE)
        assert torch.equal(applied([entry], seed=seed), wanted)


def test_lists_are_applied_in_order_and_separately():
    train, eval_ = pipelines([{"CenterCrop": 24}, {"Pad": 1}], eval_=[{"Pad": 1}, {"CenterCrop": 24}])
    assert train(IMAGE).shape == (3, 26, 26)
    assert eval_(IMAGE).shape == (3, 24, 24)
    assert torch.equal(pipelines()[0](IMAGE), IMAGE)


HEAVY = [
    "RandAugment", "TrivialAugmentWide", "AugMix", {"AutoAugment": {"interpolation": "bilinear"}}, "RandomGrayscale",
    {"ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}}, "RandomPhotometricDistort",
    {"RandomPosterize": {"bits": 3}}, {"RandomSolarize": 128}, "RandomEqualize", "RandomAutocontrast", "RandomInvert",
    {"RandomAdjustSharpness": 2.0}, "RandomPerspective", {"RandomAffine": {"degrees": 9, "translate": [0.1, 0.1]}},
    "ElasticTransform", {"GaussianBlur": 5}, {"RandomErasing": {"p": 1.0}}, {"JPEG": {"quality": [40, 60]}},
]  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("entry", HEAVY, ids=lambda entry: entry if isinstance(entry, str) else next(iter(entry)))
def test_gray_and_color_images_pass_through(entry, channels):
    """Also those that change colors, which a gray image does not have."""
    if channels == 1 and entry in ({"JPEG": {"quality": [40, 60]}}, "RandomPhotometricDistort"):
        pytest.skip("only for color images, in torchvision")
    image = IMAGE[:channels]
    for seed in range(4):
        changed = applied([entry], image, seed)
        assert (changed.dtype, changed.shape, type(changed)) == (torch.uint8, image.shape, torch.Tensor)
        assert torch.equal(changed, applied([entry], image, seed))


def test_floats_are_passed_on_as_float32():
    entries = [{"ToDtype": {"dtype": "float64", "scale": True}}, {"Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}}]
    erased = {"RandomErasing": {"p": 1.0, "value": "random"}}
    found = applied([*entries, erased])
    assert found.dtype == torch.float32
    assert (found != applied(entries)).any(0).float().mean() < 0.4


# Errors, each before the start, all at once

WRONG = [
    ("RandomResizeCrop", "train.0: unknown transform 'RandomResizeCrop'", "did you mean RandomResizedCrop?"),
    ("Qzx", "unknown transform 'Qzx'", "use a class of torchvision.transforms.v2, or package.module.Class"),
    ({"RandomResizedCrop": {"sise": 3}}, "RandomResizedCrop has no argument sise", "did you mean size? its arguments"),
    ({"RandomHorizontalFlip": 2}, "cannot build RandomHorizontalFlip(p=2): `p` should be", "its arguments are: p"),
    ("RandomResizedCrop", "cannot build RandomResizedCrop(): ", "its arguments are: size, scale"),
    ({"PILToTensor": 3}, "PILToTensor has no argument value", "it has none"),
    ({"Resize": {"size": 3, "interpolation": "linear"}}, "interpolation='linear' is not allowed",
     "did you mean bilinear? use nearest, nearest-exact, bilinear"),
    ({"ToDtype": {"dtype": "float23"}}, "dtype='float23' is not allowed", "did you mean float32?"),
    ({"RandomApply": {"transforms": ["ColorJiter"]}}, "train.0.transforms.0: unknown transform", "ColorJitter?"),
    ({"RandomErasing": {"value": "random"}}, "RandomErasing(value='random') draws noise for normalized images",
     "put ToDtype: {dtype: float32, scale: true} and Normalize before it"),
    ("MixUp", "MixUp cannot be used here", "use train.mixup"),
    ("nowhere.Blur", "the transform 'nowhere.Blur' cannot be imported", "write package.module"),
    ("fractions.Fraction", "fractions.Fraction is not a transform", "or a class whose instances can be called"),
    ({f"{__name__}.Stripes": {"widht": 3}}, "Stripes has no argument widht", "did you mean width?"),
    ({f"{__name__}.darker": {"b": 3}}, "darker has no argument b", "its arguments are: by"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "message", "hint"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_entry(entry, message, hint):
    with pytest.raises(ConfigError) as caught:
        pipelines([entry])
    assert caught.value.where.startswith("task.transforms.train.0")
    assert message in f"{caught.value.where.removeprefix('task.transforms.')}: {caught.value.message}"
    assert hint in caught.value.hint


def test_all_wrong_entries_of_both_lists_in_one_message():
    with pytest.raises(ConfigError) as caught:
        pipelines(["Resise", "RandomHorizontalFlip", {"CenterCrop": {"sze": 3}}], eval_=["Resze"])
    shown = str(caught.value)
    assert shown.startswith(
        "task.transforms: 3 problems\n  task.transforms.train.0: unknown transform 'Resise'\n     -> "
    )
    assert "\n  task.transforms.train.2: CenterCrop has no argument sze\n" in shown
    assert "\n  task.transforms.eval.0: unknown transform 'Resze'\n" in shown


@pytest.mark.parametrize(
    ("entries", "message", "hint"),
    [
        (["ToPILImage"], "train: the last transform returns a PIL.Image.Image, not a tensor", "add PILToTensor"),
        (["Grayscale"], "train: the last transform returns an image with 1 channel instead of 3", "task.color"),
        ([{"ToDtype": "int32"}], "returns a tensor (3, 40, 56) of int32", "return uint8 or float32"),
        ([{"RandomCrop": 50}], "train.0: RandomCrop cannot process an image of 40x56: Required crop size (50, 50)",
         "put a transform before it that changes the image"),
        ([{"RandomResizedCrop": "a"}], "train.0: RandomResizedCrop cannot process an image of 40x56: ", "arguments"),
        ([{"CenterCrop": 9}, {"Normalize": {"mean": [0.5], "std": [0.5]}}],
         "train.1: Normalize cannot process an image of 9x9: ", "before it"),
    ],
)  # fmt: skip
def test_result_that_is_no_image(entries, message, hint):
    with pytest.raises(ConfigError) as caught:
        applied(entries)
    assert message in str(caught.value)
    assert hint in caught.value.hint


# The user's own


class Stripes:
    """A plain class, which draws from every generator there is."""

    def __init__(self, width: int = 1) -> None:
        self.width = width

    def __call__(self, image):
        assert image.dtype == torch.uint8
        changed = image.clone()
        for draw in (int(torch.randint(40, ())), random.randrange(40), np.random.randint(40)):
            changed[:, draw : draw + self.width] = draw
        return changed


def darker(image, by: int = 2):
    return image // by


def broken(image):
    raise KeyError("planted")


def test_own_class_and_function():
    entries = [{f"{__name__}.Stripes": {"width": 2}}, {f"{__name__}.darker": 3}]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random()
    random.seed(1), np.random.seed(1)
    found = applied(entries)
    assert (random.random(), np.random.random()) == expected, "the streams of the program continue"
    assert torch.equal(found, applied(entries)), "draws follow from the seed of the row"
    others = {applied(entries, seed=seed).numpy().tobytes() for seed in range(6)}
    assert len(others) == 6
    assert found.max() <= 250 // 3
    assert torch.equal(applied(["RandomHorizontalFlip"]), applied([{"RandomHorizontalFlip": {"p": 0.5}}]))
    with pytest.raises(KeyError, match="planted"):  # with its traceback
        applied([f"{__name__}.broken"])


def test_random_evaluation_gives_every_image_the_same_draws():
    _, eval_ = pipelines(eval_=[{"RandomCrop": 20}, f"{__name__}.Stripes"])
    torch.manual_seed(1)
    first = eval_(IMAGE)
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(eval_(IMAGE), first)
    assert torch.equal(torch.rand(3), expected)


# The size


@settings(max_examples=60)
@given(st.tuples(*[st.integers(1, 90)] * 4))
def test_images_are_fitted_without_distortion(sizes):
    height, width, *size = sizes
    rows = torch.linspace(0, 200, height).view(1, -1, 1).expand(1, height, width)
    columns = torch.linspace(0, 200, width).view(1, 1, -1).expand(1, height, width)
    found = fitted(torch.cat([rows, columns]).to(torch.uint8), tuple(size))
    assert found.shape == (2, *size)
    scale = max(size[0] / height, size[1] / width)
    if min(size) > 8 and min(size) / scale > 20:  # the slopes along both axes are those of the image, scaled alike
        found = found.float()
        slopes = [
            (found[0, -1, 0] - found[0, 0, 0]) / (size[0] - 1),
            (found[1, 0, -1] - found[1, 0, 0]) / (size[1] - 1),
        ]
        wanted = [200 / (height - 1) / scale, 200 / (width - 1) / scale]
        assert [slope.item() for slope in slopes] == pytest.approx(wanted, rel=0.2)
        middle = found[:, size[0] // 2, size[1] // 2]
        assert (middle - 100).abs().max() < 400 / min(sizes)


def test_fitting_is_resize_and_center_crop():
    for size in (16, 40, 64):
        square = IMAGE[:, :, :40]
        assert torch.equal(fitted(square, (size, size)), v2.Resize([size, size])(square))
        wide = v2.CenterCrop(size)(v2.Resize(size)(IMAGE)).float()
        assert (fitted(IMAGE, (size, size)).float() - wide).abs().mean() < 40  # of pixels that are noise
    assert fitted(IMAGE, (40, 56)) is IMAGE


def test_lists_end_with_the_size():
    for entries in ([], ["RandomHorizontalFlip"], [{"RandomResizedCrop": 20}], [{"Resize": 30}]):
        assert applied(entries, size=(24, 32)).shape == (3, 24, 32)
    exact = applied([{"RandomResizedCrop": [24, 32]}], size=(24, 32))
    assert torch.equal(exact, applied([{"RandomResizedCrop": [24, 32]}]))


# The page


def test_every_list_on_the_page_is_accepted(tmp_path):
    """Each block is a configuration: its data is opened, and a batch of each split goes through the model."""
    page = (ROOT / "docs" / "augmentation.md").read_text()
    csvs = {f"{split}_csv": str(write_photos(tmp_path, split, 6)) for split in ("train", "eval")}
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    assert len(blocks) == 3
    for block in blocks:
        base = {"color": "rgb", "image_size": [40, 40]} if "task" not in block else {"color": "rgb"}
        sections = {**block, "task": {**base, **csvs, **block.get("task", {})}}
        config = make_config(tmp_path, **sections, model={"name": "small_cnn", "args": {"width": 2}})
        task = config.task.open(0, tmp_path / "cache")
        model = task.model(config.model)
        for images, epoch in ((task.train, 0), (task.eval, None)):
            inputs = task.prepare(images.batch(np.arange(6), epoch).inputs)
            mixing.require(config.train, inputs)
            assert model(inputs).shape == (6, 3)
    entries = [yaml.safe_load(text) for text in re.findall(r"`([A-Z]\w+: .*?)`", page, re.S)]
    assert len(entries) == 4
    pipelines(entries)
