"""Every YAML in configs/ trains: those whose data can be made here, to the accuracy that is claimed for them."""

from __future__ import annotations

import json

import pytest

from harness.data import digits
from tests.conftest import ROOT
from tests.end_to_end.experiment import _drive
from tests.ranks import free_port, launch_environment, start, wait_for

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_all_configs_are_here():
    assert [path.name for path in CONFIGS] == ["digits.yaml"]


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
