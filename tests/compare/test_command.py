"""harness compare on real runs: the same, of another seed, parted at a known step, half-written, of other ranks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.cli import main
from harness.compare import found, tensors
from tests.end_to_end.experiment import Kill, run, write_config, write_images

PARTED_AFTER = 10  # the step whose checkpoint both halves share
LAST = 24  # steps: 3 epochs of 61 rows, 8 at once


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One experiment, run twice, with another seed, on two ranks, and with other images after a resume."""
    folder = tmp_path_factory.mktemp("compare")
    data = write_images(folder / "data")
    settings = {
        "checkpoint": {"every_steps": PARTED_AFTER, "keep": 50},
        "train": {"epochs": 3, "log_every": 1},
        "output": str(folder),
    }
    config = write_config(folder / "config", data, **settings)
    assert run(config, 1, "name=one") == [0]
    assert run(config, 1, "name=again") == [0]
    assert run(config, 1, "name=seeded", "seed=1") == [0]
    assert run(config, 2, "name=ranks") == [0, 0]
    assert run(config, 1, "name=parted", kill=Kill(0, PARTED_AFTER + 1)) == [-signal.SIGKILL]
    images = sorted((data / "images").glob("train*.png"))
    originals = [path.read_bytes() for path in images]
    for path, other in zip(images, originals[1:] + originals[:1], strict=True):
        path.write_bytes(other)
    assert run(config, 1, "name=parted") == [0]
    for path, original in zip(images, originals, strict=True):
        path.write_bytes(original)
    return folder


def compare(*paths: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict]:
    """Exit code, text and JSON of ``harness compare``; both forms must agree on the exit code."""
    words = ["compare", *map(str, paths)]
    code = main(words)
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == code
    out = capsys.readouterr().out
    return code, text, json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def copy(folder: Path, runs: Path, name: str) -> Path:
    return Path(shutil.copytree(runs / name, folder / name))


def test_the_same(runs, capsys):
    code, text, plain = compare(runs / "one", runs / "again", capsys=capsys)
    assert code == 0
    assert plain["same"] is True
    assert "Bitwise the same: weights, newest checkpoint and record." in text
    assert plain["sameness"]["verdict"] == "same"
    assert plain["sameness"]["parting"] is None
    assert plain["sameness"]["checkpoints"]["equal"] == [8, 10, 16, 20, LAST]
    assert plain["settings"]["recipe"] == plain["settings"]["packages"] == plain["settings"]["topology"] == {}
    assert plain["settings"]["other"] == {"name": ["one", "again"]}
    assert plain["guesses"]["difference"] == 0
    assert plain["guesses"]["rows"] == 23
    assert all(metric["final"][0] == metric["final"][1] for metric in plain["metrics"])
    assert compare(runs / "one", runs / "one", capsys=capsys)[0] == 0


def test_another_seed(runs, capsys):
    code, text, plain = compare(runs / "one", runs / "seeded", capsys=capsys)
    assert code == 1
    assert plain["settings"]["recipe"] == {"seed": [0, 1]}
    assert re.search(r"recipe +seed +0 +1", text)
    same = plain["sameness"]
    assert same["verdict"] == "different"
    assert same["record"]["first"]["steps"] == [1, 1]
    assert same["parting"] == [0, 1]
    assert "They part in the first step." in text
    top1 = next(metric for metric in plain["metrics"] if metric["name"] == "top1")
    counts = plain["guesses"]
    assert sum(counts[key] for key in ("both", "only_one", "only_other", "neither")) == 23
    assert counts["difference"] == pytest.approx(top1["best"][1] - top1["best"][0])  # of the weights that were kept


def test_parted_at_a_known_step(runs, capsys):
    """The same configuration; after the checkpoint of step 10 the images were others."""
    code, text, plain = compare(runs / "one", runs / "parted", capsys=capsys)
    assert code == 1
    assert plain["settings"]["recipe"] == {}
    same = plain["sameness"]
    assert same["parting"] == [PARTED_AFTER + 1, PARTED_AFTER + 1]
    assert f"They part at step {PARTED_AFTER + 1}." in text
    assert same["checkpoints"]["equal"] == [8, PARTED_AFTER]
    assert same["checkpoints"]["differs"] == 16
    assert same["checkpoints"]["first"]["name"].startswith("model.")
    assert same["checkpoints"]["first"]["by"] > 0
    first = same["record"]["first"]
    assert (first["split"], first["steps"]) == ("train", [PARTED_AFTER + 1] * 2)
    lines = [
        next(line for line in map(json.loads, (runs / name / "metrics.jsonl").open()) if line["step"] == 11)
        for name in ("one", "parted")
    ]
    assert first["fields"] == {"loss": [line["loss"] for line in lines]}
    assert str(lines[0]["loss"]) in text
    assert str(lines[1]["loss"]) in text


def test_other_ranks(runs, capsys):
    code, text, plain = compare(runs / "one", runs / "ranks", capsys=capsys)
    assert code == 1
    assert plain["settings"]["topology"]["world_size"] == [1, 2]
    assert plain["sameness"]["world_sizes"] == [1, 2]
    assert "Over 1 and over 2 ranks sums are taken in another order" in text
    assert "with data.shard=global they are the same" in text
    assert "ranks" not in plain["sameness"]["checkpoints"]["first"]["name"]


def test_other_packages_and_code(runs, tmp_path, capsys):
    other = copy(tmp_path, runs, "again")
    starts = json.loads((other / "provenance.json").read_text())
    starts[-1]["packages"]["torch"] = "2.6.0"
    starts[-1]["git"] = {"commit": "f" * 40, "changed": False}
    (other / "provenance.json").write_text(json.dumps(starts))
    code, text, plain = compare(runs / "one", other, capsys=capsys)
    assert code == 0  # the results are the same all the same
    assert plain["settings"]["packages"] == {"torch": [torch.__version__.split("+")[0], "2.6.0"]}
    assert re.search(r"packages +torch +\S+ +2\.6\.0", text)
    assert plain["settings"]["code"]["same"] is False
    assert "B ffffffffffff" in text


def test_killed_in_the_middle(runs, tmp_path, capsys):
    """As far as both go they are the same; that is not the same run."""
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
    assert plain["sameness"]["verdict"] == "same so far"
    assert "Bitwise the same as far as both go" in text
    assert "(unfinished, 1 rank)" in text
    assert "metrics.jsonl ends in mid-line" in text
    assert "weights      not compared: B has no weights yet" in text
    assert "the same at steps 8, 10" in text
    assert f"(A goes to step {LAST}, B to step 10)" in text
    assert "B has no predictions.csv" in text
    assert plain["evaluations"][1]["step"] == 8
    assert plain["evaluations"][1]["best_step"] is None


def test_a_damaged_checkpoint_is_passed_over_by_name(runs, tmp_path, capsys):
    other = copy(tmp_path, runs, "again")
    state = other / "checkpoints" / f"step-{LAST}" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    code, text, plain = compare(runs / "one", other, capsys=capsys)
    assert code == 1
    assert plain["sameness"]["verdict"] == "same so far"
    assert f"B, step {LAST}: state.pt is damaged" in text


def test_nothing_but_a_configuration(runs, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(runs / "one" / "config.yaml", bare)
    code, text, plain = compare(runs / "one", bare, capsys=capsys)
    assert code == 1
    assert plain["sameness"]["verdict"] == "unknown"
    assert "cannot be said" in text
    assert "B has no provenance.json" in text
    assert "metrics cannot be compared: B left no evaluation" in text
    assert plain["settings"]["recipe"] == {}


def test_one_bit_of_one_weight(runs, tmp_path, capsys):
    other = copy(tmp_path, runs, "again")
    content = bytearray((other / "weights.safetensors").read_bytes())
    content[-4] ^= 1
    (other / "weights.safetensors").write_bytes(content)
    code, _, plain = compare(runs / "one", other, capsys=capsys)
    assert code == 1
    assert plain["sameness"]["weights"]["same"] is False
    assert plain["sameness"]["weights"]["first"]["by"] > 0


def test_folders_of_seeds(runs, tmp_path, capsys):
    for group, names in (("a", ("one", "seeded")), ("b", ("again", "seeded"))):
        for name in names:
            copy(tmp_path / group, runs, name)
    code, text, plain = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 0
    assert {name: same["verdict"] for name, same in plain["by_seed"].items()} == {"0": "same", "1": "same"}
    assert "(2 runs, seeds 0, 1)" in text
    top1 = plain["spreads"]["best"][0]
    assert top1["name"] == "top1"
    assert len(top1["values"][0]) == 2
    assert top1["interval"][0] < 0 < top1["interval"][1] or top1["errors"] == [0, 0]
    shutil.rmtree(tmp_path / "b" / "seeded")
    copy(tmp_path / "b", runs, "ranks")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "differ by more than their seed: number of ranks" in capsys.readouterr().err


def test_no_run(runs, capsys):
    assert main(["compare", str(runs / "one"), str(runs / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_json_says_all_that_the_text_says(runs, capsys):
    _, _, plain = compare(runs / "one", runs / "parted", capsys=capsys)
    assert set(plain) == {
        "same", "one", "other", "settings", "sameness", "evaluations", "metrics", "paces", "guesses", "why_no_guesses",
        "by_seed", "spreads",
    }  # fmt: skip
    assert plain["one"]["runs"][0] == {
        "path": str(runs / "one"), "name": "one", "state": "finished", "seed": 0, "world_size": 1,
    }  # fmt: skip
    told = found.compare(found.side(runs / "one"), found.side(runs / "parted"))
    assert json.loads(json.dumps(found.as_plain(told))) == plain


def test_it_starts_without_torch():
    code = (
        "import sys; from harness.compare import command; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# What is compared of a checkpoint


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_bit_by_bit(kind):
    one = torch.zeros(3, 2).to(kind)
    assert list(tensors.differing("w", one, one.clone())) == []
    assert list(tensors.differing("w", one.t(), one.t().contiguous())) == []
    (part,) = tensors.differing("w", one, torch.ones(3, 2).to(kind))
    assert (part.name, part.by) == ("w", 1.0)
    (part,) = tensors.differing("w", one, one.reshape(2, 3))
    assert part.by is None


def test_zeros_of_two_signs_differ_and_nan_is_nan():
    assert [part.by for part in tensors.differing("w", torch.tensor([0.0]), torch.tensor([-0.0]))] == [0.0]
    nan = float("nan")
    assert list(tensors.differing("w", torch.tensor([nan]), torch.tensor([nan]))) == []
    assert list(tensors.differing("x", nan, float("nan"))) == []


def test_nested_values():
    one = {"a": [1, {"b": torch.zeros(2)}], "c": "x", "d": 1}
    other = {"a": [1, {"b": torch.ones(2)}], "c": "y", "e": None}
    assert [part.name for part in tensors.differing("state", one, other)] == ["state.a[1].b", "state.c", "state.d"]
    assert [part.values for part in tensors.differing("x", 1, 1.0)] == [(1, 1.0)]
    assert [part.values for part in tensors.differing("x", [1], [1, 2])] == [("list of 1", "list of 2")]


def test_clocks_are_no_part_of_a_state():
    state = {"step": 3, "wall_s": 1.0, "train_s": 1.0, "segments": [], "skipped": 0}
    assert tensors.without_clocks("state", state) == {"step": 3, "segments": [], "skipped": 0}
    assert tensors.without_clocks("state", state, same_gang=False) == {"step": 3, "skipped": 0}
    meter = {"rows": 1, "wait_s": 0.5, "forward_s": 0.5}
    assert tensors.without_clocks("ranks", [{"rng": 1, "meter": meter}]) == [{"rng": 1, "meter": {"rows": 1}}]


def test_a_checkpoint_of_something_else_is_named(tmp_path):
    """Whole by its manifest, and still not what a run writes."""
    from harness.runs.checkpoint import Checkpoints

    for name, content in (("a", {"state": {}, "ranks": [], "world_size": 1}), ("b", {"state": 3, "ranks": 4})):
        Checkpoints(tmp_path / name / "checkpoints", 3).write(1, content)
    result = tensors.checkpoints(tmp_path / "a", tmp_path / "b")
    assert (result.same, result.equal) == (None, [])
    assert result.refused == ("step 1: what is in it is not what this harness writes",)
