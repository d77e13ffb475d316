"""The content of a table of a valid file: rows, text, labels and digest."""

from __future__ import annotations

import csv
import gzip
import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.table import csv_reader, writers
from harness.data.table.labels import LabelColumns
from harness.data.table.table import open_table
from harness.errors import DataError

CSV = b'path,label,caption\na.png,7,"a cat, ""big""\nand red"\nb.png,10,NA\nc.png,7,\n'


@pytest.fixture
def opened(tmp_path):
    def open_bytes(content: bytes, name: str = "a.csv", **options):
        (tmp_path / name).write_bytes(content)
        return open_table(tmp_path / name, cache_dir=tmp_path / "cache", **options)

    return open_bytes


def text_of(table) -> dict[str, list[str]]:
    return {column: table.strings(column, np.arange(len(table))) for column in table.columns}


def lines_of(table) -> list[int]:
    """The line of the CSV on which each row starts."""
    return [int(table.where(row).rpartition(":")[2]) for row in range(len(table))]


@pytest.mark.parametrize(("separator", "named"), [(b";", "semicolons"), (b"\t", "tabs"), (b"|", "vertical bars")])
def test_other_separators(opened, caplog, separator, named):
    """The header tells; a comma in a row is text then, and a header in quotes is one column."""
    table = opened(
        b"path,label\na.jpg,cat\n\nb.jpg,dog\n".replace(b",", separator) + b'"c, 1.jpg"' + separator + b"1,5\n"
    )
    assert text_of(table) == {"path": ["a.jpg", "b.jpg", "c, 1.jpg"], "label": ["cat", "dog", "1,5"]}
    assert lines_of(table) == [2, 4, 5]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"{table.name}: read with {named} between the columns, as in its header"
    ]
    assert lines_of(opened(b"a,b,c\n1,2,3\n,,\n \t\n4,5,6\n".replace(b",", separator), "white.csv")) == [2, 3, 5]
    assert opened(b'"path' + separator + b'label"\na\n').columns == (f"path{separator.decode()}label",)


def test_rows_columns_and_labels(opened):
    table = opened(CSV, text=["path"], label="label")
    assert len(table) == table.num_rows == 3
    assert table.columns == ("path", "label", "caption")
    assert table.vocabulary == (7, 10)
    codes = table.labels(np.array([2, 1, 1, 0]))
    assert (codes.tolist(), codes.dtype) == ([0, 1, 1, 0], np.int64)
    assert table.strings("caption", np.array([1, 0, 2, 1])) == ["NA", 'a cat, "big"\nand red', "", "NA"]
    assert table.slice("caption", 1, 99).to_pylist() == ["NA", ""]
    assert table.strings("label", np.array([1, 0])) == ["10", "7"]
    assert lines_of(table) == [2, 4, 5]
    assert table.notes == ()


def test_no_rows(opened):
    table = opened(CSV, label="label")
    nothing = np.array([], dtype=np.int64)
    assert table.labels(nothing).tolist() == table.strings("path", nothing) == []
    assert len(table.slice("path", 2, 1)) == 0


@pytest.mark.parametrize("rows", [[-1], [3], [0, 5]])
def test_rows_outside_the_table(opened, rows):
    table = opened(CSV, label="label")
    for read in (table.labels, lambda r: table.strings("path", r)):
        with pytest.raises(IndexError, match="table of 3 rows"):
            read(np.array(rows))


@pytest.mark.parametrize(
    "content",
    [
        CSV.replace(b"\n", b"\r\n").replace(b"\r\nand", b"\nand"),
        CSV.rstrip(b"\n")[:-1] + b',"' + b'"',
        b"\xef\xbb\xbf" + CSV,
        gzip.compress(CSV, mtime=0),
        gzip.compress(CSV[:20], mtime=0) + gzip.compress(CSV[20:], mtime=0),
        b"\n\n" + CSV.replace(b"\nb.png", b"\n\r\n   \nb.png") + b"\n\n",
        b'"path","label",caption\n' + CSV.partition(b"\n")[2],
    ],
    ids=["crlf", "no final newline", "bom", "gzip named csv", "gzip of two members", "blank lines", "quoted header"],
)
def test_equal_content_has_equal_digest(opened, content):
    plain, other = opened(CSV, label="label"), opened(content, "b.csv", label="label")
    assert text_of(other) == text_of(plain)
    assert other.digest == plain.digest


@pytest.mark.parametrize(
    "content",
    [
        CSV.replace(b"c.png", b"d.png"),
        CSV.replace(b"c.png,7", b"c.png,8"),
        CSV.replace(b"b.png,10", b"b.png,7").replace(b"a.png,7", b"a.png,10"),
        CSV.replace(b"caption", b"text"),
        CSV + b"d.png,7,\n",
        CSV.replace(b"a.png", b"a.pn").replace(b"b.png", b"gb.png"),  # the same bytes, split elsewhere
    ],
)
def test_other_content_has_another_digest(opened, content):
    assert opened(content, "b.csv", label="label").digest != opened(CSV, label="label").digest


def test_digest_depends_on_the_label_column_but_not_on_the_name(opened):
    assert opened(CSV, label="label").digest != opened(CSV).digest
    assert opened(CSV).digest == opened(CSV, "b.csv").digest


@pytest.mark.parametrize(
    ("labels", "vocabulary"),
    [
        (["10", "9", "-1", "0"], (-1, 0, 9, 10)),
        (["007", "7", "10"], ("007", "10", "7")),
        (["1", "-0"], ("-0", "1")),
        (["+7", "1"], ("+7", "1")),
        (["7.0", "1.0"], ("1.0", "7.0")),
        (["NA", "None", "null", "b"], ("NA", "None", "b", "null")),
        (["1" * 30, "2"], ("1" * 30, "2")),
        (["dog", "Cat", "ärger", "cat"], ("Cat", "cat", "dog", "ärger")),
        (["٣", "1"], ("1", "٣")),
    ],
)
def test_vocabulary(opened, labels, vocabulary):
    rows = labels + labels[:1]
    table = opened(("label\n" + "\n".join(rows) + "\n").encode(), label="label")
    assert table.vocabulary == vocabulary
    assert [type(word) for word in table.vocabulary] == [type(word) for word in vocabulary]
    assert [str(table.vocabulary[code]) for code in table.labels(np.arange(len(rows)))] == rows
    assert table.strings("label", np.arange(len(rows))) == rows


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        ("1\n2\n1.5\n", "numbers but not all integers.*'1.5' in line 4.*kind: regression, column: label}"),
        (
            "1\n2\ncat\n",
            r"a mix of integers \(2\) "
            r"and other values \(1, such as 'cat' in line 4\)",
        ),
    ],
)
def test_doubtful_labels_are_noted(opened, labels, note):
    table = opened(b"label\n" + labels.encode(), label="label")
    assert all(isinstance(word, str) for word in table.vocabulary)
    assert pd.Series(table.notes).str.contains(note).tolist() == [True]


@pytest.mark.parametrize(
    ("rare", "large"),
    [("bagg", "bag"), ("ba", "bags"), ("bga", "bag"), ("bag1", "bag2"), ("A", "B"), ("BAG", "bag"), ("b ag", "bag"),
     ("hag", "bag"), ("class1", "class10"), ("ag", "bag")],
)  # fmt: skip
def test_a_rare_label_that_may_be_a_misspelling_is_noted(opened, tmp_path, rare, large):
    table = opened(f"label\n{large}\n{rare}\n{large}\n".encode() + f"{large}\n".encode() * 3, label="label")
    text = f"line 3 of {table.name}: 1 row with the label {rare!r}, 5 with {large!r}: if it is a misspelling, correct "
    expected = [True] if rare in ("bagg", "BAG", "b ag", "hag") else []
    assert pd.Series(table.notes, dtype=str).str.startswith(text).tolist() == expected


def test_labels_of_about_as_many_rows_are_two_classes(opened):
    assert not opened(b"label\n" + b"bag\nbags\nbag\n" * 2, label="label").notes


def test_quotes_inside_a_field_are_text(opened):
    table = opened(b'path,caption\na,5" pipe\nb,say "hi"\nc,"x"y\n')
    assert text_of(table)["caption"] == ['5" pipe', 'say "hi"', "xy"]


def test_single_column_name_as_text(opened):
    assert opened(CSV, text="path").columns[0] == "path"


def test_columns_without_a_name_are_called_as_in_pandas(opened):
    assert opened(b",path,\n0,a,x\n").columns == ("Unnamed: 0", "path", "Unnamed: 2")


def test_columns_without_a_name_are_text_in_every_block(opened, monkeypatch):
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", 64)
    numbers = [f"{i:03}" for i in range(100)]
    table = opened((",path, \n" + "".join(f"{i},a,1.0\n" for i in numbers)).encode())
    assert (text_of(table)["Unnamed: 0"], set(text_of(table)["Unnamed: 2"])) == (numbers, {"1.0"})


def many(num_rows: int) -> bytes:
    return b"path,label\n" + b"".join(b"p%d,%d\n" % (i, i * i % 11) for i in range(num_rows))


def test_random_access_over_many_batches(opened, monkeypatch):
    monkeypatch.setattr(writers, "MAX_BATCH_ROWS", 64)
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", 1000)
    table = opened(many(3000), label="label")
    rows = np.random.default_rng(0).integers(0, 3000, 2000)
    assert table.strings("path", rows) == [f"p{i}" for i in rows]
    assert table.strings("path", rows[:100]) == [f"p{i}" for i in rows[:100]]
    assert [table.vocabulary[code] for code in table.labels(rows)] == (rows * rows % 11).tolist()
    for start, stop in [(0, 3000), (63, 65), (64, 128), (2999, 3000)]:
        assert table.slice("path", start, stop).to_pylist() == [f"p{i}" for i in range(start, stop)]


def test_digest_does_not_depend_on_batches_or_blocks(opened, monkeypatch):
    digest = opened(many(3000), label="label").digest
    monkeypatch.setattr(writers, "MAX_BATCH_ROWS", 128)
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", 777)
    assert opened(many(3000), "b.csv", label="label").digest == digest


@pytest.mark.parametrize("first", [64, 4000])
def test_row_longer_than_a_block(opened, monkeypatch, caplog, first):
    """The file is read again in larger blocks, which is said each time."""
    caplog.set_level("INFO")
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", first)
    captions = ["x" * 10_000 if i == 700 else "y" for i in range(1000)]
    table = opened(("path,caption\n" + "\n".join(f"p{i},{text}" for i, text in enumerate(captions))).encode())
    assert text_of(table) == {"path": [f"p{i}" for i in range(1000)], "caption": captions}
    assert caplog.text.count("reading the file again") == {64: 3, 4000: 1}[first]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_quoted_line_break_across_blocks(opened, monkeypatch, end):
    for block in range(64, 80):
        monkeypatch.setattr(csv_reader, "BLOCK_BYTES", block)
        content = b"path,caption" + end + b"".join(b'p%d,"x\r\ny"%s' % (i, end) for i in range(50))
        assert text_of(opened(content, f"{block}.csv"))["caption"] == ["x\r\ny"] * 50


def test_long_rows(opened):
    table = opened(b"caption\n" + (b"y" * 400_000 + b"\n") * 100)
    assert table.strings("caption", np.array([99, 0])) == ["y" * 400_000] * 2


def test_pickle_does_not_contain_the_rows(opened):
    table = opened(many(5000), label="label")
    table.strings("path", np.arange(10))
    pickled = pickle.dumps(table)
    assert len(pickled) < 1000
    other = pickle.loads(pickled)
    assert other.digest == table.digest
    assert other.strings("path", np.array([4999])) == ["p4999"]


def test_parquet_columns_become_text(tmp_path):
    columns = {
        "path": ["a", None, "c"],
        "label": [3.0, 1.0, 3.0],
        "x": [1, None, 3],
        "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
        "image": [b"1", b"2", b"3"],
        "boxes": [[1], [2], []],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    table = open_table(tmp_path / "a.parquet", label="label", cache_dir=tmp_path / "cache")
    assert table.columns == ("path", "label", "x", "kind")
    assert table.vocabulary == (1, 3)
    assert table.labels(np.arange(3)).tolist() == [1, 0, 1]
    text = text_of(table)
    assert (text["path"], text["x"], text["kind"]) == (["a", "", "c"], ["1", "", "3"], ["u", "v", "u"])
    assert table.where(1).endswith("a.parquet, row 1 (from 0)")
    message = "column 'boxes' holds list<.*int64>, not text or numbers"
    with pytest.raises(DataError, match=message):
        open_table(tmp_path / "a.parquet", label="boxes", cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match=message.replace("boxes", "image").replace("list<.*int64>", "binary")):
        open_table(tmp_path / "a.parquet", text="image", cache_dir=tmp_path / "cache")


def test_parquet_columns_that_cannot_become_text(tmp_path):
    """An extension type is as its storage; a column whose values fail is named."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 3, 4]), 2)
    columns = {
        "path": ["a", "b"],
        "vector": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int64(), [2]), vectors),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert open_table(tmp_path / "a.parquet", text="path", cache_dir=tmp_path / "cache").columns == ("path",)
    columns["day"] = pa.array([0, 1], pa.timestamp("s", tz="Mars/Base"))
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'day' holds timestamp.*Mars/Base.*\n  -> store it as text"):
        open_table(tmp_path / "b.parquet", text="path", cache_dir=tmp_path / "cache")


def test_parquet_and_csv_with_equal_content_have_equal_digests(tmp_path, opened):
    pq.write_table(pa.table({"path": ["a", "b"], "label": [1, 2]}), tmp_path / "a.parquet")
    table = open_table(tmp_path / "a.parquet", label="label", cache_dir=tmp_path / "cache")
    assert table.digest == opened(b"path,label\na,1\nb,2\n", label="label").digest


FIELD = st.text(alphabet=st.sampled_from('ab",\n\r \té漢\u2028\x1c0'), max_size=6)


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(FIELD, FIELD, FIELD), min_size=1, max_size=30),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    quote_all=st.booleans(),
    cut=st.booleans(),
    blank=st.sampled_from(["", "\n", "  \n"]),
    block=st.sampled_from([64, 200, 4096]),
)
def test_agrees_with_the_csv_module_and_pandas(tmp_path_factory, rows, end, quote_all, cut, blank, block):
    content, starts = f"a,b,c{end}", []
    for row in rows:
        content += blank
        starts.append(len(list(io.StringIO(content, newline=""))) + 1)
        content += ",".join(_quoted(field, quote_all) for field in row) + end
    content = content[: -len(end)] if cut else content
    by_module = [fields for fields in csv.reader(io.StringIO(content, newline="")) if len(fields) > 1]
    assert by_module[1:] == [list(row) for row in rows]
    folder = tmp_path_factory.mktemp("csv")
    path = folder / "a.csv"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_reader, "BLOCK_BYTES", block)
        table = open_table(path, cache_dir=folder / "cache")
    assert text_of(table) == {column: [row[i] for row in rows] for i, column in enumerate("abc")}
    assert lines_of(table) == starts
    if "\r" not in content:  # pandas drops a lone carriage return from quoted text
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        assert frame.to_numpy().tolist() == [list(row) for row in rows]


def _quoted(field: str, always: bool) -> str:
    if always or any(c in field for c in '",\r\n'):
        return '"' + field.replace('"', '""') + '"'
    return field


SCRIPT = """
import sys
from pathlib import Path
from harness.data.table import csv_reader, writers
from harness.data.table.labels import LabelColumns
from harness.data.table.table import open_table
csv_reader.BLOCK_BYTES, writers.MAX_BATCH_ROWS = 256 << 10, 8192  # buffers that are small compared to the files
table = open_table(sys.argv[1], label="label", cache_dir=Path(sys.argv[2]))
lines = Path("/proc/self/status").read_text().splitlines()
print(table.num_rows, next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = b"images/class/%09d.jpg,%d,a caption of about the usual length for a photograph\n"
    peak = []
    for blocks in (4, 24):
        path = tmp_path / f"{blocks}.csv"
        block = b"".join(line % (i, i % 10) for i in range(50_000))
        path.write_bytes(b"path,label,caption\n" + block * blocks)
        command = [sys.executable, "-c", SCRIPT, str(path), str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        rows, megabytes = map(int, done.stdout.split())
        assert rows == 50_000 * blocks
        peak.append(megabytes)
    assert peak[1] - peak[0] < 40, peak  # for 80 MB more of CSV


# Several labels per row, and numbers

TAGS = LabelColumns("tags", ("tags",), "|", allow_empty=True)


def tags_of(table, rows) -> list[list]:
    counts, codes = table.tags(np.asarray(rows))
    return [[table.vocabulary[c] for c in part] for part in np.split(codes, np.cumsum(counts)[:-1])]


def test_several_labels_per_row(opened):
    """Blanks around labels, empty parts, repeated labels, a quoted line break, rows without labels."""
    csv = 'id,tags\n0, new york |cat|\n1,\n2,"cat|cat||\ndog"\n3,| |\n4,NA|été\n'.encode()
    table = opened(csv, label=TAGS)
    assert table.vocabulary == ("NA", "cat", "dog", "new york", "été")
    assert [sorted(tags) for tags in tags_of(table, [4, 0, 1, 2, 3, 0])] == [
        ["NA", "été"], ["cat", "new york"], [], ["cat", "dog"], [], ["cat", "new york"],
    ]  # fmt: skip
    assert table.strings("tags", np.arange(2)) == [" new york |cat|", ""]  # as written
    assert tags_of(pickle.loads(pickle.dumps(table)), [2]) == tags_of(table, [2])
    assert opened(b"tags\n10|9\n9\n", label=TAGS).vocabulary == (9, 10)
    assert opened(b"tags\n10|9\nx\n", label=TAGS).vocabulary == ("10", "9", "x")


def test_labels_of_many_rows_equal_a_plain_reading(opened):
    """In several blocks of the file; the digest depends on the labels alone."""
    generator = np.random.default_rng(0)
    rows = [sorted(set(generator.integers(0, 300, generator.integers(1, 6)).tolist())) for _ in range(150_000)]
    lines = ["|".join(map(str, row)) + "," + "x" * 60 for row in rows]
    table = opened("\n".join(["tags,text", *lines]).encode(), label=TAGS)
    chosen = generator.permutation(len(rows))[:2000]
    assert [sorted(found) for found in tags_of(table, chosen)] == [rows[row] for row in chosen]
    digest = table.digest
    lines[-1] = lines[-1].replace(lines[-1].partition(",")[0], "299|298|0")
    assert opened("\n".join(["tags,text", *lines]).encode(), label=TAGS).digest != digest


def test_numbers(opened):
    table = opened(b"x,y\n1, -2e3\n2.5,0\n-1,.5\n", label=LabelColumns("numbers", ("y", "x")))
    assert table.numbers(np.asarray([2, 0])).tolist() == [[0.5, -1.0], [-2000.0, 1.0]]
    expected = np.asarray([[-2000.0, 1.0], [0.0, 2.5], [0.5, -1.0]])
    assert table.mean == pytest.approx(expected.mean(0), abs=1e-12)
    assert table.std == pytest.approx(expected.std(0))
    constant = opened(b"x\n4\n4\n", label=LabelColumns("numbers", ("x",)))
    assert constant.std == (1.0,)
    assert "all numbers in column 'x' are 4" in constant.notes[0]
    rounded = opened(b"x\n0.1\n0.1\n0.1\n", label=LabelColumns("numbers", ("x",)))  # the mean is not 0.1
    assert rounded.std == (1.0,)
