"""``harness verify-resume``: exact for sound configurations; planted faults are found and named."""

from __future__ import annotations

import random
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli import main
from harness.config import loader
from harness.errors import HarnessError
from harness.tools.compare import diagnosis, kill_plan, starts, verification
from harness.tools.compare.exactness import Difference
from harness.tools.compare.first_difference import FirstDifference
from harness.tools.compare.saved_state import StateDifference
from harness.tools.compare.starts import Length
from tests.conftest import ROOT
from tests.end_to_end import planted
from tests.end_to_end.experiment import write_config, write_images
from tests.end_to_end.planted import line_of, write_planted
from tests.end_to_end.processes import fork_commands, python
from tests.ranks import run_ranks

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
@pytest.mark.timeout(280)
def test_resumes_on_other_numbers_of_ranks_are_exact(tmp_path):
    config = write_config(tmp_path, write_images(tmp_path / "data"), parallel={"logical_ranks": 2})
    code, out = verify_resume(config, "--nproc", "2,1", "--kills", "2")
    assert code == 0, out
    assert [line.partition("(on ")[2].partition(")")[0] for line in out.splitlines() if line.startswith("kill ")] == [
        "1 rank",
        "2 ranks",
    ]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_sound_configuration_is_exact(tmp_path):
    """On one rank; that of ``test_docs.py`` has two."""
    model = {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}}
    config = write_config(tmp_path, write_images(tmp_path / "data"), model=model, data={"num_workers": 1})
    folder = tmp_path / "kept"
    code, out = verify_resume(config, "--kills", "4", "--folder", str(folder))
    assert code == 0, out
    assert "changed for the test: train.max_steps null -> 14" in out
    assert "14 steps, 1 epoch end, 2 evaluations, 7 checkpoints" in out
    assert len(re.findall(r"^kill \d of 4: ", out, re.M)) == 4
    assert "while writing the checkpoint at step" in out
    assert "during the evaluation at step" in out
    assert re.search(
        r"^exact: killed 4 times, the run equals the uninterrupted one bit for bit \(7 checkpoints, ", out, re.M
    )
    assert (folder / "output.txt").read_text().count("resumed from") >= 3


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_without_a_resume_in_the_middle_nothing_was_tested(tmp_path):
    config = write_config(tmp_path, write_images(tmp_path / "data"))
    code, out = verify_resume(config, "--kills", "1", "--steps", "3", "checkpoint.every=100")
    assert "not tested: the run has no checkpoint before its last step; set checkpoint.every" in out
    assert "exact:" not in out
    assert code == 1


@pytest.mark.parametrize(
    ("starts", "kills", "checkpoints", "reason"),
    [
        ([0, 5], 1, [5, 10], ""),
        ([0, 5, None], 2, [5, 10], ""),
        ([0, 10], 3, [5, 10], "no start resumed"),
        ([0, 0], 1, [5, 10], "no start resumed"),
        ([0, 10], 1, [10], "no checkpoint before its last step"),
        ([0], 0, [5, 10], "ended before the first kill"),
    ],
)
def test_equal_runs_prove_nothing_unless_one_resumed_in_the_middle(starts, kills, checkpoints, reason):
    done = SimpleNamespace(checkpoints=checkpoints, last=10)
    provenance = [{} if step is None else {"length": {"step": step}} for step in starts]  # None: nothing was left
    why = verification._why_not_tested(kills, verification.resumes(provenance), done)
    assert reason in why
    assert bool(why) == bool(reason)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_faults_that_a_kill_reveals_are_named(tmp_path):
    config = write_planted(tmp_path, "random-numpy-managed", model=COUNTING)
    code, out = verify_resume(config, "--kills", "1", "--steps", "6")
    assert code == 1, out
    assert "not exact: the killed run differs from the uninterrupted one" in out
    assert "two uninterrupted runs are equal" in out
    assert re.search(r"first difference in the log: metrics.jsonl:\d+: (train|eval) entry of step \d.loss: ", out)
    assert f"{HERE}:{line_of('random')}: random.random draws from the global random number generator of a loader" in out
    assert f"{HERE}:{line_of('numpy')}: numpy.random.rand draws" in out
    counter = (
        r"model\.calls \(tests\.end_to_end\.planted\.Counting\) .* is (\d) in the uninterrupted run, (\d) in a resumed"
    )
    values = re.search(counter, out)
    assert values, out
    assert values[1] > values[2]
    kept = re.search(r"the runs are in (\S+)/runs", out)
    assert kept, out
    assert Path(kept[1]).is_dir()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_run_that_never_repeats_is_not_blamed_on_the_resume(tmp_path):
    code, out = verify_resume(write_planted(tmp_path, "entropy"), "--kills", "1", "--steps", "4")
    assert code == 1, out
    assert "two uninterrupted runs differ" in out
    assert f"{HERE}:{line_of('entropy')}: urandom draws unseeded random numbers" in out


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_hashes_of_strings_are_found_by_fixing_them(tmp_path):
    (causes,) = run_ranks(1, _causes_of_chance, write_planted(tmp_path, "hash"), group=False, timeout_s=240)
    assert len(causes) == 1
    assert "two runs with PYTHONHASHSEED=0 are equal" in causes[0]


def _causes_of_chance(path: Path) -> list[str]:
    fork_commands()
    runs = starts.Starts(str(path), [], path.parent, loader.load(path))
    return diagnosis.of_chance(runs, FirstDifference([], []))


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
    monkeypatch.setattr(starts.subprocess, "run", lambda *_, **__: done)
    if isinstance(expected, Length):
        assert starts.examine("x.yaml", [], 1) == expected
    else:
        with pytest.raises(HarnessError, match=re.escape(expected)) as raised:
            starts.examine("x.yaml", [], 1)
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
        changes = starts.shortened(config, overrides, length, steps)
        return {key: now for key, (_, now) in changes.items()}

    assert short(Length(20, 2000)) == {
        "train.max_steps": "30", "checkpoint.every": "4", "checkpoint.keep": "1000"
    }  # fmt: skip
    assert short(Length(5000, 500000))["train.max_steps"] == "24"
    assert short(Length(5000, 500000), steps=70)["checkpoint.every"] == "10"
    assert "train.max_steps" not in short(Length(4, 8))
    assert "checkpoint.every" not in short(Length(20, 2000), "checkpoint.every=1")


class Done:
    """What ``kill_plan`` asks of a run: 30 steps, an evaluation every 10."""

    evaluations, checkpoints, last, predicts = [10, 20, 30], list(range(5, 31, 5)), 30, True


def test_kills_are_spread_over_all_places_and_the_same_for_the_same_seed():
    def choose(num: int, seed: int = 0):
        return kill_plan.choose(Done(), num, 2, 3.0, True, random.Random(seed))  # type: ignore[arg-type]

    assert choose(6) == choose(6) != choose(6, 1)
    singles = [kill for seed in range(100) for kill in choose(1, seed)]
    assert {kill.step for kill in singles} == set(range(6, 31)), "a single kill is after the first checkpoint"
    assert {kill.where for kill in choose(4)} == {"step", "checkpoint", "evaluation", "start"}
    many = choose(200)
    assert set(Counter(kill.where for kill in many)) == set(kill_plan._ORDER)
    assert [kill.step for kill in many] == sorted(kill.step for kill in many)
    assert {kill.step for kill in many if kill.where == "evaluation"} == {10, 20, 30}
    assert {(kill.rank, kill.everyone) for kill in many if kill.where == "step"} == {
        (rank, everyone) for rank in (0, 1) for everyone in (False, True)
    }
    assert {kill.rank for kill in many if kill.where in ("checkpoint", "upload")} == {0}


def test_the_place_where_runs_first_differ():
    def saved(step: int, name: str) -> Difference:
        return Difference(f"checkpoints/step-{step}", StateDifference(name, 0.5, None), step)

    logged = Difference("metrics.jsonl:7", StateDifference("train entry of step 7.loss", None, (1.0, 2.0)), 7)
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
