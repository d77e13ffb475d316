"""Audits the scripts of tests/audit/scripts, whose faults are known, with ``harness verify-resume``.

    python -m benchmarks.resume_audit [--only TEXT ...] [--jobs 2]

It writes benchmarks/results/resume_audit.md, and returns 1 if a verdict is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import machine
from harness.audit import kills
from harness.audit.audit import AuditRequest, audit
from harness.audit.verdict import NOT_EXACT, Verdict
from tests.audit.scripts.labels import SCRIPTS, Label

_TIMEOUT_S = 300.0


def audited(label: Label) -> tuple[Verdict, float]:
    """Return the verdict about a script, and the seconds that it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / label.file).write_text(label.source)
        request = AuditRequest(
            [sys.executable, *label.python],
            resume=" ".join(label.resume),
            kills=kills.ALL if label.kill == "write" else kills.MIDDLE,
            timeout_s=_TIMEOUT_S,
            source=Path(folder),
        )
        verdict = audit(request, lambda line: None)
    return verdict, time.monotonic() - began


def is_right(label: Label, verdict: Verdict) -> bool:
    """True if the verdict is the right one and, for a fault, its first finding names the planted class or another
    that a careful person could choose."""
    if verdict.kind != label.verdict:
        return False
    return label.verdict != NOT_EXACT or verdict.findings[0].code in label.classes


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume_audit", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="scripts with this text in their names")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    arguments = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [label for label in SCRIPTS if any(text in label.name for text in arguments.only)]
    if not chosen:
        parser.error(f"no script has {' or '.join(arguments.only)} in its name")
    rows, right = [], 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for label, (verdict, wall_s) in zip(chosen, pool.map(audited, chosen), strict=True):
            right += is_right(label, verdict)
            expected = label.classes[0] if label.classes else label.verdict
            codes = ", ".join(finding.code for finding in verdict.findings)
            answer = "yes" if is_right(label, verdict) else "**no**"
            costs = [str(len(verdict.starts)), f"{wall_s:.0f}"]
            rows.append([label.name, label.fault or "-", expected, verdict.kind, codes or "-", answer, *costs])
            print(" | ".join(rows[-1]), *(f"\n    {finding.text}" for finding in verdict.findings), flush=True)
    print(f"{right} of {len(chosen)} right")
    if arguments.only == [""]:
        header = ["script", "planted fault", "expected", "verdict", "found", "right", "starts", "seconds"]
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        text = (
            f"`python -m benchmarks.resume_audit` at commit {commit.stdout.strip()}: {right} of {len(chosen)} verdicts "
            "are right. A fault counts as found if the first finding names its class.\n\n" + machine.table(header, rows)
        )
        machine.write("resume_audit", "Scripts with known faults, audited", text)
    return int(right != len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
