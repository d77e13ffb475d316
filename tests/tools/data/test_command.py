"""harness data: tables of folders, and splits of tables."""

from __future__ import annotations

import csv
import gzip
import io
import shlex
import tarfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torchvision.io import write_jpeg

from harness import cli
from harness.data import image_folders
from harness.data.table.table import open_table

PIXELS = torch.arange(3 * 8 * 8, dtype=torch.uint8).view(3, 8, 8)


def data(*words) -> int:
    return cli.main(["data", *map(str, words)])


def rows_of(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return list(csv.DictReader(io.StringIO(text, newline="")))


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_table(path: Path, rows: list[tuple], header: tuple = ("path", "label")) -> Path:
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


# folder


def test_files_in_a_folder_that_only_end_like_images_are_named(tmp_path, capsys):
    """Those in the table, which keeps them."""
    for name in ("cat/1.jpg", "dog/2.png", *(f"dog/text{i}.jpg" for i in range(5))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jpeg(PIXELS, str(tmp_path / name)) if name[4] in "12" else (tmp_path / name).write_bytes(b"<html>")
    (tmp_path / "cat" / "0.jpg").touch()
    named = "cat/0.jpg (empty), " + ", ".join(f"dog/text{i}.jpg (another kind of file)" for i in range(4))
    assert data("folder", tmp_path, tmp_path / "out.csv") == 0
    told = f"warning: 6 rows of no image: {named} and 1 more; remove them and write the table again, or set task.on_bad"
    assert told in capsys.readouterr().out


def test_copies_in_a_folder_are_named(tmp_path, capsys):
    for name, end in (("cat/1.png", b"a"), ("cat/2.png", b"b"), ("cat/3.png", b"a"), ("dog/1.png", b"a")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"\x89PNG\r\n\x1a\n" + end * 100)
    assert data("folder", tmp_path / "in", tmp_path / "out.csv") == 0
    assert len(rows_of(tmp_path / "out.csv")) == 4
    assert "2 rows of copied images: cat/3.png (of cat/1.png), dog/1.png (of cat/1.png)" in capsys.readouterr().out


def test_images_of_a_folder_are_opened_at_once(tmp_path, monkeypatch):
    (tmp_path / "cat").mkdir()
    for number in range(4):
        (tmp_path / "cat" / f"{number}.jpg").touch()
    meeting = threading.Barrier(4)
    monkeypatch.setattr(image_folders, "_glance", lambda *_: (str(meeting.wait(60)), 0))
    assert data("folder", tmp_path, tmp_path / "out.csv") == 0


def test_folder(tmp_path, capsys):
    photos = tmp_path / "my photos"
    for name in (
        "kätzchen/1.JPG", 'kätzchen/a/2, "x"\n.jpeg', "dog/1.jfif", "top.jpg", "dog/.hidden.jpg", "dog/x.txt",
        "dog/1.HEIC", "kätzchen/2.heic", "kätzchen/README",
    ):  # fmt: skip
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        write_jpeg(PIXELS, str(photos / name))
    (photos / "empty").mkdir()
    (photos / "dog" / "gone.jpg").symlink_to("/nowhere")
    (photos / "dog" / "loop").symlink_to("../dog")
    (photos / "wolf").symlink_to("dog")
    for name in ("round.jpg", "dog/round.jpg"):
        (photos / name).symlink_to("round.jpg")
    out = tmp_path / "out.csv"
    assert data("folder", photos, out) == 0
    printed = capsys.readouterr().out
    assert "\nwarning: 3 rows of copied images: kätzchen/1.JPG (of dog/1.jfif), " in printed
    assert printed.startswith(f"wrote 4 rows of 3 classes to {out}; skipped: broken links and special files (5), ")
    assert "images outside a class folder (1)" in printed
    assert ".heic files (3)" in printed
    assert ".txt files (2)" in printed
    assert "files without an extension (1)" in printed
    assert "\nnote: images are files whose names end with .jpg, .jpeg, .jfif, " in printed
    assert "hidden files (2)" in printed
    assert "left out 1 folder without images: empty" in printed
    split = f"harness data split {out} --eval 0.2 --stratify label"
    assert printed.endswith(f"\nnext: {split}; harness init {out} --root '{photos}'; or set 'task.root={photos}'\n")
    expected = [("dog/1.jfif", "dog"), ("kätzchen/1.JPG", "kätzchen"),
                ("kätzchen/a/2, \"x\"\n.jpeg", "kätzchen"), ("wolf/1.jfif", "wolf")]  # fmt: skip
    assert [tuple(row.values()) for row in rows_of(out)] == expected
    table = open_table(out, text=("path",), label="label", cache_dir=tmp_path)
    assert table.strings("path", np.arange(4)) == [path for path, _ in expected]
    first = out.read_bytes()
    assert data("folder", photos, out) == 2  # it exists
    assert data("folder", tmp_path / "fotos", out) == 65
    assert "the folder cannot be read" in capsys.readouterr().err
    assert data("folder", photos, out, "--force") == 0
    assert out.read_bytes() == first
    for other in ("out.csv.gz", "out.parquet"):
        assert data("folder", photos, tmp_path / other) == 0
        assert open_table(tmp_path / other, label="label", cache_dir=tmp_path).digest == table.digest


def test_the_next_commands_of_a_folder_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for row in range(20):
        (photo := Path("my photos") / "ab"[row % 2] / f"{row}.jpg").parent.mkdir(parents=True, exist_ok=True)
        write_jpeg(PIXELS, str(photo))
    assert data("folder", "my photos", "all.csv") == 0
    commands = capsys.readouterr().out.rpartition("next: ")[2].split("; ")[:2]
    assert [cli.main(shlex.split(command)[1:]) for command in commands] == [0, 0]
    assert "root: my photos  # 16 of the first 16 paths exist" in Path("all.yaml").read_text()


def test_the_next_command_of_a_split_names_the_folder_of_the_images(tmp_path, monkeypatch, capsys):
    """Which init could not choose among two with the same paths."""
    monkeypatch.chdir(tmp_path)
    for row in range(20):
        for photos in ("small", "large"):
            (photo := Path(photos) / "ab"[row % 2] / f"{row}.jpg").parent.mkdir(parents=True, exist_ok=True)
            write_jpeg(PIXELS, str(photo))
    assert data("folder", "small", "small.csv") == 0
    assert data("split", "small.csv", "--eval", "20%") == 0
    command = capsys.readouterr().out.rpartition("next: ")[2]
    assert command == "harness init small.csv --root small\n"
    assert cli.main(shlex.split(command)[1:]) == 0


def test_folders_that_make_no_table(tmp_path, capsys):
    for name in ("train/cat", "val/cat", "flat"):
        (tmp_path / name).mkdir(parents=True)
        write_jpeg(PIXELS, str(tmp_path / name / "1.jpg"))
    (tmp_path / "splits").mkdir()
    for name in ("train", "val"):
        (tmp_path / name).rename(tmp_path / "splits" / name)
    (tmp_path / "my flat").mkdir()
    out = tmp_path / "out.csv"
    for words, code, message in (
        (("folder", tmp_path / "splits", out), 2, "its folders are splits, not classes: train, val"),
        (
            ("folder", tmp_path / "flat", out),
            65,
            "no images in class folders; skipped: images outside a class folder (1)",
        ),
        (("folder", tmp_path / "flat", out), 65, f"harness predict RUN --images {tmp_path}/flat\n"),
        (("folder", tmp_path / "my flat", out), 65, "my flat: no images in class folders\n"),
        (
            ("folder", tmp_path / "my flatt", out),
            65,
            f"No such file or directory\n  -> did you mean '{tmp_path}/my flat'?",
        ),
        (
            ("folder", tmp_path / "splits", tmp_path / "out.txt"),
            2,
            "use a name that ends with .csv, .csv.gz or .parquet",
        ),
        (("folder", tmp_path / "splits", tmp_path / "x y" / "out.csv"), 2, f"-> make it: mkdir -p '{tmp_path}/x y'"),
        (("folder", tmp_path / "splits", tmp_path / "splitz" / "out.csv"), 2, f"did you mean {tmp_path}/splits?"),
    ):
        assert data(*words) == code
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert data("folder", tmp_path / "splits" / "train", out) == 0
    assert "note: there is only one class" in capsys.readouterr().out


# split


def test_split_of_rows(tmp_path, capsys):
    """Exact, deterministic, complete, in order, with values that need quotes."""
    table = write_table(tmp_path / "t.csv", [(f'"{i}",\nx', i % 3) for i in range(100)])
    assert data("split", table, "--eval", "0.1") == 0
    assert capsys.readouterr().out.endswith(f"\nnext: harness init {tmp_path}/t.csv\n")
    train, evaluation = rows_of(tmp_path / "t.train.csv"), rows_of(tmp_path / "t.eval.csv")
    assert (len(train), len(evaluation)) == (90, 10)
    numbers = [int(row["path"].split('"')[1]) for row in evaluation]
    assert numbers == sorted(numbers)
    key = lambda row: int(row["path"].split('"')[1])  # noqa: E731
    assert sorted(train + evaluation, key=key) == rows_of(table)
    assert data("split", table, "--eval", "0.1") == 2  # they exist
    other = tmp_path / "other"
    other.mkdir()
    assert data("split", table, "--eval", "0.1", "--out", other) == 0
    assert (other / "t.eval.csv").read_bytes() == (tmp_path / "t.eval.csv").read_bytes()
    assert data("split", table, "--eval", "0.1", "--seed", "1", "--force") == 0
    assert rows_of(tmp_path / "t.eval.csv") != evaluation


def test_split_by_group_and_label(tmp_path, capsys):
    rows = [(f"{i}.png", ["a", "b", " "][0 if i % 5 else (2 if i == 35 else 1)], f"p{i // 7}") for i in range(700)]
    table = write_table(tmp_path / "t.csv", rows, ("path", "label", "patient"))
    assert data("split", table, "--eval", "0.2", "--stratify", "label") == 0
    assert "1 value of label found only in t.train.csv, not in t.eval.csv: (blank)" in capsys.readouterr().out
    assert Counter(row["label"] for row in rows_of(tmp_path / "t.eval.csv")) == {"a": 112, "b": 28}
    assert data("split", table, "--eval", "0.2", "--by", "patient", "--stratify", "label", "--force") == 0
    train, evaluation = rows_of(tmp_path / "t.train.csv"), rows_of(tmp_path / "t.eval.csv")
    assert not {row["patient"] for row in train} & {row["patient"] for row in evaluation}
    assert len(train) + len(evaluation) == 700
    assert 133 <= len(evaluation) <= 147
    assert {row["label"] for row in train} == {"a", "b", " "}
    capsys.readouterr()
    for words, message in (
        (("--eval", "0.2", "--by", "pation"), "'path', 'label', 'patient'\n  -> did you mean --by patient?"),
        (
            ("--eval", "0.2", "--stratify", "kind"),
            "no column 'kind'; the columns are 'path', 'label', 'patient'\n  -> use --stratify NAME",
        ),
        (("--eval", "0.0001", "--force"), "0.0001 of 700 rows is 0: one part would be empty"),
    ):
        assert data("split", table, *words) in (2, 65)  # before it finds that the files exist
        assert message in capsys.readouterr().err
    write_table(tmp_path / "one.csv", [(i, "x") for i in range(9)])
    assert data("split", tmp_path / "one.csv", "--eval", "0.3", "--by", "label") == 2
    assert "column 'label' has 1 value, so" in capsys.readouterr().err
    assert not list(tmp_path.glob("one.*.csv"))


def test_split_of_gzip_and_parquet(tmp_path):
    """A Parquet file keeps its types and its other columns."""
    table = write_table(tmp_path / "t.csv", [(i, i % 2) for i in range(40)])
    (tmp_path / "z.csv.gz").write_bytes(gzip.compress(table.read_bytes()))
    assert data("split", tmp_path / "z.csv.gz", "--eval", "0.25") == 0
    assert data("split", table, "--eval", "0.25") == 0
    assert rows_of(tmp_path / "z.eval.csv.gz") == rows_of(tmp_path / "t.eval.csv")
    columns = {
        "path": [str(i) for i in range(40)],
        "label": list(range(40)),
        "box": [[1.0, float(i)] for i in range(40)],
    }
    pa.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert data("split", tmp_path / "t.parquet", "--eval", "0.25", "--by", "label") == 0
    parts = [pa.parquet.read_table(tmp_path / f"t.{part}.parquet") for part in ("train", "eval")]
    assert parts[0].schema == pa.parquet.read_schema(tmp_path / "t.parquet")
    assert pa.concat_tables(parts).sort_by("label").to_pydict() == columns


@pytest.mark.parametrize("option", ["--by", "--stratify"])
@pytest.mark.parametrize(
    "labels",
    [pa.array(["a", "b"] * 20).dictionary_encode(), pa.array(["a", None] * 20).dictionary_encode()],
    ids=["categories", "categories with nulls"],
)
def test_split_by_a_category_of_pandas(tmp_path, option, labels):
    pa.parquet.write_table(pa.table({"path": [str(i) for i in range(40)], "label": labels}), tmp_path / "t.parquet")
    assert data("split", tmp_path / "t.parquet", "--eval", "0.5", option, "label") == 0
    found = pa.parquet.read_table(tmp_path / "t.eval.parquet")
    assert found.schema.field("label").type == labels.type
    counts = Counter(found["label"].to_pylist())
    assert list(counts.values()) == ([20] if option == "--by" else [10, 10])
