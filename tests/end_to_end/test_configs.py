"""Every YAML in configs/ trains: those whose data can be made here, to the accuracy that is claimed for them."""

from __future__ import annotations

import json

import pytest

from harness import cli
from harness.data import digits, published
from tests import datasets
from tests.conftest import ROOT, SHARED_DATA
from tests.end_to_end.experiment import _drive
from tests.ranks import free_port, launch_environment, start, wait_for

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


# Too long to train here: {name: (ranks, overrides)}. What they reach is in benchmarks/results/tutorials.md.
FEW_STEPS = {
    "fashion_mnist": (1, ["task.train_rows=300", "task.eval_rows=100"]),
    "mnist": (2, ["task.train_rows=300", "task.eval_rows=100"]),
    "pet_names": (1, ["batch.global=64"]),
    "pet_names_gru": (2, ["batch.global=64"]),
}


def test_all_configs_are_here():
    assert len(CONFIGS) == 5
    assert {path.stem for path in CONFIGS} == {"digits", *FEW_STEPS}


@pytest.mark.parametrize("name", FEW_STEPS)
def test_a_few_steps(tmp_path, name, capsys):
    """The file as it is, on the real data where they are beside the project, else on small ones like them."""
    world_size, overrides = FEW_STEPS[name]
    if "mnist" in name:
        where = [f"task.root={datasets.images(tmp_path / 'data', name)}"]
    elif SHARED_DATA.is_dir():
        published.pet_names(tmp_path, str(SHARED_DATA / "pet_names"))
        where = [f"task.names={tmp_path}/names.txt"]
    else:
        where = [f"task.names={datasets.write_names(tmp_path / 'names.txt')}"]
    settings = (*where, *overrides, f"output={tmp_path}/runs", "train.max_steps=3", "train.log_every=1")
    port = free_port()
    arguments = (str(ROOT / "configs" / f"{name}.yaml"), settings, None, tmp_path)
    ranks = [
        start(_drive, arguments, launch_environment(rank, world_size, port) if world_size > 1 else {})
        for rank in range(world_size)
    ]
    told = tmp_path / "terminal-0.txt"
    assert wait_for(ranks, 120) == [0] * world_size, told.read_text()
    folder = tmp_path / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["step"], summary["world_size"]) == (True, 3, world_size)
    assert summary["evaluation"]["rows_used"] == summary["evaluation"]["rows"] > 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["split"] == "train" for line in lines) == 3
    assert all(line["loss"] < 4 for line in lines if "loss" in line)
    if name.startswith("pet_names"):
        assert cli.main(["generate", str(folder), "-n", "2"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_digits_reach_what_the_readme_says(tmp_path):
    """configs/digits.yaml as it is, on two ranks: at least 0.97 held-out accuracy, and a full run folder."""
    data = tmp_path / "digits"
    digits.write(data)
    overrides = (
        f"output={tmp_path}/runs", f"task.train_csv={data}/train.csv", f"task.eval_csv={data}/eval.csv",
        f"task.root={data}", f"data.cache_dir={tmp_path}/cache",
    )  # fmt: skip
    port = free_port()
    arguments = (str(ROOT / "configs" / "digits.yaml"), overrides, None, tmp_path)
    ranks = [start(_drive, arguments, launch_environment(rank, 2, port)) for rank in range(2)]
    assert wait_for(ranks, 120) == [0, 0]
    folder = tmp_path / "runs" / "digits"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"]
    assert summary["evaluation"]["top1"] >= 0.97
    assert summary["evaluation"]["rows_used"] == 360
    assert summary["world_size"] == 2
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left >= {
        "config.yaml", "provenance.json", "metrics.jsonl", "summary.json", "confusion.csv", "weights.safetensors",
        "checkpoints/latest", "checkpoints/best", "logs/rank-0.log", "logs/rank-1.log",
    }  # fmt: skip
    assert "held-out: top1" in (tmp_path / "terminal-0.txt").read_text()
