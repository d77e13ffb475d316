"""Shards as DataFrames: the recipe's rows, with the same column types on every rank."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from harness.data.table.frame import infer_kind, read_shard
from harness.data.table.table import open_table
from harness.errors import DataError


def make(path, rows=101):
    lines = [f"p{i},{i % 7},{i / 4 if i % 2 else i},{'' if i == 50 else i},word {i},{i % 3 == 0}" for i in range(rows)]
    path.write_text("path,label,x,y,caption,flag\n" + "\n".join(lines))
    return path


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 101, 150])
def test_shards_are_the_slices_of_the_whole(tmp_path, world_size):
    path = make(tmp_path / "a.csv")
    whole = pd.read_csv(path)
    shards = [read_shard(path, rank=r, world_size=world_size, cache_dir=tmp_path / "cache") for r in range(world_size)]
    for rank, shard in enumerate(shards):
        start, stop = int(rank * len(whole) / world_size), int((rank + 1) * len(whole) / world_size)
        pd.testing.assert_frame_equal(shard, whole.iloc[start:stop])


def test_types_are_those_of_the_whole_column(tmp_path):
    path = make(tmp_path / "a.csv")  # y is blank in row 50 alone, x has fractions
    for rank in range(8):
        frame = read_shard(path, rank=rank, world_size=8, cache_dir=tmp_path / "cache")
        assert frame["y"].dtype == np.float64
        assert frame["label"].dtype == np.int64
        assert frame["flag"].dtype == bool


def test_columns(tmp_path):
    path = make(tmp_path / "a.csv")
    frame = read_shard(path, rank=1, world_size=2, columns=["y", "path"], cache_dir=tmp_path / "cache")
    assert list(frame.columns) == ["y", "path"]
    with pytest.raises(DataError, match="no column 'z'"):
        read_shard(path, rank=0, world_size=2, columns=["z"], cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_outside(tmp_path, rank, world_size):
    with pytest.raises(ValueError, match="is not one of"):
        read_shard(make(tmp_path / "a.csv"), rank=rank, world_size=world_size, cache_dir=tmp_path / "cache")


def test_text_is_never_missing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\nNA,1\n,NA\nNone,\n")
    frame = read_shard(path, rank=0, world_size=1, cache_dir=tmp_path / "cache")
    assert frame["a"].tolist() == ["NA", "", "None"]
    assert frame["b"].tolist()[0] == 1
    assert frame["b"].isna().tolist() == [False, True, True]


@pytest.mark.parametrize(
    "column",
    ["1 2 3", "1 -2 +3", "007 8", "1 2.5", "2.5 1", "1 True", "1e3 2", ".5 1.", "+.5 +1", "1 --2", "+ 1", "inf 1"]
    + ["NaN 1.5", "1_000 2", "True False", "true FALSE", "True 1", "1 x", "x 1", "0x1f", "0x1f 2", "2020-01-01", "1,5"]
    + ["9007199254740993 1", "-9223372036854775808"],
)  # fmt: skip
def test_kinds_are_those_of_pandas(column):
    values = column.split(" ")
    frame = pd.read_csv(io.StringIO("a\n" + "\n".join(f'"{v}"' for v in values)))
    expected = {"str": "string", "object": "string"}.get(str(frame["a"].dtype), str(frame["a"].dtype))
    assert infer_kind([pa.array(values)]) == expected
    assert infer_kind([pa.array([v]) for v in values]) == expected  # one value to a record batch


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([" 7", "8 "], "int64"),  # as pandas reads `a, 7`
        (["", "1"], "float64"),
        (["", "NA"], "string"),  # pandas: a column of NaN
        (["True", ""], "string"),
        (["9007199254740993", ""], "string"),  # pandas: rounded to an even number
        (["9007199254740993", "1.5"], "string"),
        (["99999999999999999999", "1"], "string"),
    ],
)
def test_kinds_where_pandas_would_lose_something(values, kind):
    assert infer_kind([pa.array(values)]) == kind
    assert infer_kind([pa.array([v]) for v in values]) == kind


def test_kinds_are_found_once(tmp_path, monkeypatch):
    path = make(tmp_path / "a.csv")
    read_shard(path, rank=0, world_size=2, cache_dir=tmp_path / "cache")
    monkeypatch.setattr("harness.data.table.frame.infer_kind", lambda chunks: pytest.fail("inferred again"))
    read_shard(path, rank=1, world_size=2, cache_dir=tmp_path / "cache")
    open_table(path, label="label", cache_dir=tmp_path / "cache")  # another entry of the same source sweeps
    read_shard(path, rank=1, world_size=2, cache_dir=tmp_path / "cache")
