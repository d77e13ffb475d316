"""A cache with flipped bits: every table reads as it was converted, because what is damaged is converted again."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import shutil

import numpy as np
import pytest

from harness.data.table import blocks, convert, writers
from harness.data.table.labels import LabelColumns
from harness.data.table.table import Table, open_table
from harness.errors import DataError

NUM_ROWS = 600
LABELS = {
    "class": LabelColumns("class", ("class",)),
    "tags": LabelColumns("tags", ("tags",), ";"),
    "numbers": LabelColumns("numbers", ("x", "y")),
}
FORK = multiprocessing.get_context("fork")


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


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("when", ["before opening", "while open"])
def test_any_flipped_bit_is_harmless(csv, tmp_path, kind, when):
    label, intact = LABELS[kind], tmp_path / "intact"
    expected = content(open_table(csv, text=["path"], label=label, cache_dir=intact))
    draw, num_converted = random.Random(f"{kind} {when}"), 0
    for number in range(40):
        folder = tmp_path / str(number)
        shutil.copytree(intact, folder)
        table = open_table(csv, text=["path"], label=label, cache_dir=folder) if when == "while open" else None
        files = cache_files(folder)
        path = files[number % len(files)]
        flip(path, bit := draw.randrange(8 * path.stat().st_size))
        before = {file.name: file.stat().st_ino for file in files}
        if table is None:
            table = open_table(csv, text=["path"], label=label, cache_dir=folder)
        assert content(table) == expected, f"bit {bit} of {path.name}"
        num_converted += {file.name: file.stat().st_ino for file in cache_files(folder)} != before
        shutil.rmtree(folder)
    assert num_converted >= 20  # while a table is open, nobody reads its manifest


def test_a_damaged_table_is_converted_once_for_all_its_processes(csv, tmp_path, caplog, monkeypatch):
    """Also for a loader process that was forked before, and for one that opens the table by its pickle."""
    table = open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")
    expected, count = table.labels(np.arange(NUM_ROWS)).tolist(), FORK.Value("i", 0)
    others = [pickle.loads(pickle.dumps(table)) for _ in range(3)]
    (path,) = (tmp_path / "cache").rglob("*.codes")
    flip(path, 8 * 1500)
    real = convert._write_rows

    def counted(*arguments):
        with count.get_lock():
            count.value += 1
        return real(*arguments)

    monkeypatch.setattr(convert, "_write_rows", counted)
    results = FORK.Queue()
    children = [
        FORK.Process(target=lambda own=own: results.put(own.labels(np.arange(NUM_ROWS)).tolist())) for own in others
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(20)
    assert found == [expected] * 3
    assert count.value == 1
    again = pickle.loads(pickle.dumps(others[0]))
    assert again.labels(np.arange(NUM_ROWS)).tolist() == expected
    assert count.value == 1


def test_the_repair_is_reported_in_a_line(csv, tmp_path, caplog):
    open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.codes")
    flip(path, 8 * 1500)
    with caplog.at_level("WARNING"):
        table = open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")
        assert not caplog.records  # until the block is used
        table.labels(np.array([375]))
    assert len(caplog.records) == 1
    assert "damaged" in caplog.text


def test_a_table_that_changed_meanwhile_cannot_be_repaired(csv, tmp_path):
    table = open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.codes")
    flip(path, 8 * 1500)
    csv.write_text(csv.read_text().replace("cat", "cow"))
    with pytest.raises(DataError) as caught:
        table.labels(np.arange(NUM_ROWS))
    assert "damaged" in str(caught.value)
    assert open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache").vocabulary[0] == "cow"


def test_a_disk_that_damages_every_conversion_is_given_up(csv, tmp_path, monkeypatch):
    table = open_table(csv, text=["path"], label="class", cache_dir=tmp_path / "cache")

    def damage(*_):
        raise blocks.DamagedError("damaged again")

    monkeypatch.setattr(blocks.CheckedArray, "__getitem__", damage)
    with pytest.raises(DataError):
        table.labels(np.arange(NUM_ROWS))
