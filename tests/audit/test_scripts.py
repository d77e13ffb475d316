"""The labels of tests/audit/scripts are true, which these tests find out without the auditor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.audit.planted import Session, differences, different_values, kill_step
from tests.audit.scripts.labels import COULD_NOT_TELL, EXACT, FOLDER, NOT_EXACT, SCRIPTS, Label

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
    """Those with the verdict. All are slow but a few: the first of each class, the first four exact ones."""
    found, seen = [], Counter()
    for label in SCRIPTS:
        if label.verdict == verdict:
            kind = label.classes[0] if label.classes else ""
            quick = seen[kind] < (1 if kind else 4) and not label.ranks
            seen[kind] += 1
            found.append(pytest.param(label, id=label.name, marks=[] if quick else [pytest.mark.slow]))
    return found


def explain(session: Session, undisturbed, resumed) -> str:
    return f"{different_values(undisturbed, resumed)}\n{resumed.output}"


@pytest.mark.parametrize("label", labels(EXACT))
def test_exact(label: Label, tmp_path: Path):
    session = Session(label, tmp_path)
    session.clear()
    undisturbed = session.start()
    assert undisturbed.code == 0, undisturbed.output
    in_a_file = ("write", int(0.6 * len(undisturbed.saves)))
    for place in (("step", kill_step(undisturbed, 0.0)), ("step", kill_step(undisturbed, 0.6)), in_a_file):
        session.clear()
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


@pytest.mark.parametrize("label", labels(COULD_NOT_TELL))
def test_unclear(label: Label, tmp_path: Path):
    session = Session(label, tmp_path)
    starts = []
    for _ in range(2):
        session.clear()
        starts.append(session.start())
        assert starts[-1].code == 0, starts[-1].output
    one, other = starts
    if label.name == "unclear_set_order":
        assert one.steps == other.steps  # see the next test
    elif label.fault == "not deterministic":
        assert one.steps != other.steps
        assert len(set(one.saves)) > 2
    elif label.fault == "no checkpoint":
        assert one.saves == [len(one.steps)]
    else:
        assert len(one.saves) > 2
        assert {name.split(".pt")[0] for name in one.values} == {"out/final"}
    if label.fault != "not deterministic":
        assert one.steps == other.steps


@pytest.mark.slow
def test_hash_seed_decides(tmp_path: Path):
    """Processes that are forked have the same hash seed."""
    results = []
    for seed in "12":
        (tmp_path / seed).mkdir()
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        words = [sys.executable, str(FOLDER / "unclear_set_order.py"), "--output", "."]
        subprocess.run(words, cwd=tmp_path / seed, env=environ, check=True, timeout=200)
        results.append(str(torch.load(tmp_path / seed / "final.pt")["0.weight"].tolist()))
    assert results[0] != results[1]


def test_every_script_has_one_label():
    files = [label.file for label in SCRIPTS]
    whole = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py", "labels.py"}
    assert sorted(files) == sorted(whole | {f"{path.stem}.py" for path in (FOLDER / "faults").iterdir()})


@pytest.mark.parametrize("label", [label for label in SCRIPTS if label.classes], ids=lambda label: label.name)
def test_a_fault_is_a_change_of_an_exact_script(label: Label):
    changes = (FOLDER / "faults" / f"{label.name}.diff").read_text()
    base = next(each for each in SCRIPTS if each.file == changes.splitlines()[0].removeprefix("--- "))
    assert base.verdict == EXACT
    compile(label.source, label.file, "exec")
    assert label.source != base.source
    assert label.line in label.source
