"""pet_names from the file to generated names, with the same losses on one rank and two."""

from __future__ import annotations

import pytest
import yaml

from harness import cli
from tests.datasets import NAMES, write_names
from tests.end_to_end.experiment import record, run

MODELS = {
    "windows": {"name": "char_lstm", "args": {"hidden": 8, "num_layers": 2}},
    "names": {"name": "char_gru", "args": {"hidden": 8, "embedding": 4, "num_layers": 1, "dropout": 0.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", MODELS)
def test_one_and_two_ranks_agree(tmp_path, rows, capsys):
    """Names differ in length, so batches have other shapes on two ranks; the losses must not depend on it."""
    names = write_names(tmp_path / "names.txt")
    records = []
    for world_size in (1, 2):
        config = tmp_path / str(world_size) / "config.yaml"
        config.parent.mkdir()
        tree = {
            "name": "run",
            "output": str(config.parent / "runs"),
            "task": {"name": "pet_names", "names": str(names), "rows": rows, "window": 5},
            "data": {"shard": "global", "num_workers": 0},
            "model": MODELS[rows],
            "batch": {"global": 8, "accumulate": 2, "eval_per_rank": 3},
            "optimizer": {"name": "adam", "lr": 0.01},
            "precision": {"opt_level": "O0"},
            "train": {"epochs": 1, "log_every": 1},
            "runtime": {"device": "cpu", "timeout_s": 30},
        }
        config.write_text(yaml.safe_dump(tree))
        assert run(config, world_size) == [0] * world_size
        records.append(record(config.parent / "runs" / "run"))
    for one, two in zip(*records, strict=True):
        for key, value in one.items():
            assert two[key] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), key
    assert cli.main(["generate", str(config.parent / "runs" / "run"), "-n", "5", "--start", "Be"]) == 0
    generated = capsys.readouterr().out.splitlines()
    assert len(generated) == 5
    assert all(name.startswith("Be") and name.lower() not in NAMES for name in generated)
