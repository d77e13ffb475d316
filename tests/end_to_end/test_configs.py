"""Every YAML in configs/ trains. Those whose data can be generated here reach the accuracy that the README promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.tools.data import digits
from tests import datasets
from tests.conftest import ROOT
from tests.end_to_end.experiment import of_split
from tests.end_to_end.processes import drivers
from tests.fixtures import write_photos
from tests.ranks import wait_for

# These take too long to train here: {name: (ranks, overrides)}. benchmarks/results/tutorials.md has their accuracy.
FEW_STEPS = {
    "fashion_mnist": (1, ["task.train_rows=300", "task.eval_rows=100"]),
    "imagenet": (2, ["model.name=resnet18", "batch.global=8", "data.num_workers=0"]),
    "mnist": (2, ["task.train_rows=300", "task.eval_rows=100"]),
    "pet_names": (1, ["batch.global=64"]),
    "pet_names_gru": (2, ["batch.global=64"]),
    **dict.fromkeys(datasets.OWN_TABLES, (2, ["batch.global=16", "precision.opt_level=O4"])),
}

FAST = ("mnist",)


def train(tmp_path: Path, name: str, ranks: int, *overrides: str) -> tuple[Path, dict[str, Any], str]:
    """Train configs/NAME.yaml; return the run folder, its summary and the terminal."""
    terminal = tmp_path / "terminal.txt"
    arguments = ["-c", str(ROOT / "configs" / f"{name}.yaml"), f"output={tmp_path}/runs", *overrides]
    assert wait_for(drivers(ranks, arguments, terminal), 120) == [0] * ranks, terminal.read_text()
    folder = tmp_path / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["world_size"]) == (True, ranks)
    assert summary["evaluation"]["rows_used"] == summary["evaluation"]["rows"] > 0
    return folder, summary, terminal.read_text()


def test_every_config_is_trained_here():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {"digits", "finetune", *FEW_STEPS}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in FEW_STEPS]
)
def test_a_few_steps(tmp_path, name, capsys):
    """The file as it is, on few rows of the real images if they are next to the project, else on generated data."""
    ranks, overrides = FEW_STEPS[name]
    if "mnist" in name:
        where = [f"task.root={datasets.images(tmp_path / 'data', name)}"]
    elif name in datasets.OWN_TABLES:
        where = datasets.own_table(tmp_path / "data", name)
    elif name == "imagenet":
        where = [f"task.{key}_csv={write_photos(tmp_path, key, rows)}" for key, rows in (("train", 24), ("eval", 5))]
        where += [f"task.root={tmp_path}", f"data.cache_dir={tmp_path}/cache"]
    else:
        where = [f"task.names={datasets.write_names(tmp_path / 'names.txt')}"]
    folder, summary, _ = train(tmp_path, name, ranks, *where, *overrides, "train.max_steps=3", "train.log_every=1")
    assert summary["step"] == len(of_split(folder, "train")) == 3
    assert all(line["loss"] < 4 for line in of_split(folder, "train"))
    if name.startswith("pet_names"):
        assert cli.main(["generate", str(folder), "-n", "2"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_digits_reach_the_promised_accuracy(tmp_path):
    """configs/digits.yaml as it is, on two ranks: at least 0.97 validation accuracy, and a complete run folder."""
    data = tmp_path / "digits"
    digits.write(data)
    folder, summary, terminal = train(
        tmp_path, "digits", 2, f"task.train_csv={data}/train.csv", f"task.eval_csv={data}/eval.csv",
        f"task.root={data}", f"data.cache_dir={tmp_path}/cache",
    )  # fmt: skip
    assert summary["evaluation"]["top1"] >= 0.97
    assert summary["evaluation"]["rows_used"] == 360
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files >= {
        "config.yaml", "provenance.json", "metrics.jsonl", "summary.json", "confusion.csv", "weights.safetensors",
        "checkpoints/latest", "checkpoints/best", "logs/rank-0.log", "logs/rank-1.log",
    }  # fmt: skip
    assert "top1 0.9" in terminal
