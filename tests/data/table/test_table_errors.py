"""Errors for unusable files: the finding, the line and the remedy. Nothing stays in the cache."""

from __future__ import annotations

import csv
import gzip
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.data.table import csv_reader, labels, writers
from harness.data.table.header import problems
from harness.data.table.labels import LabelColumns
from harness.data.table.table import open_table
from harness.errors import DataError

HEADER = b"path,label,caption\n"
GOOD = b"".join(b"p%d,%d,text\n" % (i, i % 3) for i in range(500))


@pytest.fixture
def refused(tmp_path):
    """Open an unusable file; (message, place after the file name, hint)."""

    def refuse(content: bytes | None, name: str = "train.csv", **options) -> tuple[str, str, str]:
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            open_table(path, cache_dir=tmp_path / "cache", **{"label": "label", **options})
        left = [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()]
        assert [name for name in left if not name.endswith(".lock")] == []
        error = caught.value
        assert error.where.startswith(str(path))
        return error.message, error.where[len(str(path)) :].lstrip(":"), error.hint

    return refuse


def parquet(*columns: list, names: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], names=names), sink)
    return sink.getvalue().to_pybytes()


def test_missing_file_and_folder(refused, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_v2.csv").touch()
    (tmp_path / "data" / "a_note.txt").touch()
    near = f"did you mean {tmp_path}/data/train_v2.csv?"
    assert refused(None, "tain.csv") == ("no such annotation file", "", near)
    assert refused(None, "xyz")[2] == f"annotation files in {tmp_path}/data: train_v2.csv"
    with pytest.raises(DataError, match=f"the folder {tmp_path}/nowhere does not exist either"):
        open_table(tmp_path / "nowhere" / "a.csv", cache_dir=tmp_path)
    with pytest.raises(DataError, match="a folder, not an annotation file\n.*train_v2.csv"):
        open_table(tmp_path / "data", cache_dir=tmp_path / "cache")


def test_missing_folder_is_one_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = problems(
        ["data/digits/train.csv", "data/digits/eval.csv"], {"label": "task.label_column"}, "data/digits"
    )
    assert str(found).startswith("data/digits/train.csv: no such annotation file\n  -> the folder data/digits does not")
    assert found.hint.endswith("; harness data digits data/digits writes the digits")
    first, second = problems(["data/digits/train.csv"], {}, "photos")
    assert "the folder photos does not exist" in str(second)


def test_paths_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "gone.csv")
    for name, message in {
        "pipe.csv": "the annotation file cannot be read: it is a named pipe, not a regular file",
        "link.csv": f"no such annotation file: it is a link to {tmp_path}/gone.csv, which does not exist",
        "/dev/zero": "the annotation file cannot be read: it is a device or a socket",
        "a\0b": "the annotation file cannot be read: ",  # Python names the reason since 3.13 in other words
        "x" * 300: "the annotation file cannot be read: File name too long",
    }.items():
        with pytest.raises(DataError) as caught:
            open_table(tmp_path / name, cache_dir=tmp_path / "cache")
        assert caught.value.message.startswith(message)
        assert "did you mean" not in caught.value.hint  # not the very file that failed
    (tmp_path / "train_1.csv").touch()
    with pytest.raises(DataError) as caught:
        open_table(tmp_path / "train_2.csv", cache_dir=tmp_path / "cache")
    assert "did you mean" not in caught.value.hint


def test_flipped_bytes_in_a_gzip_file(tmp_path):
    """Any of them is a DataError with the file's name, or changes nothing."""
    whole = gzip.compress(HEADER + b"".join(b"images/%d.png,%d\n" % (i * 7919, i % 3) for i in range(50)), mtime=0)
    damaged = 0
    for place in range(2, len(whole), 3):
        path = tmp_path / f"{place}.csv.gz"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            open_table(path, label="label", cache_dir=tmp_path / "cache")
        except DataError as error:
            damaged += error.where.startswith(str(path)) and "the gzip file is damaged" in error.message
    assert damaged > len(whole) / 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty \\(0 bytes\\)"),
        (b"\n \n", "no header line"),
        (b"\xef\xbb\xbf", "no header line"),
        (b"   \n" + b"path,label\na,1\n", "no header line"),
        (b",,\na,1,b\n", "no header line"),
        (b"x" * (3 << 20), "the first line, which names the columns, is longer than 1 MiB"),
        (",".join(map(str, range(10**6))).encode() + b"\n1,2\n", "the first line, which names the columns, is longer"),
        (HEADER, "header but no rows"),
        (HEADER[:-1], "header but no rows"),
        (HEADER + b"\n\n", "header but no rows"),
        (gzip.compress(HEADER, mtime=0), "header but no rows"),
        (gzip.compress(b"", mtime=0), "no header line"),
        (gzip.compress(HEADER + GOOD, mtime=0)[:-20], "the gzip file is damaged"),
        (b"\x1f\x8b\x08nonsense", "the gzip file is damaged"),
        (b"PK\x03\x04....", "zip archive"),
        ("path,label\na,1\n".encode("utf-16"), "UTF-16"),
        (b"PAR1 cut off", "Parquet file cannot be read"),
        (parquet([1], [2], names=["label", "label"]), "the file names a column twice: 'label'"),
    ],
)
def test_files_that_are_not_tables(refused, content, message):
    assert re.search(message, refused(content)[0])


def test_very_many_columns(refused):
    """In time linear in their number, and one sentence."""
    names = list(map(str, range(75_000)))
    twice = refused(",".join(names * 2).encode() + b"\na\n")[0]
    assert twice.startswith("the header names a column twice: '0', '1', '10', ")
    assert twice.endswith(" and 74,980 others")
    missing = refused(",".join(names).encode() + b"\n" + ",".join(names).encode() + b"\n")[0]
    assert missing.startswith("no column 'label'; the columns are '0', '1', '2', ")
    assert missing.endswith(" and 74,980 others")


SHORT_AND_LONG = b"short,1\n" + b'"a\nb",1,x\n' + b"long,1,a,b\n" + b"\n" + b"x,2\n" * 9


@pytest.mark.parametrize(
    ("content", "message", "line", "hint"),
    [
        (b"path,label,path\na,1,b\n", "the header names a column twice: 'path'", 1, "unique name"),
        (b"path;label\na;1,5\nb;1;2\n", "1 row with more or fewer fields than the header's 2: line 3 has 3", 3, "';'"),
        (b'path;label\na;1\nb;"1\n', "a quote opened in this row is never closed", 3, "close the quote"),
        (
            b"path,label\na,cat\nb,dog\nc,dog \nb,dog\nc,dog \n",
            "labels 'dog' (line 3) and 'dog ' (line 4) differ only in whitespace", 0, "in column 'label'",
        ),
        (HEADER + b"a,1\n", "1 row with more or fewer fields than the header's 3: line 2 has 2", 2, "double quotes"),
        (
            HEADER + GOOD + SHORT_AND_LONG,
            "11 rows with more or fewer fields than the header's 3: line 502 has 2, line 505 has 4, line 507 has 2, "
            "line 508 has 2, line 509 has 2, …", 502, "double quotes",
        ),
        (
            HEADER + GOOD + "q,1,caf\xe9 au lait\n".encode("latin-1"),
            "the file is not UTF-8: byte 0xe9 (read as Latin-1, it is part of 'q,1,café au lait')", 502, "iconv",
        ),
        ("path,label,größe\na,1,2\n".encode("latin-1"), "the file is not UTF-8: byte 0xf6", 1, "iconv"),
        (HEADER + GOOD + b"q,1,a\0b\n", "the file has a NUL byte", 502, "tr -d '\\000' <"),
    ],
)  # fmt: skip
def test_unusable_content(refused, content, message, line, hint):
    found, place, remedy = refused(content)
    assert found.startswith(message)
    assert place == (str(line) if line else "")
    assert hint in remedy


def test_missing_columns(refused, tmp_path):
    message, _, hint = refused(b"path,Label,caption\na,1,x\n", text=["path", "captoin"])
    assert message == "no columns 'captoin', 'label'; the columns are 'path', 'Label', 'caption'"
    assert hint == "did you mean 'caption'?; did you mean 'Label'?"
    label = LabelColumns("class", ("label",), setting="task.label_column")
    for header, expected in (
        (b"picture,Label", "set task.path_column=picture; did you mean task.label_column=Label?"),
        (b"path,my kind", "set 'task.label_column=my kind'"),
        (b"path,a,b", "set task.label_column=NAME"),
    ):
        assert refused(header + b"\na,1,x\n", text={"path": "task.path_column"}, label=label)[2] == expected
    numbers = LabelColumns("numbers", ("x", "y"), setting="task.labels.column")
    assert refused(b"path,z\na,1\n", label=numbers)[2] == "task.labels.column names the columns"
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + GOOD)
    open_table(path, cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="no column 'x'"):  # after the conversion, too
        open_table(path, text=["x"], cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("block", [500, 4 << 20])
def test_blank_labels(refused, monkeypatch, block):
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", block)
    rows = GOOD.splitlines(keepends=True)
    for i in (3, 10, 11, 12, 13, 14, 400):
        rows[i] = b"p,%s,text\n" % (b"" if i % 2 else b"  ")
    rows[1] = b'"p\nq",1,"te\nxt"\n\n'
    message, place, hint = refused(HEADER + b"".join(rows))
    assert message == (
        "rows without a label in column 'label' (7 of 500): line 8, line 15, line 16, line 17, line 18, …"
    )
    assert place == "8"
    assert "rows are" not in hint
    message, place, hint = refused(parquet(["a", None, "b", None], names=["label"]), "a.parquet")
    assert (message, place) == ("rows without a label in column 'label' (2 of 4): row 1, row 3", "")
    assert "rows are counted from 0" in hint


def test_too_many_labels(refused, monkeypatch):
    monkeypatch.setattr(labels, "MAX_LABELS", 400)
    message, _, hint = refused(HEADER + GOOD, label="path")
    assert message == "column 'path' has more than 400 different values, too many for labels"
    label = LabelColumns("class", ("path",), setting="task.label_column")
    _, _, hint = refused(HEADER + GOOD, label=label)
    assert hint.startswith("set task.label_column to a column of class labels")


@pytest.mark.parametrize("block", [64, 4 << 20])
@pytest.mark.parametrize("after", [b"", GOOD])
@pytest.mark.parametrize("record", [b'q,1,"never closed\n', b'q,1,"never ""closed""\n', b'q,"1,never closed\n'])
def test_unclosed_quote(refused, monkeypatch, record, after, block):
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", block)
    message, place, hint = refused(HEADER + GOOD + record + after)
    assert message == "a quote opened in this row is never closed, so it consumes the rest of the file"
    assert place == "502"
    assert "close the quote" in hint


@pytest.mark.parametrize("ending", [b'q,1,"closed"', b'q,1,"5"" pipe"\n', b'q,1,5" pipe', b'q,1,"a\n\nb"\n\n'])
def test_closed_quotes_at_the_end_are_valid(tmp_path, ending):
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + GOOD + ending)
    assert len(open_table(path, label="label", cache_dir=tmp_path / "cache")) == 501


def test_suggested_commands_are_quoted(refused, tmp_path):
    for content, command in (
        (b"PK\x03\x04....", "unzip '{}'"),
        (b"\xff\xfea", "iconv -f UTF-16 -t UTF-8 '{}'"),
        (b'{"path": "a"}\n', "to_csv(sys.argv[2], index=False)\" '{}' NAME.csv"),
        (gzip.compress(HEADER + GOOD, mtime=0)[:-20], "gzip -t '{}' checks"),
        ("path,label\na,\xe9\n".encode("latin-1"), "iconv -f LATIN1 -t UTF-8 '{}' >"),
    ):
        assert command.format(f"{tmp_path}/data/my rows.csv") in refused(content, "my rows.csv")[2]


def test_row_longer_than_any_block(refused, monkeypatch):
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", 64)
    monkeypatch.setattr(csv_reader, "MAX_BLOCK_BYTES", 1 << 20)
    assert "longer than 1 MiB" in refused(HEADER + GOOD + b"p,1," + b"x" * (3 << 20) + b"\n")[0]


def test_text_that_cannot_be_hashed_has_no_digest(monkeypatch, tmp_path):
    """The last batch, too, which is hashed while the file is being completed."""

    def fails(array):
        raise MemoryError("no room to hash")

    monkeypatch.setattr(writers, "_text_bytes", fails)
    (tmp_path / "train.csv").write_bytes(HEADER + GOOD)
    with pytest.raises(MemoryError, match="no room to hash"):
        open_table(tmp_path / "train.csv", cache_dir=tmp_path / "cache", label="label")
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("how", ["append", "touch", "replace", "remove"])
def test_file_that_changes_during_the_conversion(refused, monkeypatch, tmp_path, how):
    path = tmp_path / "data" / "train.csv"
    read = csv_reader.read_batches

    def read_and_change(*arguments):
        yield from read(*arguments)
        if how == "append":
            with open(path, "ab") as stream:
                stream.write(b"p,1,x\n")
        elif how == "touch":
            os.utime(path, ns=(0, 0))
        elif how == "replace":
            (tmp_path / "new").write_bytes(HEADER + GOOD[::-1])
            os.replace(tmp_path / "new", path)
        else:
            path.unlink()

    monkeypatch.setattr(csv_reader, "read_batches", read_and_change)
    message, _, hint = refused(HEADER + GOOD)
    assert message == "the file changed while it was being read"
    assert "rename" in hint


def test_file_that_is_removed_after_its_header_was_read(refused, monkeypatch, tmp_path):
    read = csv_reader.read_batches

    def remove_and_read(path, *arguments):
        path.unlink()
        yield from read(path, *arguments)

    monkeypatch.setattr(csv_reader, "read_batches", remove_and_read)
    assert refused(HEADER + GOOD)[0] == "the file changed while it was being read"


def test_csv_field_size_limit_is_restored(refused):
    before = csv.field_size_limit()
    refused(HEADER + b'"' + b"x" * 200_000)
    assert csv.field_size_limit() == before


def test_rows_without_labels_or_numbers(refused):
    """All of them are counted, the first are named with their lines, before anything is kept."""
    tags = LabelColumns("tags", ("label",), "|")
    message, line, hint = refused(b'label\na|b\n |\n"x\n|"\n\n|\n', label=tags)
    assert (message, line) == ("rows without a label in column 'label' (2 of 4): line 3, line 7", "3")
    assert "task.labels.empty=allow" in hint
    message, _, _ = refused(b"label,b\n|,1\n,1\n", label=LabelColumns("tags", ("label",), "|", allow_empty=True))
    assert message == "no row has a label in column 'label'"
    numbers = LabelColumns("numbers", ("x", "y"))
    message, line, hint = refused(b"x,y\n1,2\n3,\n4,ten\n\nnan,1\n1,-inf\n1e39,0\n1,5 kg\n0,0\n", label=numbers)
    assert message == (
        "rows with a value that is not a finite number in 'x' or 'y' (6 of 8): line 3: '', "
        "line 4: 'ten', line 6: 'nan', line 7: '-inf', line 8: '1e39', …"
    )
    assert (line, "plain numbers" in hint) == ("3", True)
    assert "no column 'z'" in refused(b"x,y\n1,2\n", label=LabelColumns("numbers", ("x", "z")))[0]
