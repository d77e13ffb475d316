"""What a table holds: rows, text, labels and frames of files that are as they should be."""

from __future__ import annotations

import csv
import gzip
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.table import csv_reader, writers
from harness.data.table.table import open_table

CSV = b'path,label,caption\na.png,7,"a cat, ""big""\nand red"\nb.png,10,NA\nc.png,7,\n'


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def opened(tmp_path):
    def open_bytes(content: bytes, name: str = "a.csv", **options):
        return open_table(write(tmp_path / name, content), cache_dir=tmp_path / "cache", **options)

    return open_bytes


def test_api(opened):
    table = opened(CSV, text=["path"], label="label")
    assert len(table) == table.num_rows == 3
    assert table.columns == ("path", "label", "caption")
    assert table.vocabulary == (7, 10)
    assert table.counts.tolist() == [2, 1]
    assert table.counts.dtype == np.int64
    codes = table.labels(np.array([2, 1, 1, 0]))
    assert codes.tolist() == [0, 1, 1, 0]
    assert codes.dtype == np.int64
    assert table.strings("caption", np.array([1, 0, 2, 1])) == ["NA", 'a cat, "big"\nand red', "", "NA"]
    assert table.strings("label", np.array([1, 0])) == ["10", "7"]
    assert [table.line_of(row) for row in range(3)] == [2, 4, 5]
    assert table.line_of(3) == 0
    assert table.where(1).endswith("a.csv:4")
    assert table.notes == ()


def test_no_rows_asked(opened):
    table = opened(CSV, label="label")
    assert table.labels(np.array([], dtype=np.int64)).tolist() == []
    assert table.strings("path", np.array([], dtype=np.int64)) == []
    assert list(table.frame(np.array([], dtype=np.int64)).columns) == list(table.columns)
    assert len(table.slice_frame(2, 1)) == 0


@pytest.mark.parametrize("rows", [[-1], [3], [0, 5]])
def test_rows_outside(opened, rows):
    table = opened(CSV, label="label")
    for call in (table.labels, table.frame, lambda r: table.strings("path", r)):
        with pytest.raises(IndexError, match="table of 3 rows"):
            call(np.array(rows))


def test_frames(opened):
    table = opened(CSV, label="label")
    whole = table.slice_frame(0, 3)
    assert list(whole.columns) == ["path", "label", "caption"]
    assert whole["label"].tolist() == [7, 10, 7]
    assert whole["label"].dtype == np.int64
    assert whole["caption"].tolist() == ['a cat, "big"\nand red', "NA", ""]
    pd.testing.assert_frame_equal(table.frame(np.array([2, 0, 2])), whole.iloc[[2, 0, 2]].reset_index(drop=True))
    pd.testing.assert_frame_equal(table.slice_frame(1, 99), whole.iloc[1:].reset_index(drop=True))


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
    assert other.columns == plain.columns
    pd.testing.assert_frame_equal(other.slice_frame(0, 3), plain.slice_frame(0, 3))
    assert other.digest == plain.digest


@pytest.mark.parametrize(
    "content",
    [
        CSV.replace(b"c.png", b"d.png"),
        CSV.replace(b"c.png,7", b"c.png,8"),
        CSV.replace(b"png,7", b"png,?")
        .replace(b"png,10", b"png,7")
        .replace(b"png,?", b"png,10", 1)
        .replace(b"?", b"7"),
        CSV.replace(b"caption", b"text"),
        CSV + b"d.png,7,\n",
        CSV.replace(b"a.png", b"a.pn").replace(b"b.png", b"gb.png"),  # the same bytes, cut elsewhere
    ],
)
def test_other_content_has_another_digest(opened, content):
    assert opened(content, "b.csv", label="label").digest != opened(CSV, label="label").digest


def test_digest_knows_the_label_column(opened):
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
    assert table.counts.tolist() == [rows.count(str(word)) for word in vocabulary]
    assert table.slice_frame(1, len(rows))["label"].tolist() == [
        table.vocabulary[c] for c in table.labels(range(1, len(rows)))
    ]


@pytest.mark.parametrize(
    ("labels", "note"),
    [("1\n2\n1.5\n", "numbers but not all integers.*'1.5' in row 2"), ("1\n2\ncat\n", "mix 2 integers with 1 others")],
)
def test_doubtful_labels_are_noted(opened, labels, note):
    table = opened(b"label\n" + labels.encode(), label="label")
    assert all(isinstance(word, str) for word in table.vocabulary)
    assert pd.Series(table.notes).str.contains(note).tolist() == [True]


def test_bare_quotes_are_text(opened):
    table = opened(b'path,caption\na,5" pipe\nb,say "hi"\nc,"x"y\n')
    assert table.strings("caption", np.arange(3)) == ['5" pipe', 'say "hi"', "xy"]


def test_old_line_ends_in_a_large_file(opened):
    assert len(opened(b"path,label\r" + b"some/path,1\r" * 100_000, label="label")) == 100_000


def test_nul_bytes_are_text(opened):
    table = opened(b'path,label\n"a\0b",1\nc\0,2\n')
    assert table.strings("path", [0, 1]) == ["a\0b", "c\0"]
    assert table.line_of(1) == 3


def test_one_column_named_by_itself(opened):
    assert opened(CSV, text="path").columns[0] == "path"


def test_nameless_column_as_pandas_calls_it(opened):
    assert opened(b",path,\n0,a,x\n").columns == ("Unnamed: 0", "path", "Unnamed: 2")


def many(num_rows: int) -> bytes:
    return b"path,label\n" + b"".join(b"p%d,%d\n" % (i, i * i % 11) for i in range(num_rows))


def test_many_batches_random_access(opened, monkeypatch):
    monkeypatch.setattr(writers, "_MAX_BATCH_ROWS", 64)
    monkeypatch.setattr(csv_reader, "_FIRST_BLOCK", 1000)
    table = opened(many(3000), label="label")
    assert table.entry.load()["batch_rows"] == 64
    rows = np.random.default_rng(0).integers(0, 3000, 2000)
    assert table.strings("path", rows) == [f"p{i}" for i in rows]
    assert table.strings("path", rows[:100]) == [f"p{i}" for i in rows[:100]]
    assert [table.vocabulary[code] for code in table.labels(rows)] == (rows * rows % 11).tolist()
    assert table.frame(rows)["path"].tolist() == [f"p{i}" for i in rows]
    for start, stop in [(0, 3000), (63, 65), (64, 128), (100, 1000), (2999, 3000)]:
        frame = table.slice_frame(start, stop)
        assert frame["path"].tolist() == [f"p{i}" for i in range(start, stop)]
        assert frame["label"].tolist() == [i * i % 11 for i in range(start, stop)]


def test_digest_does_not_depend_on_batches_or_blocks(opened, monkeypatch):
    digest = opened(many(3000), label="label").digest
    monkeypatch.setattr(writers, "_MAX_BATCH_ROWS", 128)
    monkeypatch.setattr(csv_reader, "_FIRST_BLOCK", 777)
    assert opened(many(3000), "b.csv", label="label").digest == digest


@pytest.mark.parametrize("first", [64, 4000])
def test_row_longer_than_a_block(opened, monkeypatch, first):
    monkeypatch.setattr(csv_reader, "_FIRST_BLOCK", first)
    long = "x" * 10_000
    rows = [f"p{i},{long if i == 700 else 'y'}" for i in range(1000)]
    table = opened(("path,caption\n" + "\n".join(rows)).encode())
    assert [f"{p},{c}" for p, c in table.slice_frame(0, 1000).to_numpy()] == rows


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_break_in_quotes_across_blocks(opened, monkeypatch, end):
    for block in range(64, 80):
        monkeypatch.setattr(csv_reader, "_FIRST_BLOCK", block)
        content = b"path,caption" + end + b"".join(b'p%d,"x\r\ny"%s' % (i, end) for i in range(50))
        table = opened(content, f"{block}.csv")
        assert table.strings("caption", np.arange(50)) == ["x\r\ny"] * 50


def test_long_rows_make_short_batches(opened):
    table = opened(b"caption\n" + (b"y" * 400_000 + b"\n") * 100)
    assert table.entry.load()["batch_rows"] == 64
    assert len(table) == 100


def test_pickle_is_a_path(opened):
    table = opened(many(5000), label="label")
    table.strings("path", np.arange(10))
    pickled = pickle.dumps(table)
    assert len(pickled) < 1000
    other = pickle.loads(pickled)
    assert other.digest == table.digest
    assert other.strings("path", np.array([4999])) == ["p4999"]


def test_parquet(tmp_path, opened):
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
    assert table.strings("path", np.arange(3)) == ["a", "", "c"]
    assert table.strings("x", np.arange(3)) == ["1", "", "3"]
    assert table.strings("kind", np.arange(3)) == ["u", "v", "u"]
    assert table.line_of(1) == 0
    assert table.where(1).endswith("a.parquet, row 1")


def test_parquet_and_csv_of_one_content_are_equal(tmp_path, opened):
    pq.write_table(pa.table({"path": ["a", "b"], "label": [1, 2]}), tmp_path / "a.parquet")
    table = open_table(tmp_path / "a.parquet", label="label", cache_dir=tmp_path / "cache")
    assert table.digest == opened(b"path,label\na,1\nb,2\n", label="label").digest


FIELD = st.text(alphabet=st.sampled_from('ab",\n\r \té漢\u2028\x1c0'), max_size=6)


@settings(max_examples=150, deadline=None)
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
    path = write(folder / "a.csv", content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_reader, "_FIRST_BLOCK", block)
        table = open_table(path, cache_dir=folder / "cache")
    assert len(table) == len(rows)
    for i, column in enumerate("abc"):
        assert table.strings(column, np.arange(len(rows))) == [row[i] for row in rows]
    assert [table.line_of(i) for i in range(len(rows))] == starts
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    if "\r" not in content:  # pandas drops a lone carriage return from quoted text
        assert frame.to_numpy().tolist() == [list(row) for row in rows]


def _quoted(field: str, always: bool) -> str:
    if always or any(c in field for c in '",\r\n'):
        return '"' + field.replace('"', '""') + '"'
    return field


SCRIPT = """
import sys
from pathlib import Path
from harness.data import csv_reader, sinks
from harness.data.table import open_table
csv_reader._FIRST_BLOCK, sinks._MAX_BATCH_ROWS = 256 << 10, 8192  # buffers small beside the files
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
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=dict(os.environ))
        rows, megabytes = map(int, done.stdout.split())
        assert rows == 50_000 * blocks
        peak.append(megabytes)
    assert peak[1] - peak[0] < 40, peak  # for 80 MB more of CSV
