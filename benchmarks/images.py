"""Measures how many images per second one core reads, decodes, augments and stacks into normalized float32 batches.

    python -m benchmarks.images [--rounds 20] [--only TEXT ...]

The JPEGs are made: noise whose amplitude falls with the frequency as in photographs, so that files have a
photograph's size. Each contender has a process of its own with one thread and no loader processes; they take turns as
in benchmarks/turns.py, and the time is that on a core. timm takes part where it is installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks import machine
from benchmarks.turns import AGAIN, Case, Result, Steps, measure

GOAL = 1.5  # times PIL
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIL, FULL, REDUCED = "PIL, transforms v1", "harness", "harness, task.decode=reduced"
UINT8 = "harness, uint8 channels_last"  # as it goes to a GPU, which normalizes it


@dataclass(frozen=True)
class Kind:
    """``count`` JPEGs of height x width, read in batches of ``batch``. ``falloff``: see ``field``; larger for a large
    photo, whose pixels differ less from their neighbors."""

    name: str
    height: int
    width: int
    count: int
    batch: int
    falloff: float


KINDS = (Kind("ImageNet", 375, 500, 64, 32, 1.1), Kind("phone", 3024, 4032, 4, 4, 1.3))
RECIPES = {
    "train": {"RandomResizedCrop": 224, "RandomHorizontalFlip": 0.5},
    "eval": {"Resize": 256, "CenterCrop": 224},
}


def field(rng: np.random.Generator, height: int, width: int, falloff: float) -> np.ndarray:
    """Noise with mean 0 and standard deviation 1 whose amplitude falls with frequency ** ``falloff``: about 1 in
    photographs (https://doi.org/10.1364/JOSAA.4.002379)."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.standard_normal((height, width), dtype=np.float32)) / frequency**falloff
    values = np.fft.irfft2(spectrum, (height, width))
    return (values - values.mean()) / values.std()


def write_images(folder: Path, kind: Kind) -> float:
    """Write the images and ``rows.csv`` of ``kind``; return their mean size in bytes."""
    (folder / "0").mkdir(parents=True)
    rng, size = np.random.default_rng(0), (kind.height, kind.width)
    for number in range(kind.count):
        light, colors = field(rng, *size, kind.falloff), [field(rng, *size, 1.5) for _ in range(2)]
        planes = [120 + 50 * light, 128 + 14 * colors[0], 128 + 14 * colors[1]]
        pixels = np.stack(planes, 2) + rng.normal(0, 2, (*size, 1))  # noise of the sensor
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8), "YCbCr")
        image.save(folder / "0" / f"{number}.jpg", quality=90)
    lines = [f"0/{number}.jpg,{number % 2}" for number in range(kind.count)]
    (folder / "rows.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    return statistics.mean(file.stat().st_size for file in (folder / "0").iterdir())


# Contenders: each makes its steps; a step is a batch


def endless(batches: Iterable[Any]) -> Steps:
    """Take batches of ``batches``, again and again. The seconds are those on a core: files are in memory, and other
    programs share the machine."""

    def again() -> Iterator[Any]:
        while True:
            yield from batches

    source = again()

    def steps(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            next(source)
        return time.process_time() - start

    return steps


def pil(folder: Path, kind: Kind, recipe: str) -> Steps:
    first = [getattr(transforms, name)(argument) for name, argument in RECIPES[recipe].items()]
    steps = transforms.Compose([*first, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return endless(DataLoader(datasets.ImageFolder(folder, steps), kind.batch, shuffle=recipe == "train"))


def v2_steps(recipe: str) -> v2.Compose:
    first = [getattr(v2, name)(argument) for name, argument in RECIPES[recipe].items()]
    return v2.Compose([*first, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def torchvision_v2(folder: Path, kind: Kind, recipe: str) -> Steps:
    images = datasets.ImageFolder(folder, v2_steps(recipe), loader=partial(decode_image, mode=ImageReadMode.RGB))
    return endless(DataLoader(images, kind.batch, shuffle=recipe == "train"))


def timm(folder: Path, kind: Kind, recipe: str) -> Steps:
    """Its loader as its train.py makes it: uint8 batches that the PrefetchLoader normalizes."""
    from timm.data import ImageDataset, create_loader

    return endless(
        create_loader(
            ImageDataset(str(folder)), 224, kind.batch, is_training=recipe == "train", color_jitter=0.0, num_workers=0,
            interpolation="bilinear", mean=MEAN, std=STD, device=torch.device("cpu"), crop_pct=0.875, pin_memory=False,
            persistent_workers=False,
        )
    )  # fmt: skip


def harness(folder: Path, kind: Kind, recipe: str, decode: str = "full", normalize: bool = True) -> Steps:
    from harness.config import loader

    entries = [{name: argument} for name, argument in RECIPES[recipe].items()]
    steps = [f"task.transforms={{{recipe}: {entries}}}", f"task.decode={decode}"]
    csv = [f"task.{split}_csv={folder}/rows.csv" for split in ("train", "eval")]
    config = loader.load(
        "configs/digits.yaml",
        ["task.name=image_csv", *csv, f"task.root={folder}", *steps, "task.color=rgb", f"task.mean={list(MEAN)}",
         f"task.std={list(STD)}"],
    )  # fmt: skip
    task: Any = config.task.open(0, folder.parent / "cache")
    images = replace(task.train if recipe == "train" else task.eval, channels_last=not normalize)

    def batches() -> Iterator[Any]:
        for epoch in range(2**31):
            order = np.random.default_rng(epoch).permutation(kind.count)
            for rows in np.split(order, kind.count // kind.batch):
                batch = images.batch(rows, epoch if recipe == "train" else None)
                yield task.prepare(batch.inputs) if normalize else batch

    return endless(batches())


def case(folder: Path, kind: Kind, recipe: str) -> Case:
    makers: dict[str, Callable[..., Steps]] = {PIL: pil, "torchvision v2": torchvision_v2}
    makers |= {"timm": timm} if find_spec("timm") else {}
    makers |= {FULL: harness, REDUCED: partial(harness, decode="reduced"), UINT8: partial(harness, normalize=False)}
    contenders = {name: partial(make, folder / kind.name, kind, recipe) for name, make in makers.items()}
    return Case(f"{kind.name}, {recipe}", contenders, {}, kind.count // kind.batch)


# The page


def rate(result: Result, kind: Kind, name: str) -> float:
    """Images per second."""
    return kind.batch * 1e6 / statistics.median(result.times[name])


def rows(result: Result, kind: Kind) -> Iterator[list[str]]:
    for name in result.times:
        low, median, high = statistics.quantiles([1 / ratio for ratio in result.ratios(name)], n=4)
        goal = f"at least {GOAL:g}" if name in (FULL, REDUCED) else ""
        label = f"{PIL}, {AGAIN}" if name == AGAIN else name
        yield [f"{result.case.name}: {label}", f"{rate(result, kind, name):.0f}", f"{median:.2f}",
               f"{low:.2f} to {high:.2f}", goal, ("yes" if median >= GOAL else "no") if goal else ""]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names contain one of these texts")
    options = parser.parse_args()
    load, sizes, table = os.getloadavg()[0], [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            cases = {recipe: case(Path(folder), kind, recipe) for recipe in RECIPES}
            cases = {recipe: one for recipe, one in cases.items() if any(text in one.name for text in options.only)}
            if cases:
                num_bytes = write_images(Path(folder) / kind.name, kind)
                sizes.append(f"{kind.name}: {kind.width}x{kind.height}, {num_bytes / 1000:,.0f} kB each")
            for one in cases.values():
                result = measure(one, options.rounds, starts=1)
                table += rows(result, kind)
                print(table[-len(result.times) :], flush=True)
    text = f"{'; '.join(sizes)}. {options.rounds} rounds; ratio: speed relative to PIL's in the same round, median and "
    text += f"quartiles. Times are processor times. Load average at the start: {load:.1f}."
    text += "" if find_spec("timm") else " timm was not installed."
    header = ["images", "images/s/core", "ratio", "quartiles", "goal", "reached"]
    text = f"{text}\n\n{machine.table(header, table)}"
    if options.only == [""]:
        machine.write("images", "Images per second per core", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
