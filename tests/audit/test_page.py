"""The verdict in the terminal, as a page and as JSON."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.audit import diagnosis, page
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


class Reader(HTMLParser):
    """Checks that each tag is closed, and collects what is read and what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.fetched = "", []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.fetched += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def classes(self) -> list[str]:
        return [attributes["class"] for _, attributes in self.tags if "class" in attributes]


def test_text_of_an_exact_resume(exact: Verdict):
    shown = list(page.lines(exact))
    assert shown[-1].startswith("exact: killed 1 time and resumed")
    assert shown[-1].endswith("(24 steps), killed before step 16 (--kills tries other places)")
    assert shown[0].startswith("undisturbed: 24 steps in 1.5 s; checkpoints after step 6, 12, 18, 24")
    assert "killed: 15 steps in 1.5 s; checkpoints after step 6, 12; killed before step 16" in shown
    assert "resumed: steps 13 to 24 in 1.5 s; checkpoints after step 18, 24" in shown
    assert "note: data is linked, not copied" in shown
    assert exact.exit_code == 0


def test_text_of_faults(faulty: Verdict):
    shown = list(page.lines(faulty))
    assert shown[-1] == "not exact: the optimizer's state is not restored"
    assert "resumed: steps 13 to 24 in 1.5 s; checkpoints after step 18, 24; differs from step 13 on" in shown
    code = shown.index("optimizer-state: the optimizer's state is not restored")
    assert "momentum" in shown[code + 1]
    assert any(line.startswith("  -> save and load optimizer.state_dict()") for line in shown)
    assert faulty.exit_code == 1


def test_page(faulty: Verdict):
    reader = Reader(page.html(faulty))
    for finding in faulty.findings:
        assert finding.text in reader.text
        assert finding.advice in reader.text
    assert reader.text.count("python train.py") == len(faulty.starts)
    assert "torch 2.9" in reader.text
    assert "matches step 13" in reader.text
    assert reader.classes().count("kill") == reader.classes().count("differs") == 1
    assert reader.classes().count("saved") == 4 + 4 + 2 + 2
    assert reader.fetched == []
    assert not re.search(r"https?:|url\(|@import", page.html(faulty))


def test_drawing_places_steps_below_each_other(exact: Verdict):
    bars = [attributes for _, attributes in Reader(page.html(exact)).tags if attributes.get("class") == "bar"]
    ends = [(float(bar["x1"]), float(bar["x2"])) for bar in bars]
    (begin, end), (_, again), (_, killed), (resumed, last) = ends
    assert end == again == last
    assert begin < resumed < killed < end
    assert resumed - begin == pytest.approx((end - begin) / 2, abs=0.2)


def test_page_escapes_names():
    finding = Finding("counter", "<script>alert(1)</script>", ("a & b",), names=("<b>", "c"), place="train.py:3")
    reader = Reader(page.html(conclude([finding])))
    assert "<script>alert(1)</script>" in reader.text
    assert "train.py:3" in reader.text


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
            assert code in "\n".join(page.lines(verdict))


def test_a_reason_for_no_verdict_hides_faults():
    verdict = conclude([Finding("rows", "text"), Finding("resumes-differ", "text")])
    assert (verdict.kind, len(verdict.findings)) == ("could not tell", 1)
