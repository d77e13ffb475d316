"""``harness verify-resume``: exact for sound configurations; planted faults are found and named."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from harness.audit import kills
from harness.audit.audit import audit
from harness.cli import main
from harness.config import loader
from harness.errors import HarnessError
from harness.tools.compare.exactness import Difference, TensorDifference, ValueDifference
from harness.tools.compare.first_difference import FirstDifference
from harness.tools.verify_resume import verification
from harness.tools.verify_resume.verification import Length
from tests.conftest import ROOT
from tests.end_to_end import planted
from tests.end_to_end.experiment import write_config, write_images
from tests.end_to_end.planted import line_of, write_planted
from tests.end_to_end.processes import python

HERE = Path(planted.__file__).relative_to(ROOT)
COUNTING = {"name": f"{planted.__name__}.Counting", "args": {}}


def verify_resume(config: Path, *words: str) -> tuple[int, str]:
    """(exit code, output) of the command."""
    terminal = config.parent / "terminal.txt"
    code = python(["-m", "harness", "verify-resume", "-c", config, *words], terminal)
    return code, terminal.read_text()


def test_other_numbers_of_ranks_need_logical_ranks(tmp_path):
    config = write_config(tmp_path, write_images(tmp_path / "data"))
    code, out = verify_resume(config, "--nproc", "1,3", "parallel.logical_ranks=2", "batch.global=12")
    assert code == 2
    assert "parallel.logical_ranks=3" in out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_resumes_on_other_numbers_of_ranks_are_exact(tmp_path):
    config = write_config(tmp_path, write_images(tmp_path / "data"), parallel={"logical_ranks": 2})
    code, out = verify_resume(config, "--nproc", "2,1", "--kills", "2", "--json")
    assert code == 0, out
    starts = json.loads(out[out.index("{\n") :])["starts"]
    assert [(start["name"], start["ranks"]) for start in starts] == [
        ("undisturbed", 2), ("again", 2), ("killed", 1), ("resumed", 2), ("killed-2", 1), ("resumed-2", 2)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_kill_in_an_evaluation_comes_there_on_other_numbers_of_ranks(tmp_path, monkeypatch):
    """Two ranks have half as many batches each."""
    config = write_config(tmp_path, write_images(tmp_path / "data"), parallel={"logical_ranks": 2})
    made, _ = verification.request(str(config), [], [1, 2, 2], 9, False, kills="1", folder=tmp_path / "kept")
    chosen: list[kills.ChosenKill] = []

    def last_before_the_end(shape: kills.RunShape, *_: object) -> list[kills.ChosenKill]:
        chosen.append([each for each in shape.evaluations if each.after < shape.steps][-1])
        return chosen

    monkeypatch.setattr(importlib.import_module("harness.audit.audit"), "choose", last_before_the_end)
    verdict = audit(made, lambda _: None)
    assert verdict.kind == "exact", verdict.findings
    killed, resumed = verdict.starts[2:]
    assert killed.killed is not None
    assert (killed.killed["place"], killed.killed["step"]) == ("evaluation", chosen[0].after)
    assert (killed.ranks, resumed.ranks, resumed.offset, resumed.differs) == (2, 2, chosen[0].after, None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sound_configuration_is_exact(tmp_path):
    """On one rank; that of ``test_docs.py`` has two."""
    model = {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}}
    config = write_config(tmp_path, write_images(tmp_path / "data"), model=model, data={"num_workers": 1})
    folder = tmp_path / "kept"
    code, out = verify_resume(config, "--kills", "4", "--folder", str(folder))
    assert code == 0, out
    assert "changed for the test: train.max_steps null -> 14" in out
    assert len(re.findall(r"^killed(?:-\d)?: .*; killed ", out, re.M)) == 4
    assert re.search(r"^exact: killed 4 times and resumed, .* \(14 steps\)", out, re.M)
    assert "checkpoints, log, summary" in out
    assert "resumed from" in (folder / "kept" / "resumed" / "output.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_files_that_differ_while_training_is_equal(tmp_path, monkeypatch):
    """A resumed run whose log has another line."""
    config = write_config(tmp_path, write_images(tmp_path / "data"))
    made, _ = verification.request(str(config), [], [1], 6, False, kills="1", folder=tmp_path / "kept")

    def results(one: Path, other: Path) -> list[str]:
        (other / "run" / "metrics.jsonl").open("a").write('{"split": "train", "step": 99}\n')
        return made.results(one, other)

    verdict = audit(dataclasses.replace(made, results=results), lambda _: None)
    assert (verdict.kind, verdict.findings[0].code) == ("not exact", "files"), verdict.findings[0]
    assert "number of lines" in verdict.findings[0].text


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_without_a_checkpoint_in_the_middle_nothing_can_be_told(tmp_path):
    config = write_config(tmp_path, write_images(tmp_path / "data"))
    code, out = verify_resume(config, "--kills", "1", "--steps", "3", "checkpoint.every=100", "train.evaluate_every=1")
    assert code == 3
    assert "no-checkpoint: no checkpoint was seen" in out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_that_a_kill_reveals_are_named(tmp_path):
    config = write_planted(tmp_path, "random-numpy-managed", model=COUNTING)
    code, out = verify_resume(config, "--kills", "1", "--steps", "6")
    assert code == 1, out
    assert f"{HERE}:{line_of('random')} calls random.random in a loader process" in out
    assert f"{HERE}:{line_of('numpy')} calls numpy.random.rand in a loader process" in out
    assert "driver.py" not in out
    values = re.search(r"Counting\.calls \(tests\.end_to_end\.planted\.Counting\) is (\d) instead of (\d): no", out)
    assert values, out
    assert values[1] < values[2]
    kept = re.search(r"all starts are kept in (\S+)", out)
    assert kept, out
    assert Path(kept[1]).is_dir()


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("plant", "cause"),
    [("entropy", "{here}:{line} calls os.urandom"), ("hash", "with PYTHONHASHSEED=0, two starts are equal")],
)
def test_run_that_never_repeats_is_not_blamed_on_the_resume(tmp_path, plant, cause):
    code, out = verify_resume(write_planted(tmp_path, plant), "--kills", "1", "--steps", "4")
    assert code == 3, out
    assert "not-deterministic: two equal starts differ" in out
    assert cause.format(here=HERE, line=line_of(plant)) in out


@pytest.mark.parametrize(("engine", "alone"), [("local", 0.5), ("torchrun", 0.5), ("slurm", 1.0), ("dask", 1.0)])
def test_ranks_that_do_not_inherit_the_environment_kill_themselves(tmp_path, monkeypatch, engine, alone):
    monkeypatch.setattr(verification, "examine", lambda *_: Length(5, 15))
    config = write_config(tmp_path, write_images(tmp_path / "data"))
    made, _ = verification.request(str(config), [f"launch.engine={engine}", "launch.nproc=2"], [], None, False)
    assert (made.ranks, made.alone, made.copies) == (2, alone, False)
    assert ("launch.env.RESUME_AUDIT={plan}" in made.command) == (alone == 1.0)
    assert "trackers=[]" in made.command
    assert "output={out}" in made.command


@pytest.mark.parametrize(
    ("stdout", "code", "expected"),
    [
        ('loading my data\n{"facts": {"steps per epoch": 5, "steps": 15}, "errors": []}\n', 0, Length(5, 15)),
        (
            '{"facts": {}, "errors": [{"message": "no rows", "where": "a.csv", "hint": "add some"}]}',
            65,
            "a.csv: no rows",
        ),
        ("loading my data\n", -11, "died in C++"),
    ],
)
def test_length_is_read_from_the_record_of_check(monkeypatch, stdout, code, expected):
    done = subprocess.CompletedProcess([], code, stdout, "died in C++")
    monkeypatch.setattr(verification.subprocess, "run", lambda *_, **__: done)
    if isinstance(expected, Length):
        assert verification.examine("x.yaml", [], 1) == expected
    else:
        with pytest.raises(HarnessError, match=re.escape(expected)) as raised:
            verification.examine("x.yaml", [], 1)
        assert raised.value.exit_code == code


def test_wrong_configurations_end_at_once(tmp_path, capsys):
    config = write_planted(tmp_path, "")
    assert main(["verify-resume", "-c", str(config), "train.epoch=3"]) == 2
    assert "train.epochs" in capsys.readouterr().err
    assert main(["verify-resume", "-c", str(config), "--folder", str(tmp_path)]) == 2
    assert "the folder is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["verify-resume", "-c", str(config), "--kills", "0"])
    assert ended.value.code == 2


def test_run_is_shortened_to_an_epoch_and_a_half(tmp_path):
    config = loader.load(write_planted(tmp_path, "", train={"epochs": 100, "log_every": 1}))

    def short(length: Length, *overrides: str, steps: int | None = None) -> dict[str, str]:
        changes = verification.shortened(config, overrides, length, steps)
        return {key: now for key, (_, now) in changes.items()}

    assert short(Length(20, 2000)) == {
        "train.max_steps": "30", "checkpoint.every": "4", "checkpoint.keep": "1000"
    }  # fmt: skip
    long = short(Length(5000, 500000))
    assert (long["train.max_steps"], long["train.evaluate_every"]) == ("24", "12 steps")
    assert short(Length(5000, 500000), steps=1)["train.evaluate_every"] == "1 steps"
    assert short(Length(5000, 500000), steps=70)["checkpoint.every"] == "10"
    assert "train.max_steps" not in short(Length(4, 8))
    assert "checkpoint.every" not in short(Length(20, 2000), "checkpoint.every=1")


def test_the_place_where_runs_first_differ():
    def saved(step: int, name: str) -> Difference:
        return Difference(f"checkpoints/step-{step}", TensorDifference(name, 0.5), step)

    logged = Difference("metrics.jsonl:7", ValueDifference("train entry of step 7.loss", (1.0, 2.0)), 7)
    found = [
        logged,
        *(saved(step, name) for step in (8, 12) for name in ("model.w", "model.b", "optimizer.x", "ema.w")),
    ]
    first = FirstDifference(found, [4, 8, 12])
    assert (first.step, first.equal) == (7, [4])
    assert list(first.lines()) == [
        "first difference in the log: metrics.jsonl:7: train entry of step 7.loss: 1.0 and 2.0",
        "first checkpoint that differs: step 8",
        "  weights: w (up to 0.5), b (up to 0.5)",
        "  optimizer state: x (up to 0.5)",
        "  moving average: w (up to 0.5)",
        "equal up to and including the checkpoint of step 4",
    ]
