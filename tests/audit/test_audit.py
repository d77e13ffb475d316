from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.audit import page, records
from harness.audit.audit import AuditRequest, _Audit, _size, audit
from harness.audit.verdict import COULD_NOT_TELL, EXACT, NOT_EXACT, Draw, Finding, Verdict
from harness.errors import ConfigError
from tests.audit import fake_training
from tests.conftest import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(fake_training.__file__, folder)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return folder


def run(project: Path, *words: str, say=None, **options) -> tuple[Verdict, list[str]]:
    """Audit fake_training.py; return the verdict and what was printed."""
    printed: list[str] = []
    command = [sys.executable, "fake_training.py", *words]
    options = {"resume": "--resume {latest}", "timeout_s": 60.0, "source": project, **options}
    return audit(AuditRequest(command, **options), say or printed.append), printed


def names(printed: list[str]) -> list[str]:
    return [line.split("'")[1] for line in printed if line.startswith("starting")]


def test_exact(project, tmp_path):
    verdict, printed = run(project, "--out", "{out}")
    assert (verdict.kind, verdict.findings) == (EXACT, ())
    assert names(printed) == ["undisturbed", "again", "killed", "resumed"]
    assert "before step 8, 1 step after the checkpoint of step 6" in printed[4]
    assert "from out/step-6.pt" in printed[5]
    assert os.listdir(project) == ["fake_training.py"]
    assert os.listdir(tmp_path / "temporary") == []


def test_every_kind_of_kill(project, tmp_path):
    folder = tmp_path / "kept"
    verdict, printed = run(project, kills="all", folder=folder)
    assert verdict.kind == EXACT
    assert [line.rsplit(" ", 1)[1] for line in printed if "'resumed" in line] == [
        f"work/results/step-{step}.pt" for step in (6, 6, 3, 3)
    ]
    assert sorted(path.name for path in (folder / "kept").iterdir()) == sorted(
        [
            "undisturbed",
            "again",
            *(f"{name}{number}" for name in ("killed", "resumed") for number in ("", "-2", "-3", "-4")),
        ]
    )


def test_not_exact_after_a_second_look(project):
    verdict, printed = run(project, "--fault", "forget")
    assert verdict.kind == NOT_EXACT
    observed = ["observed", "observed-again"]
    assert names(printed) == ["undisturbed", "again", "killed", "resumed", "resumed-again", *observed]
    size, removal = re.fullmatch(
        r"all starts are kept in .* \(([\d.]+) MB; remove it: rm -r (.*)\)", verdict.kept
    ).groups()
    assert float(size) > 0
    assert (Path(removal) / "kept" / "resumed").is_dir()
    assert [*page.lines(verdict)][-1] == verdict.as_json()["notes"][-1] == verdict.kept


def test_a_resume_without_a_step_is_not_compared_further(project):
    verdict, printed = run(project, "--fault", "refuse")
    assert (verdict.kind, verdict.findings[0].code) == (NOT_EXACT, "other")
    assert names(printed) == ["undisturbed", "again", "killed", "resumed", "resumed-again"]


def test_two_resumes_that_differ_are_not_blamed(project):
    verdict, _ = run(project, resume="--resume {latest} --fault chance")
    assert (verdict.kind, verdict.findings[0].code) == (COULD_NOT_TELL, "resumes-differ")
    assert "differ first after step 1: the weights" in verdict.findings[0].evidence[0]


def test_a_second_resume_repeats_the_first_on_as_many_ranks(project):
    """Starts whose words differ, as with ``--nproc 2,1``, and results that differ."""
    variants = [["--steps", "12"], ["--steps=12"]]
    verdict, _ = run(project, variants=variants, results=lambda one, other: [f"{one.name} differs"])
    assert (verdict.kind, verdict.findings[0].code) == (NOT_EXACT, "files")
    joined = {start.name: "--steps=12" in start.command for start in verdict.starts}
    names = ("undisturbed", "again", "killed", "resumed", "resumed-again")
    assert [joined[name] for name in names] == [False, False, True, False, False]


def test_kills_that_show_the_same_or_nothing(project):
    verdict, printed = run(project, "--fault", "forget", kills="all")
    (finding,) = verdict.findings
    assert verdict.kind == NOT_EXACT
    assert finding.evidence[-1] == "the same fault after 3 more kills"
    verdict, _ = run(project, "--fault", "forget", kills="all", checkpoints="results/step-6.pt")
    assert verdict.kind == NOT_EXACT
    assert verdict.notes[-1].startswith("another kill tells nothing: after the kill at the end of an epoch")


@pytest.mark.parametrize("fault", ["chance", "dice"])
def test_a_run_that_differs_by_chance_is_not_blamed(project, fault):
    """Nor is the order of sets, if the starts differ without it, too."""
    verdict, printed = run(project, "--fault", fault)
    assert (verdict.kind, verdict.findings[0].code) == (COULD_NOT_TELL, "not-deterministic")
    assert names(printed) == ["undisturbed", "again", "observed", "hashes", "hashes-again"]
    assert not [line for line in verdict.findings[0].evidence if "PYTHONHASHSEED" in line]


def test_a_fault_that_one_kill_may_explain_stays_after_another():
    found = [Finding("unsaved-state", "a", steps=(3,)), Finding("other", "b", steps=(9,)), Finding("other", "it fails")]
    merged = _Audit._merged(SimpleNamespace(_notes=[]), found)
    assert [each.text for each in merged] == ["a", "b", "it fails"]
    assert ["may explain it" in "".join(each.evidence) for each in merged] == [False, True, False]


def test_an_unknown_fault_that_shows_as_a_named_one_is_that_one():
    first, second = (f"the first difference, at step {number}, is in the weights" for number in (6, 12))
    named, unknown = Finding("unsaved-state", first, steps=(6,)), Finding("other", second, steps=(12,))
    for found in ([named, unknown], [unknown, named]):
        (one,) = _Audit._merged(SimpleNamespace(_notes=[]), found)
        assert (one.code, one.text, one.evidence) == ("unsaved-state", first, ("the same fault after 1 more kill",))


def test_files_that_vanish_have_no_size(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "stays").write_bytes(b"123")
    (tmp_path / "gone").touch()
    lstat = os.lstat
    monkeypatch.setattr(
        os, "lstat", lambda path, **options: lstat(path if "gone" not in str(path) else "no", **options)
    )
    assert _size(tmp_path) == 3


def test_a_generator_without_a_seed_is_what_chance_comes_from(project, monkeypatch):
    monkeypatch.setattr(records, "draws", lambda *_: [Draw("entropy", "os.urandom", "train.py:3")])
    finding = run(project, "--fault", "chance")[0].findings[0]
    assert finding.evidence[0] == "train.py:3 calls os.urandom: a generator without a fixed seed"
    assert finding.advice.startswith("give it a seed: ")


@pytest.mark.parametrize(
    ("words", "options", "code", "text"),
    [
        (["--fault", "fail"], {}, "fails", "exit code 1"),
        (["--fault", "quiet"], {}, "no-steps", "never imported torch"),
        (["--fault", "hang"], {"timeout_s": 1.0}, "fails", "made no progress for 1 s"),
        (["--save-every", "100"], {}, "no-checkpoint", "wrote no checkpoint"),
        (["--save-every", "12"], {}, "no-checkpoint", "at the very end"),
        (["--fault", "absolute:/OTHER"], {}, "outside", "/OTHER/step-12.pt, outside the working folder"),
        ([], {"checkpoints": "*.ckpt"}, "no-checkpoint", "nothing matches --checkpoints *.ckpt"),
    ],
)
def test_could_not_tell(project, tmp_path, words, options, code, text):
    verdict, _ = run(project, *(word.replace("/OTHER", str(tmp_path)) for word in words), **options)
    assert (verdict.kind, verdict.exit_code, verdict.findings[0].code) == (COULD_NOT_TELL, 3, code)
    assert text.replace("/OTHER", str(tmp_path)) in verdict.findings[0].text
    if "fail" in words:
        assert "there is no data" in verdict.findings[0].evidence


def test_limited_steps(project):
    verdict, _ = run(project, "--steps", "1000", steps=10)
    assert verdict.kind == EXACT
    assert [(start.name, start.steps) for start in verdict.starts] == [
        ("undisturbed", 10), ("again", 10), ("killed", 7), ("resumed", 4)
    ]  # fmt: skip


def test_checkpoints_by_a_pattern(project):
    _, printed = run(project, "--out", "{out}", checkpoints="{out}/step-3*")
    assert "from out/step-3.pt" in printed[-1]


def test_latest_belongs_to_resumed_starts(project):
    with pytest.raises(ConfigError, match="--resume"):
        run(project, "--resume", "{latest}")


def test_an_error_after_the_copy_is_not_called_one_of_it(project, monkeypatch):
    def lost(folder):
        raise FileNotFoundError("a record")

    monkeypatch.setattr(records, "read", lost)
    with pytest.raises(FileNotFoundError, match="a record"):
        run(project)


def test_a_folder_in_use_is_refused(project, tmp_path):
    with pytest.raises(ConfigError, match="not empty"):
        run(project, folder=tmp_path)


@pytest.mark.parametrize(
    ("number", "words", "hangs", "printed"),
    [
        (
            signal.SIGINT, ["--", sys.executable, "fake_training.py", "--fault", "hang"], "undisturbed",
            ["no verdict: interrupted in 'undisturbed'; ended before: no start",
             "the two undisturbed starts have not been compared",
             "its files: removed (--folder FOLDER keeps them)"],
        ),
        (
            signal.SIGTERM,
            ["--folder", "KEPT", "--kills", "2", "--resume", "--resume {latest} --fault hang", "--", sys.executable,
             "fake_training.py"], "resumed",
            [r"no verdict: interrupted in 'resumed'; ended before: undisturbed \(12 steps, . s\), again .*, killed .*",
             "the two undisturbed starts are equal", "2 kills of 2 not judged", "its files: KEPT"],
        ),
    ],
)  # fmt: skip
def test_an_interrupt_tells_what_was_found_and_leaves_no_process(project, tmp_path, number, words, hangs, printed):
    temporary, kept = tmp_path / "temporary", tmp_path / "kept"
    words = [word.replace("KEPT", str(kept)) for word in words]
    environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness", "verify-resume", *words]

    def found() -> list[Path]:
        return [*tmp_path.glob(f"**/records/{hangs}/rank0-*")]

    with subprocess.Popen(command, cwd=project, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        fake_training.until(found)
        pid = int(found()[0].stem.split("-")[1])
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.decode().strip()) == (128 + number, f"interrupted ({number.name})")
    lines = output.decode().splitlines()[-len(printed) :]
    for line, expected in zip(lines, printed, strict=True):
        assert line == expected or re.fullmatch(expected.replace("KEPT", str(kept)), line), lines
    assert os.listdir(temporary) == []
    assert kept.exists() == ("--folder" in words)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupt_after_a_fault_keeps_its_files(project):
    """In the second look at a kill, after the first kill was judged."""
    printed: list[str] = []

    def say(line: str) -> None:
        printed.append(line)
        if line.startswith("starting 'resumed-again-2'"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(project, "--fault", "forget", kills="2", say=say)
    first, second, files = printed[-3:]
    assert re.fullmatch(r"kill 1 of 2, .*: not exact; rows: rows are repeated or skipped", first)
    assert re.fullmatch(r"kill 2 of 2, .*: not exact; rows: .*", second)
    assert (Path(files.removeprefix("its files: ")) / "kept" / "resumed").is_dir()


def test_the_length_is_estimated_after_the_first_start(project):
    _, printed = run(project, "--steps", "1000", steps=10, kills="2")
    expected = (
        r"the first start took \d s for 10 steps; 5 more of about that length or less: \d s to \d s, and longer .*"
    )
    assert re.fullmatch(expected, printed[1]), printed[1]
    assert printed[2].startswith("steps: calls of optimizer.step()")
    assert printed[3] == "starting 'again'"
