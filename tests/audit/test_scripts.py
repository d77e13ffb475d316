"""Every script of tests/audit/scripts has a label, and a planted fault is a change of an exact one. Whether a label is
true, the auditor finds out: test_verdict_scripts.py for some, ``python -m benchmarks.resume_audit`` for all.
"""

from __future__ import annotations

import pytest

from tests.audit.scripts.labels import EXACT, FOLDER, SCRIPTS, Label


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
