"""Findings, and the lines of a script that they name."""

from __future__ import annotations

import json

import pytest

from harness.audit import records
from harness.audit.verdict import Draw, Finding

SHUFFLE = Draw("numpy", "numpy.random.permutation", "train.py:7")
NOISE = Draw("torch", "torch.randn", "train.py:9")
AUGMENT = Draw("random", "random.random", "data/photos.py:3", worker=True)


@pytest.mark.parametrize(
    ("code", "names", "evidence"),
    [
        ("random-streams", ("numpy",), ["seen", "train.py:7 calls numpy.random.permutation"]),
        ("row-order", (), ["seen", "data/photos.py:3 calls random.random in a loader process"]),
        ("optimizer-state", ("numpy",), ["seen"]),
    ],
)
def test_lines_that_draw_are_evidence(code, names, evidence):
    finding = Finding(code, "text", ("seen",), names=names).with_draws([SHUFFLE, NOISE, AUGMENT])
    assert list(finding.evidence) == evidence
    assert finding.place == ""


def test_evidence_says_how_much_more_there_is():
    found = Finding("other", "text").with_lines([*"abcdefg"]).with_lines(["sum"])
    assert found.evidence == (*"abcde", "and 2 more", "sum")


def test_draws_are_read_once_each_those_of_the_script_first(tmp_path):
    library = Draw("torch", "torch.randperm", f"{tmp_path}/library/sampler.py:8")
    work = tmp_path / "work"
    for pid in (1, 2):  # two loader processes draw at the same line
        lines = [
            {"event": "draw", "stream": draw.stream, "function": draw.function, "worker": draw.worker,
             "file": str(work / draw.place.partition(":")[0]), "line": int(draw.place.partition(":")[2])}
            for draw in (library, NOISE, AUGMENT)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"draws-{pid}.jsonl").write_text(text + '{"torn')
    assert records.draws(tmp_path, work) == [NOISE, AUGMENT, library]
