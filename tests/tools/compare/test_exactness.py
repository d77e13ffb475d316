"""Run folders compared bit for bit: each kind of change to a copy is found and named."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.runs.checkpoints import Checkpoints
from harness.runs.files import read_sealed, write_sealed
from harness.tools.compare.exactness import Difference, TensorDifference, differences, differing
from harness.tools.compare.first_difference import FirstDifference
from tests.end_to_end.experiment import train, write_images

LAST = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exactness")
    return train(folder, write_images(folder / "data"), train={"epochs": 2, "log_every": 4}, checkpoint={"every": 5})


def edit_checkpoint(folder, change):
    """Rewrite the newest checkpoint with ``change`` made to its content, as a valid checkpoint."""
    content = torch.load(folder / f"checkpoints/step-{LAST}/state.pt", weights_only=True)
    change(content)
    Checkpoints(folder / "checkpoints", 9).write(LAST, {key: content[key] for key in content if key != "format"})


def edit_lines(folder, change):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_weights(folder):
    weights = load_file(folder / "weights.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "weights.safetensors", {"harness": json.dumps({"step": str(LAST)})})


def flip(folder):
    """Change a bit in the middle of the newest checkpoint."""
    state = folder / f"checkpoints/step-{LAST}/state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)


def last_bit(tensor):
    """Change the last bit of the first element."""
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


CHANGES = {
    "a bit of a weight": (
        lambda folder: edit_checkpoint(folder, lambda content: last_bit(next(iter(content["model"].values())))),
        f"checkpoints/step-{LAST}: model.",
    ),
    "optimizer": (
        lambda folder: edit_checkpoint(
            folder, lambda content: last_bit(content["optimizer"]["state"][0]["momentum_buffer"])
        ),
        f"checkpoints/step-{LAST}: optimizer.state.0.momentum_buffer",
    ),
    "random stream": (
        lambda folder: edit_checkpoint(folder, lambda content: content["ranks"][0]["rng"]["python"][1].reverse()),
        f"checkpoints/step-{LAST}: ranks[0].rng.python[1]",
    ),
    "position": (
        lambda folder: edit_checkpoint(folder, lambda content: content["state"].update(epoch=1)),
        f"checkpoints/step-{LAST}: state.epoch: 2 and 1",
    ),
    "entry of its own": (
        lambda folder: edit_checkpoint(folder, lambda content: content.update(extra=None)),
        f"checkpoints/step-{LAST}: extra: (absent) and None",
    ),
    "loss": (
        lambda folder: edit_lines(folder, lambda lines: lines[0].update(loss=0.0)),
        "metrics.jsonl:1: train entry of step 4.loss: ",
    ),
    "line": (lambda folder: edit_lines(folder, lambda lines: lines.pop()), "metrics.jsonl: number of lines: "),
    "best weights": (edit_weights, "weights.safetensors: "),
    "predictions": (
        lambda folder: (folder / "predictions.csv").write_text("id\n"), "predictions.csv: first difference: "
    ),
    "summary": (lambda folder: (folder / "summary.json").unlink(), "summary.json: summary: "),
    "damaged": (flip, f"checkpoints/step-{LAST}: state: intact and state.pt is damaged"),
    "newest": (
        lambda folder: (folder / "checkpoints/latest").write_text("step-8\n"),
        f"checkpoints: latest: step-{LAST} and step-8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_of_difference_is_named(trained, tmp_path, name):
    change, expected = CHANGES[name]
    copy = shutil.copytree(trained, tmp_path / "copy")
    assert differences(trained, copy) == []
    change(copy)
    found = [str(difference) for difference in differences(trained, copy)]
    assert found, "not found"
    assert any(line.startswith(expected) for line in found), found
    assert differences(copy, trained), "only found from one side"


def test_weights_of_other_names_are_counted(trained, tmp_path):
    def rename(content):
        content["model"] = {f"{name}_": value for name, value in content["model"].items()}

    copy = shutil.copytree(trained, tmp_path / "copy")
    edit_checkpoint(copy, rename)
    lines = list(FirstDifference(differences(trained, copy), [LAST]).lines())
    (line,) = [line for line in lines if line.startswith("  weights: ")]
    assert re.fullmatch(r"  weights: other names: (\d+) only in A, \1 only in B; 0 in both differ", line)


def test_a_difference_late_in_a_long_line_is_shown(trained, tmp_path):
    one, other = (shutil.copytree(trained, tmp_path / name) for name in ("one", "other"))
    for folder, end in ((one, "0.5"), (other, "0.25")):
        (folder / "predictions.csv").write_text("id,text,score\n1," + 200 * "word " + f",{end}{200 * '1'}\n")
    (found,) = differences(one, other)
    assert re.fullmatch(
        r"predictions.csv: first difference: \.\.\.[word ]+,0\.51+ and \.\.\.[word ]+,0\.251+", str(found)
    )


def test_many_differences_are_not_compared_with_each_other(monkeypatch):
    found = [Difference(f"file-{n}", TensorDifference("w", None)) for n in range(3)]
    found += [Difference("checkpoints/step-4", TensorDifference("model.w", 0.5), 4)] * 2
    monkeypatch.setattr(Difference, "__eq__", lambda *_: pytest.fail("quadratic"))
    lines = [*FirstDifference(found, [4]).lines()]
    assert lines[-3:] == [f"file-{n}: w differs in its shape" for n in range(3)]


def test_times_do_not_count(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")

    def later(content):
        content["state"]["wall_s"] += 1
        content["ranks"][0]["meter"]["wait_s"] += 1

    edit_checkpoint(copy, later)
    edit_lines(copy, lambda lines: [line.update(wall_s=9.0) for line in lines])
    write_sealed(copy / "summary.json", {**read_sealed(copy / "summary.json"), "wall_s": 9.0})
    assert differences(trained, copy) == []


def test_facts_that_only_logical_ranks_record_do_not_count(trained, tmp_path):
    one, other = (shutil.copytree(trained, tmp_path / name) for name in ("one", "other"))
    edit_checkpoint(one, lambda content: content["kernels"].update(torch="2.14.0", threads=1))
    assert differences(trained, one) == differences(one, trained) == []
    edit_checkpoint(other, lambda content: content["kernels"].update(torch="2.15.0", threads=1))
    found = [str(difference) for difference in differences(one, other)]
    assert found == [f"checkpoints/step-{LAST}: kernels.torch: 2.14.0 and 2.15.0"]


def test_empty_folders_are_not_equal(tmp_path):
    assert [str(found) for found in differences(tmp_path, tmp_path)] == [
        "metrics.jsonl: lines: (absent) and (absent)",
        "checkpoints: latest: (absent) and (absent)",
    ]


def test_differences_of_empty_and_complex_tensors():
    (found,) = differing("x", torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert found == TensorDifference("x", 0.0)
    (found,) = differing("x", torch.tensor([1 + 2j]), torch.tensor([1 + 5j]))
    assert found == TensorDifference("x", 3.0)
