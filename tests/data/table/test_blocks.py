"""A cache with flipped bits: what is damaged is never used."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest

from harness.data.table import blocks, writers
from harness.data.table.labels import LabelColumns
from harness.data.table.table import Table, open_table
from harness.errors import DataError

NUM_ROWS = 600
LABELS = {
    "class": LabelColumns("class", ("class",)),
    "tags": LabelColumns("tags", ("tags",), ";"),
    "numbers": LabelColumns("numbers", ("x", "y")),
}


@pytest.fixture
def csv(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "MAX_BATCH_ROWS", 128)  # several blocks of each file
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 512)
    path = tmp_path / "a.csv"
    rows = (f"dir/p{i}.png,{['cat', 'dog', 'eel'][i % 3]},t{i % 5};t{i % 7},{i}.5,{i * i}\n" for i in range(NUM_ROWS))
    path.write_text("path,class,tags,x,y\n" + "".join(rows))
    return path


def content(table: Table) -> list:
    """All that can be read of a table."""
    rows = np.random.default_rng(0).permutation(NUM_ROWS)
    few = [table.strings("path", part) for part in np.split(rows, 4)]
    labels = {"class": table.labels, "tags": table.tags, "numbers": table.numbers}[table._label.kind](rows)
    labels = [part.tolist() for part in labels] if isinstance(labels, tuple) else labels.tolist()
    facts = (table.vocabulary, table.mean, table.std, table.columns, table.num_rows, table.digest)
    return [few, table.strings("path", rows), table.slice("path", 100, 300).to_pylist(), labels, facts]


def flip(path, bit: int) -> None:
    with open(path, "r+b") as file:  # in place, as processes have it mapped
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ (1 << bit % 8)
        file.seek(bit // 8)
        file.write(bytes([byte]))


def cache_files(folder):
    return sorted(path for path in folder.rglob("*.*") if path.suffix in (".arrow", ".codes", ".offsets", ".json"))


def versions(files):
    """A new file may get the inode of the one that it replaces."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("when", ["before opening", "while open"])
def test_a_flipped_bit_is_never_read(csv, tmp_path, kind, when):
    """Either everything reads as it was converted, or the table is refused, and the next opening converts it again."""
    label, intact = LABELS[kind], tmp_path / "intact"
    expected = content(open_table(csv, text=["path"], label=label, cache_dir=intact))
    draw, num_refused, num_converted = random.Random(f"{kind} {when}"), 0, 0
    for number in range(40):
        folder = tmp_path / str(number)
        shutil.copytree(intact, folder)
        table = open_table(csv, text=["path"], label=label, cache_dir=folder) if when == "while open" else None
        files = cache_files(folder)
        path = files[number % len(files)]
        flip(path, bit := draw.randrange(8 * path.stat().st_size))
        before = versions(files)
        found = error = None
        try:
            found = content(table or open_table(csv, text=["path"], label=label, cache_dir=folder))
        except DataError as refusal:
            error = refusal
        if error is not None:
            num_refused += 1
            assert f"damaged: {path.name} is damaged between bytes" in error.message
            assert "run the same command again" in error.hint
            assert cache_files(folder) == []
            found = content(open_table(csv, text=["path"], label=label, cache_dir=folder))
        assert found == expected, f"bit {bit} of {path.name}"
        num_converted += versions(cache_files(folder)) != before
        shutil.rmtree(folder)
    assert num_refused >= 20
    assert num_converted >= (36 if when == "before opening" else num_refused)


def test_a_repair_is_reported_in_a_line(csv, tmp_path, caplog):
    """A damaged manifest is noticed when the table is opened, a block when it is used for the first time."""
    open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.json")
    flip(path, 8 * 300)
    with caplog.at_level("WARNING"):
        table = open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")
    assert len(caplog.records) == 1
    assert "is damaged; converting it again" in caplog.text
    (path,) = (tmp_path / "cache").rglob("*.codes")
    flip(path, 8 * 1500)
    assert len(table.labels(np.arange(256))) == 256
    with pytest.raises(DataError, match="is damaged between bytes"):
        table.labels(np.array([375]))
