"""``harness verify-resume`` on real scripts: a fault of each class is named, and none is found where there is none.

All scripts are in benchmarks/results/resume_audit.md.
"""

from __future__ import annotations

import pytest

from benchmarks.resume_audit import audited, is_right
from harness.audit.verdict import COULD_NOT_TELL, EXACT, FAULTS
from tests.audit.scripts.labels import SCRIPTS

EXACT_ONES = ("exact_accumulation", "exact_apex_o2", "exact_ddp", "exact_nanogpt")


def chosen():
    """Some exact scripts, the first script of each class, and one of which nothing can be told."""
    of_class = {}
    for label in SCRIPTS:
        if label.classes:
            of_class.setdefault(label.classes[0], label)
    assert set(of_class) == set(FAULTS) - {"other", "files", "hang", "saved-state", "unsaved-state"}
    unclear = next(label for label in SCRIPTS if label.verdict == COULD_NOT_TELL)
    exact = [label for label in SCRIPTS if label.name in EXACT_ONES]
    assert {label.verdict for label in exact} == {EXACT}
    return [*exact, *of_class.values(), unclear]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "label",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * bool(number)) for number, each in enumerate(chosen())],
)
def test_verdict(label, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    verdict = audited(label)[0]
    assert is_right(label, verdict), verdict
