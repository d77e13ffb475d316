"""The verdict in the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.audit import diagnosis, text
from harness.audit.verdict import FAULTS, UNDECIDED, Finding, Verdict, conclude
from tests.audit.synthetic import Starts, Training


@pytest.fixture
def exact(tmp_path: Path) -> Verdict:
    records = Starts(Training()).read(tmp_path)
    return conclude(diagnosis.compare(*records), diagnosis.summaries(records), ["data is linked, not copied"])


@pytest.fixture
def faulty(tmp_path: Path) -> Verdict:
    starts = Starts(Training())
    starts.apart(14)
    for step in starts.steps("resumed")[:1]:
        step["state"] = {}
    for step in starts.steps("resumed"):
        step["groups"] = starts.training.step(step["number"])["groups"]
    records = starts.read(tmp_path)
    return conclude(diagnosis.compare(*records), diagnosis.summaries(records))


def test_text_of_an_exact_resume(exact: Verdict):
    shown = list(text.lines(exact))
    assert shown[-1].startswith("exact: killed 1 time and resumed")
    assert shown[-1].endswith("(24 steps), killed before step 16 (--kills tries other places)")
    assert shown[0].startswith("undisturbed: 24 steps in 1.5 s; checkpoints after step 6, 12, 18, 24")
    assert "killed: 15 steps in 1.5 s; checkpoints after step 6, 12; killed before step 16" in shown
    assert "resumed: steps 13 to 24 in 1.5 s; checkpoints after step 18, 24" in shown
    assert "note: data is linked, not copied" in shown
    assert exact.exit_code == 0


def test_text_of_faults(faulty: Verdict):
    shown = list(text.lines(faulty))
    assert shown[-1] == "not exact: the optimizer's state is not restored"
    assert "resumed: steps 13 to 24 in 1.5 s; checkpoints after step 18, 24; differs from step 13 on" in shown
    code = shown.index("optimizer-state: the optimizer's state is not restored")
    assert "momentum" in shown[code + 1]
    assert any(line.startswith("  -> save and load optimizer.state_dict()") for line in shown)
    assert faulty.exit_code == 1


@pytest.mark.parametrize("verdict", ["exact", "faulty"])
def test_json(verdict, request):
    verdict = request.getfixturevalue(verdict)
    content = json.loads(json.dumps(verdict.as_json()))
    assert content["format"] == 1
    assert content["verdict"] == verdict.kind
    assert content["exit_code"] == verdict.exit_code
    assert [start["name"] for start in content["starts"]] == ["undisturbed", "again", "killed", "resumed"]
    assert [start["offset"] for start in content["starts"]] == [0, 0, 0, 12]
    assert [finding["code"] for finding in content["findings"]] == [finding.code for finding in verdict.findings]
    for finding in content["findings"]:
        assert finding["text"]
        assert finding["title"]
        assert finding["steps"]


def test_every_code_has_a_title_and_an_exit_code():
    for codes, exit_code in ((FAULTS, 1), (UNDECIDED, 3)):
        for code in codes:
            verdict = conclude([Finding(code, "text")])
            assert verdict.exit_code == exit_code
            assert code in "\n".join(text.lines(verdict))


def test_a_reason_for_no_verdict_hides_faults():
    verdict = conclude([Finding("rows", "text"), Finding("resumes-differ", "text")])
    assert (verdict.kind, len(verdict.findings)) == ("could not tell", 1)
