"""``harness compare`` on real runs: equal, another seed, a known divergence, incomplete, another number of ranks."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from harness.cli import main
from harness.tools.compare import exactness
from tests.end_to_end.experiment import Kill, run, write_config, write_images

DIVERGED_AFTER = 10  # the step of the last common checkpoint
LAST = 24  # steps: 3 epochs of 61 rows in batches of 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One experiment, a copy of it, with another seed, on two ranks, and with other images after a resume."""
    folder = tmp_path_factory.mktemp("compare")
    data = write_images(folder / "data")
    settings = {
        "checkpoint": {"every": DIVERGED_AFTER, "keep": 50},
        "train": {"epochs": 3, "log_every": 1},
        "output": str(folder),
    }
    config = write_config(folder / "config", data, **settings)
    assert run(config, 1, "name=one") == [0]
    shutil.copytree(folder / "one", folder / "again")
    assert run(config, 1, "name=seeded", "seed=1") == [0]
    assert run(config, 2, "name=ranks") == [0, 0]
    assert run(config, 1, "name=diverged", kill=Kill(0, DIVERGED_AFTER + 1)) == [-signal.SIGKILL]
    images = sorted((data / "images").glob("train*.png"))
    originals = [path.read_bytes() for path in images]
    for path, other in zip(images, originals[1:] + originals[:1], strict=True):
        path.write_bytes(other)
    assert run(config, 1, "name=diverged") == [0]
    for path, original in zip(images, originals, strict=True):
        path.write_bytes(original)
    return folder


def compare(*paths: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict]:
    """The exit code, text and JSON of ``harness compare``."""
    words = ["compare", *map(str, paths)]
    code = main(words)
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == code
    out = capsys.readouterr().out
    return code, text, json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def copy(folder: Path, runs: Path, name: str) -> Path:
    return Path(shutil.copytree(runs / name, folder / name))


def test_equal_runs(runs, capsys):
    code, text, plain = compare(runs / "one", runs / "again", capsys=capsys)
    assert code == 0
    assert plain["same"] is True
    assert plain["one"]["runs"][0] == {
        "path": str(runs / "one"), "name": "one", "state": "finished", "seed": 0, "world_size": 1,
    }  # fmt: skip
    assert "Bitwise equal: checkpoints, weights, log and predictions." in text
    assert (plain["equality"]["verdict"], plain["equality"]["step"]) == ("equal", None)
    assert plain["settings"]["recipe"] == plain["settings"]["packages"] == plain["settings"]["topology"] == {}
    assert plain["settings"]["other"] == {}
    assert plain["predictions"]["difference"] == 0
    assert plain["predictions"]["rows"] == 23
    assert all(metric["final"][0] == metric["final"][1] for metric in plain["metrics"])
    assert compare(runs / "one", runs / "one", capsys=capsys)[0] == 0


def test_runs_with_different_seeds(runs, capsys):
    code, text, plain = compare(runs / "one", runs / "seeded", capsys=capsys)
    assert code == 1
    assert plain["settings"]["recipe"] == {"seed": [0, 1]}
    assert re.search(r"\nRecipe\n +A +B\n +seed +0 +1\n\n", text)
    assert text.index(" top1 ") < text.index("\nRecipe\n") < text.index("\nNot equal")
    assert (plain["equality"]["verdict"], plain["equality"]["step"]) == ("different", 1)
    top1 = next(metric for metric in plain["metrics"] if metric["name"] == "top1")
    counts = plain["predictions"]
    assert sum(counts[key] for key in ("both", "only_one", "only_other", "neither")) == 23
    assert counts["difference"] == pytest.approx(top1["best"][1] - top1["best"][0])  # of the best weights


def test_divergence_at_a_known_step(runs, capsys):
    """The configuration is equal; the images were exchanged after the checkpoint of step 10."""
    code, text, plain = compare(runs / "one", runs / "diverged", capsys=capsys)
    assert code == 1
    assert plain["settings"]["recipe"] == {}
    assert plain["equality"]["step"] == DIVERGED_AFTER + 1
    losses = [
        next(line["loss"] for line in map(json.loads, (runs / name / "metrics.jsonl").open()) if line["step"] == 11)
        for name in ("one", "diverged")
    ]
    assert f"train entry of step 11.loss: {losses[0]} and {losses[1]}" in text
    assert "first checkpoint that differs: step 16" in text
    assert f"equal up to and including the checkpoint of step {DIVERGED_AFTER}" in text


def test_different_world_sizes(runs, tmp_path, capsys):
    code, text, plain = compare(runs / "one", runs / "ranks", capsys=capsys)
    assert code == 1
    assert plain["settings"]["topology"]["world_size"] == [1, 2]
    assert "Recipe: equal\n" in text
    assert re.search(r"other settings  equal\n", text)
    assert re.search(r"ranks +1 × .*cpu.* +2 × .*cpu", text)
    assert "On 1 and on 2 ranks, sums are computed in different orders" in text
    assert "Each rank has its own random stream and batch norm statistics" in text
    assert "data.shard=global makes them equal" in text
    for name in ("one", "ranks"):
        path = copy(tmp_path, runs, name) / "config.yaml"
        settings = path.read_text().replace("logical_ranks: null", "logical_ranks: 2").splitlines()
        path.write_text("\n".join(settings[:-1]))  # without the seal
    _, text, _ = compare(tmp_path / "one", tmp_path / "ranks", capsys=capsys)
    assert "With parallel.logical_ranks=2, the number of processes does not explain it" in text
    assert "sums are computed in different orders" not in text


def test_different_packages_and_code(runs, tmp_path, capsys):
    other = copy(tmp_path, runs, "again")
    starts = json.loads((other / "provenance.json").read_text())
    starts[-1]["packages"]["torch"] = "2.6.0"
    starts[-1]["git"] = {"commit": "f" * 40, "changed": False}
    (other / "provenance.json").write_text(json.dumps(starts))
    code, text, plain = compare(runs / "one", other, capsys=capsys)
    assert code == 0  # the results are equal
    assert plain["settings"]["packages"] == {"torch": [torch.__version__.split("+")[0], "2.6.0"]}
    assert re.search(r"packages +torch +\S+ +2\.6\.0", text)
    assert plain["settings"]["code"]["same"] is False
    assert "B ffffffffffff" in text


def test_killed_run_is_equal_so_far(runs, tmp_path, capsys):
    half = copy(tmp_path, runs, "again")
    whole = (half / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    kept = next(number for number, line in enumerate(whole) if json.loads(line)["step"] == 11)
    (half / "metrics.jsonl").write_bytes(b"".join(whole[:kept]) + whole[kept][:30])
    for name in ("summary.json", "weights.safetensors", "predictions.csv"):
        (half / name).unlink()
    for step in (16, 20, LAST):
        shutil.rmtree(half / "checkpoints" / f"step-{step}")
    code, text, plain = compare(runs / "one", half, capsys=capsys)
    assert code == 1
    assert (plain["equality"]["verdict"], plain["equality"]["step"]) == ("equal so far", None)
    assert "No log line or checkpoint that both runs have differs." in text
    assert "(unfinished, 1 rank)" in text
    assert "metrics.jsonl ends mid-line" in text
    assert "equal up to and including the checkpoint of step 10" in text
    assert "B has no predictions.csv with" in text
    assert plain["evaluations"][1]["step"] == 8
    assert plain["evaluations"][1]["best_step"] is None


def test_run_folder_with_only_a_configuration(runs, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(runs / "one" / "config.yaml", bare)
    code, text, plain = compare(runs / "one", bare, capsys=capsys)
    assert code == 1
    assert plain["equality"]["verdict"] == "equal so far"
    assert "B has no provenance.json" in text
    assert "no metrics to compare: B has no evaluation" in text
    assert plain["settings"]["recipe"] == {}


def test_groups_of_seeds(runs, tmp_path, capsys):
    for group, names in (("a", ("one", "seeded")), ("b", ("again", "seeded"))):
        for name in names:
            copy(tmp_path / group, runs, name)
    code, text, plain = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert (code, plain["same"]) == (1, False)
    assert "equality" not in plain
    assert "(2 runs, seeds 0, 1)" in text
    assert len(plain["spreads"]["best"][0]["values"][0]) == 2
    shutil.rmtree(tmp_path / "b" / "seeded")
    copy(tmp_path / "b", runs, "ranks")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "differ in more than their seed: number of ranks" in capsys.readouterr().err


def test_missing_run_is_a_usage_error(runs, capsys):
    assert main(["compare", str(runs / "one"), str(runs / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


# Checkpoints


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_are_compared_bit_by_bit(kind):
    one = torch.zeros(3, 2).to(kind)
    assert list(exactness.differing("w", one, one.clone())) == []
    assert list(exactness.differing("w", one.t(), one.t().contiguous())) == []
    (part,) = exactness.differing("w", one, torch.ones(3, 2).to(kind))
    assert (part.name, part.by) == ("w", 1.0)
    (part,) = exactness.differing("w", one, one.reshape(2, 3))
    assert part.by is None


def test_zeros_of_two_signs_differ_and_nan_equals_nan():
    assert [part.by for part in exactness.differing("w", torch.tensor([0.0]), torch.tensor([-0.0]))] == [0.0]
    nan = float("nan")
    assert list(exactness.differing("w", torch.tensor([nan]), torch.tensor([nan]))) == []
    assert list(exactness.differing("x", nan, float("nan"))) == []
    assert [part.values for part in exactness.differing("x", 0.0, -0.0)] == [(0.0, -0.0)]


def test_nested_values_are_compared_in_order():
    one = {"a": [1, {"b": torch.zeros(2)}], "c": "x", "d": 1}
    other = {"a": [1, {"b": torch.ones(2)}], "c": "y", "e": None}
    names = [part.name for part in exactness.differing("state", one, other)]
    assert names == ["state.a[1].b", "state.c", "state.d", "state.e"]  # a null is not a missing entry
    assert [part.values for part in exactness.differing("x", 1, 1.0)] == [(1, 1.0)]
    assert [part.values for part in exactness.differing("x", [1], [1, 2])] == [("list of 1", "list of 2")]


def test_times_are_not_compared():
    state = {"step": 3, "wall_s": 1.0, "train_s": 1.0, "segments": [], "skipped": 0}
    assert exactness.without_clocks("state", state) == {"step": 3, "segments": [], "skipped": 0}
    assert exactness.without_clocks("state", state, same_world=False) == {"step": 3, "skipped": 0}
    meter = {"rows": 1, "wait_s": 0.5, "forward_s": 0.5}
    assert exactness.without_clocks("ranks", [{"rng": 1, "meter": meter}]) == [{"rng": 1, "meter": {"rows": 1}}]
