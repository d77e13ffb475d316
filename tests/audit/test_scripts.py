"""The labels of tests/audit/scripts are true, which these tests find out without the auditor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.planted import FOLDER, Session, differences, different_values, kill_step
from tests.audit.scripts.labels import EXACT, NOT_EXACT, SCRIPTS, Label

# What a fault of each class shows to ``differences``; any of them does.
SHOWN_BY = {
    "buffers": {"values"},
    "counter": {"values"},
    "from-scratch": {"scratch"},
    "length": {"length"},
    "exit-code": {"code"},
    "torn-checkpoint": {"scratch", "failed", "trace"},
}


def labels(verdict: str) -> list:
    return [
        pytest.param(label, id=label.name, marks=[pytest.mark.slow] if label.ranks else [])
        for label in SCRIPTS
        if label.verdict == verdict
    ]


def explain(session: Session, undisturbed, resumed) -> str:
    return f"{different_values(undisturbed, resumed)}\n{resumed.output}"


@pytest.mark.parametrize("label", labels(EXACT))
def test_exact(label: Label, tmp_path: Path):
    session = Session(label, tmp_path)
    session.clear()
    undisturbed = session.start()
    assert undisturbed.code == 0, undisturbed.output
    for part in (0.0, 0.6):
        session.clear()
        place = ("step", kill_step(undisturbed, part))
        killed = session.start(kill=place)
        assert killed.code != 0, killed.output
        resumed = session.start(resume=True)
        assert differences(undisturbed, resumed) == set(), (place, explain(session, undisturbed, resumed))
        assert 0 < len(resumed.steps) < len(undisturbed.steps)


@pytest.mark.parametrize("label", labels(NOT_EXACT))
def test_faulty(label: Label, tmp_path: Path):
    session = Session(label, tmp_path)
    session.clear()
    undisturbed = session.start()
    assert undisturbed.code == 0, undisturbed.output
    planted = label.classes[0]
    shown = []
    for part in (0.6, 0.0) if label.kill == "step" else (0.6,):
        session.clear()
        number = kill_step(undisturbed, part) if label.kill == "step" else int(part * len(undisturbed.saves))
        killed = session.start(kill=(label.kill, number))
        assert killed.code != 0, killed.output
        resumed = session.start(resume=True)
        found = differences(undisturbed, resumed)
        why = f"killed at {label.kill} {number}: {found} {explain(session, undisturbed, resumed)}"
        shown.append(bool(SHOWN_BY.get(planted, {"trace"}) & found))
        assert shown[0], why
        assert shown[-1] or label.late, why
        if planted not in ("from-scratch", "torn-checkpoint", "weights"):
            assert not {"scratch", "failed"} & found, why
        if planted == "counter":
            assert "trace" not in found, why


def test_every_script_has_one_label():
    files = [label.file for label in SCRIPTS]
    assert sorted(files) == sorted({path.name for path in FOLDER.glob("*.py")} - {"__init__.py", "labels.py"})
