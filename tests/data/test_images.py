"""Images in common formats decode alike; unreadable ones are named or replaced; augmentation is reproducible."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from harness.config.places import IMAGE_STARTS
from harness.data import transforms
from harness.data.batch import Batch
from harness.data.image_checks import ImageChecks, in_order
from harness.data.image_files import ImageFiles
from harness.data.images import ImageTable
from harness.data.row_labels import ClassLabels
from harness.data.table.table import open_table
from harness.errors import REINSTALL_TORCH, ConfigError, DataError, HarnessError
from harness.training.model import model_builder, weights
from tests.conftest import ROOT
from tests.fixtures import write_rows

Image, ImageOps = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
GRAY, RGB = 1, 3
PIXELS = np.add.outer(np.arange(16), np.arange(12)).astype(np.uint8) * 9  # (height, width)


def table(folder: Path, channels=GRAY, on_bad_row="stop", augment=None, name="train", seed=0) -> ImageTable:
    opened = open_table(folder / f"{name}.csv", text=("path",), label="label", cache_dir=folder / "cache")
    return ImageTable(
        table=opened, files=ImageFiles(str(folder)), path_column="path",
        labels=ClassLabels(opened, np.arange(len(opened.vocabulary)) * 10, 10 * len(opened.vocabulary)), seed=seed,
        channels=channels,
        for_training=augment or v2.Identity(), for_evaluation=v2.Identity(), on_bad_row=on_bad_row,
    )  # fmt: skip


def single(folder: Path, name: str, content: bytes, channels) -> torch.Tensor:
    """The image of a table with one row."""
    (folder / name).write_bytes(content)
    (folder / "one.csv").write_text(f"path,label\n{name},0\n")
    return table(folder, channels, name="one").batch(np.arange(1), None).inputs[0]


def encoded(image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


GRAY_IMAGE, COLOR = Image.fromarray(PIXELS), Image.fromarray(np.stack([PIXELS, PIXELS // 2, 255 - PIXELS], 2))
KINDS = {
    "gray png": encoded(GRAY_IMAGE, "PNG"),
    "rgb png": encoded(COLOR, "PNG"),
    "palette png": encoded(COLOR.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"),
    "black and white png": encoded(GRAY_IMAGE.convert("1"), "PNG"),
    "gray png with alpha": encoded(GRAY_IMAGE.convert("LA"), "PNG"),
    "rgb png with alpha": encoded(COLOR.convert("RGBA"), "PNG"),
    "16-bit png": encoded(Image.fromarray(PIXELS.astype(np.uint16) * 257), "PNG"),
    "jpeg": encoded(COLOR, "JPEG"),
    "gray jpeg": encoded(GRAY_IMAGE, "JPEG"),
    "cmyk jpeg": encoded(COLOR.convert("CMYK"), "JPEG"),
    "gif": encoded(COLOR, "GIF"),
    "tiff": encoded(COLOR, "TIFF"),
    "16-bit tiff": encoded(Image.fromarray(PIXELS.astype(np.uint16) * 257), "TIFF"),
    "tiff with alpha": encoded(COLOR.convert("RGBA"), "TIFF"),
    "bmp": encoded(COLOR, "BMP"),
    "gray bmp": encoded(GRAY_IMAGE, "BMP"),
    "webp": encoded(COLOR, "WEBP"),
    "webp with alpha": encoded(Image.merge("RGBA", [*COLOR.split(), GRAY_IMAGE]), "WEBP"),
}


@pytest.mark.filterwarnings("ignore:Webp does not support grayscale")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [GRAY, RGB])
def test_formats_decode_to_the_requested_channels(tmp_path, kind, channels):
    image = single(tmp_path, "x.png", KINDS[kind], channels)  # the content decides, not the name
    assert image.dtype is torch.uint8
    assert image.shape == (channels, 16, 12)


def test_pixel_values(tmp_path):
    expected = torch.from_numpy(PIXELS)
    assert torch.equal(single(tmp_path, "a.png", KINDS["gray png"], GRAY)[0], expected)
    assert torch.equal(single(tmp_path, "b.png", KINDS["16-bit png"], GRAY)[0], expected)  # 16 bits scaled to 8
    assert torch.equal(single(tmp_path, "d.tif", KINDS["16-bit tiff"], GRAY)[0], expected)
    for kind in ("rgb png", "tiff", "tiff with alpha", "bmp"):
        color = single(tmp_path, f"{kind}.png", KINDS[kind], RGB)
        assert torch.equal(color, torch.from_numpy(np.asarray(COLOR).copy()).permute(2, 0, 1))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_as_their_exif_says(tmp_path, orientation, kind):
    exif = Image.Exif()
    exif[274] = orientation
    content = encoded(COLOR, kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    expected = torch.from_numpy(np.asarray(upright).copy()).permute(2, 0, 1)
    assert torch.equal(single(tmp_path, "a.png", content, RGB), expected)


LARGE = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)), "PNG")
CHECKSUM = "the PNG is damaged: a checksum is wrong"
BROKEN = {  # the content, and what is said of it
    "empty": (b"", "the file is empty"),
    "text": (
        b"<html>404 not found</html>",
        f"the file is none of {', '.join(IMAGE_STARTS)}: it begins with b'<html>404 no'",
    ),
    "half a png": (KINDS["rgb png"][: len(KINDS["rgb png"]) // 2], CHECKSUM),
    "half a jpeg": (KINDS["jpeg"][: len(KINDS["jpeg"]) // 2], "the JPEG is damaged or incomplete (torchvision: "),
    "half a webp": (KINDS["webp"][: len(KINDS["webp"]) // 2], "the WebP is damaged or incomplete (torchvision: "),
    "a corrupt png": (
        KINDS["gray png"].replace(b"IDAT", b"IDAX"),
        "the PNG is damaged or incomplete (torchvision: ",
    ),
    "a flipped byte in a png": (LARGE[:150_000] + bytes([LARGE[150_000] ^ 8]) + LARGE[150_001:], CHECKSUM),
    "a wrong name of a chunk of pixels": (
        LARGE[: LARGE.rindex(b"IDAT")] + b"IDAX" + LARGE[LARGE.rindex(b"IDAT") + 4 :],
        CHECKSUM,
    ),
    "zeros from a place in a png on": (LARGE[:90_000] + bytes(len(LARGE) - 90_000), CHECKSUM),
    "zeros from a chunk of pixels on": (LARGE[: LARGE.rindex(b"IDAT") - 4] + bytes(1000), CHECKSUM),
    "half a tiff": (KINDS["tiff"][: len(KINDS["tiff"]) // 2], "the TIFF is damaged or incomplete (Pillow: "),
    "a tiff with a wrong count of fields": (
        KINDS["tiff"][:8] + b"\7" + KINDS["tiff"][9:],
        "the TIFF is damaged or incomplete (Pillow: Missing dimensions)",
    ),
    "a tiff and no more": (b"II*\0end", "the TIFF is damaged or incomplete (Pillow: cannot identify image file)"),
    "a tiff of floats": (encoded(Image.fromarray(PIXELS.astype(np.float32)), "TIFF"), "a TIFF of 32 bits per value: "),
    "a tiff of two pages": (
        encoded(COLOR, "TIFF", save_all=True, append_images=[COLOR]),
        "a TIFF of 2 pages, not one image",
    ),
    "an animation": (
        encoded(COLOR, "GIF", save_all=True, append_images=[Image.new("RGB", COLOR.size)]),
        "an animation of 2 frames, not one image",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_image_is_reported_with_line_and_file(tmp_path, kind):
    csv, (content, said) = write_rows(tmp_path, "train", 5), BROKEN[kind]
    (tmp_path / "train_images" / "3.png").write_bytes(content)
    with pytest.raises(DataError) as caught:
        table(tmp_path).batch(np.arange(5), epoch=0)
    text = str(caught.value)
    assert text.startswith(f"{csv}:5: image cannot be decoded: {tmp_path}/train_images/3.png: {said}")
    assert "task.on_bad_row=skip" in text
    assert ".cpp" not in text
    assert caught.value.exit_code == 65


def test_row_is_named_with_its_place_and_path(tmp_path, monkeypatch):
    """Its line, or the number of the row if it would take long to find that."""
    csv = tmp_path / "train.csv"
    csv.write_text('path,label\n"a\na.png",0\nb.png,1\nc.png,0\n')
    opened = table(tmp_path)
    assert [opened.row_name(row) for row in (1, 2)] == [f"{csv}:4: b.png", f"{csv}:5: c.png"]
    monkeypatch.setattr("harness.data.table.table._FEW_ROWS", 2)
    assert opened.row_name(1) == f"{csv}, row 1 (from 0): b.png"
    assert opened.row_key(1) == "row 1 (from 0): b.png"
    assert opened.table.where(1) == f"{csv}:4"
    (folded := table(tmp_path).table).find_lines([2, 0])
    monkeypatch.setattr("harness.data.table.csv_reader.lines_of", None)  # the file is not read again
    assert [folded.where(row) for row in (0, 2)] == [f"{csv}:2", f"{csv}:5"]
    assert opened.row_name(1, quickly=False) == f"{csv}:4: b.png"


def test_missing_image_suggests_a_similar_name(tmp_path):
    csv = write_rows(tmp_path, "train", 12)
    (tmp_path / "train_images" / "11.png").rename(tmp_path / "train_images" / "11.PNG")
    with pytest.raises(DataError) as caught:
        table(tmp_path).batch(np.asarray([11]), epoch=None)
    assert f"{csv}:13: image not found: {tmp_path}/train_images/11.png" in str(caught.value)
    assert f"did you mean {tmp_path}/train_images/11.PNG?" in str(caught.value)


def test_all_missing_images_are_found_before_training(tmp_path):
    csv = write_rows(tmp_path, "train", 12)
    text = csv.read_text().replace("train_images/3.png", "train_images/3.jpg").replace("train_images/9.png", " ")
    csv.write_text(text.replace("train_images/10.png", "gone/10.png"))
    with pytest.raises(DataError) as caught:
        ImageChecks(table(tmp_path)).require_files(np.arange(12), 5)
    first, hint = str(caught.value).splitlines()
    place = f"{csv}:5: image not found: {tmp_path}/train_images/3.jpg"
    assert first == f"{place} (missing: 3 of 12 rows looked at); also {csv}:11: no path, {csv}:12: gone/10.png"
    assert "3.png" in hint
    assert hint.endswith("; or set task.on_bad_row=skip to count and replace such rows")
    ImageChecks(table(tmp_path)).require_files(np.arange(4, 9), 5)
    ImageChecks(table(tmp_path, on_bad_row="skip")).require_files(np.arange(12), 5)
    ImageChecks(table(tmp_path)).require_files(np.arange(0), 5)


def test_one_missing_image_does_not_suggest_another_root(tmp_path):
    csv = write_rows(tmp_path, "train", 12)
    image = (tmp_path / "train_images" / "0.png").rename(tmp_path / "elsewhere")
    for look in (
        lambda: ImageChecks(table(tmp_path)).require_files(np.arange(12), 5),
        lambda: table(tmp_path).batch(np.arange(1), 0),
    ):
        with pytest.raises(DataError, match=f"^{csv}:2: image not found: .*0.png") as caught:
            look()
        assert caught.value.hint.startswith("restore it, or remove the row; or set task.on_bad_row=skip")
    for number in range(1, 12):
        (tmp_path / "train_images" / f"{number}.png").unlink()
    image.rename(tmp_path / "train_images" / "11.png")
    with pytest.raises(DataError, match=f"relative to {tmp_path}: set task.root=FOLDER$") as caught:
        ImageChecks(table(tmp_path)).require_files(np.arange(12), 5)
    assert caught.value.message == f"image not found: {tmp_path}/train_images/0.png (missing: 11 of 12 rows looked at)"


def test_a_folder_with_a_similar_name_is_not_suggested_for_an_image(tmp_path):
    csv = write_rows(tmp_path, "train", 12)
    csv.write_text(csv.read_text().replace("train_images/", "train_images_"))
    with pytest.raises(DataError, match="image not found") as caught:
        ImageChecks(table(tmp_path)).require_files(np.arange(12), 5)
    assert caught.value.hint == f"paths in the CSV are relative to {tmp_path}: set task.root=FOLDER"
    csv.write_text(csv.read_text().replace("train_images_", "train_images\\"))
    with pytest.raises(DataError, match="image not found") as caught:
        ImageChecks(table(tmp_path)).require_files(np.arange(12), 5)
    assert caught.value.hint == "write train_images/0.png, with / for \\, as in all paths of the table"


def test_damaged_images_are_named(tmp_path):
    csv, damaged = write_rows(tmp_path, "train", 40), (0, 3, 4, 17, 18, 30, 31)
    for row in damaged:
        (tmp_path / "train_images" / f"{row}.png").write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        ImageChecks(table(tmp_path)).sample(in_order(np.arange(40), 16), None, 30)
    first, hint = str(caught.value).splitlines()
    assert first.startswith(f"{csv}:2: image cannot be decoded: {tmp_path}/train_images/0.png: ")
    named = ", ".join(f"{csv}:{row + 2}: train_images/{row}.png" for row in damaged[1:5])
    assert first.endswith(f"; also {named} and 2 more")
    assert hint == "  -> replace the file, or set task.on_bad_row=skip to count and replace such rows"


def test_a_bad_image_to_predict_may_be_skipped(tmp_path):
    write_rows(tmp_path, "train", 12)
    (tmp_path / "train_images" / "3.png").write_bytes(b"no image")
    (tmp_path / "train_images" / "4.png").unlink()
    for row in (3, 4):
        with pytest.raises(DataError) as caught:
            replace(table(tmp_path), is_new=True).batch(np.array([row]), None)
        assert caught.value.hint.endswith("or set task.on_bad_row=skip to leave such rows without a prediction")


def test_missing_folder_suggests_task_root(tmp_path):
    (tmp_path / "train.csv").write_text("path,label\nnowhere/x.png,1\n")
    with pytest.raises(
        DataError, match=f"paths in the CSV are relative to {tmp_path}: set task.root=FOLDER; harness check"
    ):
        table(tmp_path).batch(np.arange(1), None)
    (tmp_path / "my rows").mkdir()
    write_rows(tmp_path / "my rows", "train", 2)
    (tmp_path / "my rows" / "train.csv").rename(tmp_path / "my rows" / "new.csv")
    elsewhere = replace(
        table(tmp_path), table=open_table(tmp_path / "my rows" / "new.csv", cache_dir=tmp_path / "cache")
    )
    with pytest.raises(DataError, match=f"relative to {tmp_path}: set 'task.root={tmp_path}/my rows'$"):
        replace(elsewhere, is_new=True).batch(np.arange(1), None)
    with pytest.raises(DataError, match=f"relative to {tmp_path}: set 'task.root={tmp_path}/my rows'; harness check"):
        elsewhere.batch(np.arange(1), None)


@pytest.mark.parametrize("missing", ["train_images/12.png", "train_images/train60.png"])
def test_missing_image_suggests_no_other_number(tmp_path, missing):
    write_rows(tmp_path, "train", 12)
    (tmp_path / "train.csv").write_text(f"path,label\n{missing},1\n")
    with pytest.raises(DataError, match="image not found: .*\n  -> paths in the CSV are relative to "):
        table(tmp_path).batch(np.arange(1), None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "image cannot be read: {folder}/.: it is a folder, not a regular file"),
        ('""', "this row has no path in column 'path'\n  -> fill it in or remove the row"),
        ("pipe.png", "image cannot be read: {folder}/pipe.png: it is a named pipe, not a regular file"),
        (
            "link.png",
            "image cannot be read: {folder}/link.png: it is a link to {folder}/gone.png, which does not exist",
        ),
        (
            "a/b.png",
            "image not found: {folder}/a/b.png\n  -> paths in the CSV are relative to {folder}",
        ),
        (f"{'x' * 300}.png", "File name too long"),
        ("/dev/zero", "image cannot be read: /dev/zero: it is a device or a socket, not a regular file"),
    ],
)
def test_paths_that_are_no_image_files(tmp_path, path, message):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "train.csv").write_text(f"path,label\n{path},1\n")
    with pytest.raises(DataError) as caught:
        table(tmp_path).batch(np.arange(1), None)
    assert message.format(folder=tmp_path) in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/train.csv:2: ")
    assert ("task.on_bad_row=skip" in caught.value.hint) == ("not found" not in message)  # there, the root is wrong


def test_different_sizes_suggest_image_size(tmp_path):
    csv = write_rows(tmp_path, "train", 4)
    GRAY_IMAGE.save(tmp_path / "train_images" / "2.png")
    for on_bad_row in ("stop", "skip"):  # the images are readable: a setting is missing
        with pytest.raises(DataError) as caught:
            table(tmp_path, on_bad_row=on_bad_row).batch(np.arange(4), epoch=0)
        assert str(caught.value).startswith(f"{csv}:4: images differ in size: (8, 8) and (16, 12) (height, width)")
        assert "task.image_size=[height,width]" in str(caught.value)


def test_different_sizes_are_found_behind_a_skipped_image(tmp_path):
    csv = write_rows(tmp_path, "train", 4)
    (tmp_path / "train_images" / "0.png").write_bytes(b"no image")
    GRAY_IMAGE.save(tmp_path / "train_images" / "2.png")
    for on_bad_row, message in (("skip", f"{csv}:4: images differ in size"), ("stop", f"{csv}:2: image cannot be dec")):
        with pytest.raises(DataError, match=f"^{message}"):
            ImageChecks(table(tmp_path, on_bad_row=on_bad_row)).sample(np.arange(4), None, 30)


def test_problems_look_for_files_within_the_limit(tmp_path, monkeypatch):
    """Files that are missing are reported once, and beside damaged ones."""
    csv, looked = write_rows(tmp_path, "train", 1000), []
    for row in range(3, 40):
        (tmp_path / "train_images" / f"{row}.png").unlink()
    (tmp_path / "train_images" / "0.png").write_bytes(b"no image")
    missing, damaged = ImageChecks(table(tmp_path)).problems(30)
    assert missing.message.startswith(f"image not found: {tmp_path}/train_images/3.png (missing: 37 of 1,000 rows")
    assert damaged.message.endswith("(unreadable: 1 of 963 images looked at)")
    assert damaged.where == f"{csv}:2"

    real = ImageFiles.exists
    monkeypatch.setattr(ImageFiles, "exists", lambda self, path: looked.append(path) or real(self, path))
    list(ImageChecks(table(tmp_path)).problems(0))
    assert len(looked) < 600, "those looked for at once, and those of the hint"


def test_transforms_that_return_different_types(tmp_path):
    """Stacked, bytes would become floats from 0 to 255 beside normalized ones."""
    write_rows(tmp_path, "train", 4)
    with pytest.raises(ConfigError) as caught:
        table(tmp_path, augment=lambda image: image.float() if image[0, 0, 0] > 1 else image).batch(np.arange(4), 0)
    message = f"task.transforms: the transforms return torch.float32 for {tmp_path}/train.csv:4, but torch.uint8 for"
    assert message in str(caught.value)


# Batches


def test_batch_has_the_requested_rows_in_order(tmp_path):
    write_rows(tmp_path, "train", 7)
    batch = table(tmp_path).batch(np.asarray([5, 0, 6]), epoch=2)
    assert isinstance(batch, Batch)
    assert len(batch) == 3
    assert batch.rows.tolist() == batch.inputs[:, 0, 0, 0].tolist() == [5, 0, 6]
    assert batch.targets.tolist() == [20, 0, 0]  # through ``targets``
    assert batch.bad == []
    assert batch.inputs.shape == (3, 1, 8, 8)


def test_skip_replaces_by_the_next_readable_row_in_training(tmp_path):
    write_rows(tmp_path, "train", 6)
    for bad in (2, 3, 5):
        (tmp_path / "train_images" / f"{bad}.png").unlink()
    batch = table(tmp_path, on_bad_row="skip").batch(np.asarray([1, 2, 5]), epoch=0)
    assert batch.rows.tolist() == [1, 4, 0]  # row 5 continues at row 0
    assert batch.inputs[:, 0, 0, 0].tolist() == [1, 4, 0]
    assert batch.targets.tolist() == [10, 10, 0]
    assert batch.bad == [2, 5]


def test_skip_omits_the_row_in_evaluation(tmp_path):
    write_rows(tmp_path, "train", 4)
    (tmp_path / "train_images" / "2.png").write_bytes(b"")
    batch = table(tmp_path, on_bad_row="skip").batch(np.arange(4), epoch=None)
    assert batch.rows.tolist() == [0, 1, 3]
    assert batch.bad == [2]
    batch = table(tmp_path, on_bad_row="skip").batch(np.asarray([2]), epoch=None)
    assert len(batch) == 0
    assert (batch.bad, batch.targets.dtype, batch.rows.tolist()) == ([2], torch.int64, [])


def test_skip_fails_if_no_row_is_readable(tmp_path):
    csv = write_rows(tmp_path, "train", 3)
    for row in range(3):
        (tmp_path / "train_images" / f"{row}.png").unlink()
    with pytest.raises(DataError) as caught:
        table(tmp_path, on_bad_row="skip").batch(np.asarray([1]), epoch=0)
    assert str(caught.value).startswith(f"{csv}:3: ")
    assert "task.root" in str(caught.value)


# Augmentation


class Noise(v2.Transform):
    def forward(self, image):
        return torch.randint(0, 256, image.shape, dtype=torch.uint8)


def test_augmentation_depends_on_seed_epoch_and_row_only(tmp_path):
    write_rows(tmp_path, "train", 6)
    images = table(tmp_path, augment=Noise())
    whole = images.batch(np.arange(6), epoch=1).inputs
    torch.rand(5)
    assert torch.equal(images.batch(np.asarray([4, 2]), epoch=1).inputs, whole[[4, 2]])
    assert not torch.equal(images.batch(np.arange(6), epoch=2).inputs, whole)
    assert not torch.equal(table(tmp_path, augment=Noise(), seed=1).batch(np.arange(6), epoch=1).inputs, whole)
    assert len({image.numpy().tobytes() for image in whole}) == 6
    plain = images.batch(np.arange(6), epoch=None).inputs
    assert plain[:, 0, 0, 0].tolist() == list(range(6))  # evaluation is not augmented


def test_augmentation_does_not_advance_the_training_streams(tmp_path, monkeypatch):
    write_rows(tmp_path, "train", 3)
    images = table(tmp_path, augment=Noise())
    touched = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched.append)
    torch.manual_seed(7)
    touched.clear()
    expected = torch.rand(3)
    torch.manual_seed(7)
    touched.clear()
    images.batch(np.arange(3), epoch=0)
    assert torch.equal(torch.rand(3), expected)
    assert not touched, "augmentation must not seed the GPU, whose stream belongs to dropout"


def test_skipped_rows_do_not_read_the_csv(tmp_path, monkeypatch):
    write_rows(tmp_path, "train", 4)
    (tmp_path / "train_images" / "2.png").unlink()
    images = table(tmp_path, on_bad_row="skip")
    monkeypatch.setattr(
        type(images.table), "where", lambda *_: pytest.fail("finding a line takes seconds in a large CSV")
    )
    assert images.batch(np.arange(4), epoch=0).bad == [2]
    assert images.batch(np.arange(4), epoch=None).bad == [2]


def test_only_images_need_a_torchvision_that_can_be_imported(tmp_path):
    fault = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({fault!r})")
    program = """
import harness.inference.trained_model, harness.training.loop
from harness.errors import HarnessError
for module in ("harness.data.vision", "harness.tasks.image_csv.task"):
    try:
        __import__(module)
    except HarnessError as error:
        print(error)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250
    )
    told = f"torchvision cannot be imported: {fault}\n  -> {REINSTALL_TORCH}\n"
    assert (done.stdout, done.stderr) == (told * 2, "")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("models", lambda: model_builder.find("resnet19")),
        ("models", lambda: weights._published("DEFAULT", "resnet19")),
        ("transforms.v2", transforms.v2_classes.__wrapped__),
        ("transforms.v2.functional", transforms._functional),
    ],
)
def test_each_part_of_torchvision_may_fail(module, use, monkeypatch):
    monkeypatch.setitem(sys.modules, f"torchvision.{module}", None)
    with pytest.raises(HarnessError, match="torchvision cannot be imported: .*\n  -> .*--force-reinstall torch"):
        use()
