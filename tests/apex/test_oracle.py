"""``benchmarks.oracle``: the comparison with NVIDIA's own Apex. It runs where APEX_CHECKOUT names a checkout of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from benchmarks.oracle import deliberate, verdict
from benchmarks.oracle.__main__ import Row, compare, page
from benchmarks.oracle.cells import CELLS
from benchmarks.oracle.side import path_of
from tests.conftest import ROOT

CHECKOUT = os.environ.get("APEX_CHECKOUT", "")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not CHECKOUT, reason="APEX_CHECKOUT names no checkout of NVIDIA/apex at a tag up to 25.05")
def test_every_cell_equals_the_original_or_differs_on_purpose():
    rows = compare(Path(CHECKOUT), list(CELLS), workers=os.cpu_count() or 2)
    assert not [row for row in rows if row.wrong]


@pytest.mark.slow
def test_cells_run_with_harness_apex(tmp_path):
    """One of each family, so that the cells stay whole where there is no checkout."""
    first = {cell.family: name for name, cell in reversed(CELLS.items())}
    (tmp_path / "names").write_text("\n".join(first.values()))
    command = [sys.executable, "-m", "benchmarks.oracle.side", str(tmp_path), str(tmp_path / "names"), "cpu"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280, capture_output=True)
    results = {name: torch.load(path_of(tmp_path, name), weights_only=False) for name in first.values()}
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}


def found(tmp_path, one, other):
    for folder, result in (("one", one), ("other", other)):
        (tmp_path / folder).mkdir(exist_ok=True)
        torch.save(result, path_of(tmp_path / folder, "cell"))
    return verdict.difference("cell", tmp_path / "one", tmp_path / "other")


def test_verdict_sees_one_bit(tmp_path):
    x = torch.tensor([1.0, float("inf"), float("nan")])
    near = torch.tensor([1.0 + 2**-23, float("inf"), float("nan")])
    assert found(tmp_path, {"a": [x], "b": {"s": 1}}, {"a": [x.clone()], "b": {"s": 1}}) == ""
    assert found(tmp_path, {"a": [x]}, {"a": [near]}) == "a: differ by 1.2e-07 of the largest value"
    assert found(tmp_path, {"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)})
    assert "float32 in the original, float16 here" in found(tmp_path, {"a": x}, {"a": x.half()})
    assert found(tmp_path, {"a": x[:2]}, {"a": x})
    assert found(tmp_path, {"a": [x, x]}, {"a": [x]})
    assert found(tmp_path, {"a": {"scale": 1.0}}, {"a": {"scale": 2.0}}) == "a: 1.0 in the original, 2.0 here"
    assert found(tmp_path, {"a": x}, {"a": x, "b": x}).startswith("b: only here")
    assert found(tmp_path, {"a": x}, {"error": "E"}) == "original: works; here: E"
    assert "not finite" in found(tmp_path, {"weights": [x]}, {"weights": [x]}), "such cells would show nothing"
    assert verdict.difference("absent", tmp_path, tmp_path) == "original: did not run; here: did not run"


def test_page_counts_and_lists_what_is_wrong():
    rows = [Row("a 1", "a", "", ""), Row("a 2", "a", "x", "why"), Row("b", "b", "y", ""), Row("c", "c", "", "why")]
    text = page(rows, "1234567 of 2025-04-11")
    assert "**2 of 4 cells are bitwise equal**" in text
    assert "| a | 1 | 2 |" in text
    assert "| a 2 | why | x |" in text
    assert [line for line in text.partition("## To be explained")[2].splitlines() if line.startswith("| ")][2:] == [
        "| b | y |",
        "| c | is listed as different, but equal |",
    ]


def test_deliberate_differences_exist_and_are_explained():
    assert [p for p in deliberate.PATTERNS if not any(fnmatchcase(name, p) for name in CELLS)] == []
    section = (ROOT / "docs" / "apex_differences.md").read_text().partition("## Compared with NVIDIA's Apex")[2]
    explained = set(re.findall(r"^\| (.+?) \|", section, re.M))
    assert set(deliberate.PATTERNS.values()) <= explained


def test_published_count_is_that_of_the_table():
    table = (ROOT / "benchmarks" / "results" / "oracle.md").read_text()
    (equal, total), *_ = re.findall(r"\*\*(\d+) of (\d+) cells are bitwise equal", table)
    assert int(total) == len(CELLS), "make oracle writes the table"
    assert "To be explained" not in table
    rows = {family: (same, of) for family, same, of in re.findall(r"^\| ([\w ]+) \| (\d+) \| (\d+) \|$", table, re.M)}
    single = sum(int(rows[family][1]) for family in ("operation", "spelling"))
    assert f" {single} cells test a single operation" in table
    for file in ("README.md", "docs/apex_differences.md"):
        text = " ".join((ROOT / file).read_text().split())
        assert set(re.findall(r"(\d+) of (?:the )?(\d+) (?:small )?scripts", text)) == {(equal, total)}, file
        # The text beside the figure says what it counts.
        assert re.search(rf"\b{single} (?:of the {total}|test a single operation)", text), file
        assert re.search(
            rf"optimizers(?:, | {rows['fused'][1]} scripts? |' {rows['fused'][1]} scripts ){rows['fused'][0]} ", text
        )
    assert rows["SyncBatchNorm"] == ("0", "8"), "the two pages say that none is equal"
