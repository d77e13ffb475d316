"""Comparable runs: the same recipe gives the same curve on one process or several."""

from __future__ import annotations

import pytest
import yaml

from harness import cli
from tests.datasets import NAMES, write_names
from tests.end_to_end.experiment import newest_checkpoint, of_split, record, run, run_folder, train

EVERY_STEP = {"epochs": 2, "log_every": 1}


def assert_close(expected: list[dict], found: list[dict], tolerance: float = 1e-5) -> None:
    """Assert that two logs have the same keys and counts, and numbers within ``tolerance``."""
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == (pytest.approx(value, abs=tolerance) if isinstance(value, float) else value), key


def test_one_two_and_four_ranks_agree(tmp_path, data):
    """With ``shard: global`` and one global batch, every logged loss agrees to 1e-5 and all counts agree exactly. One
    row is left for the last step, where batch norm gets it twice; three of four ranks have none."""
    model = {"name": "tests.end_to_end.models.BatchNormed", "args": {}}
    settings = {"parallel": {"sync_batchnorm": True}, "model": model, "batch": {"global": 12}, "train": EVERY_STEP}
    records = [
        record(train(tmp_path / str(ranks), data, ranks, **settings, data={"shard": "global"})) for ranks in (1, 2, 4)
    ]
    assert_close(records[0], records[1])
    assert_close(records[0], records[2])


CHAR_LSTM = {"name": "char_lstm", "args": {"hidden": 8, "num_layers": 2}}
CHAR_GRU = {"name": "char_gru", "args": {"hidden": 8, "embedding": 4, "num_layers": 1, "dropout": 0.0}}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "model"), [("windows", CHAR_LSTM), ("names", CHAR_GRU)])
def test_names_of_different_lengths_agree_and_generate(tmp_path, rows, model, capsys):
    """Batches of pet_names have other shapes on two ranks, on which the losses must not depend."""
    names, records = write_names(tmp_path / "names.txt"), []
    for ranks in (1, 2):
        (config := tmp_path / str(ranks) / "config.yaml").parent.mkdir()
        tree = {
            "name": "run", "output": str(config.parent / "runs"), "model": model,
            "task": {"name": "pet_names", "names": str(names), "rows": rows, "window": 5},
            "data": {"shard": "global", "num_workers": 0}, "optimizer": {"name": "adam", "lr": 0.01},
            "batch": {"global": 8, "accumulate": 2, "eval_per_rank": 3}, "precision": {"opt_level": "O0"},
            "train": {"epochs": 1, "log_every": 1}, "runtime": {"device": "cpu", "timeout_s": 30},
        }  # fmt: skip
        config.write_text(yaml.safe_dump(tree))
        assert run(config, ranks) == [0] * ranks
        records.append(record(run_folder(config)))
    assert_close(*records)
    assert cli.main(["generate", str(run_folder(config)), "-n", "5", "--start", "Be"]) == 0
    generated = capsys.readouterr().out.splitlines()
    assert len(generated) == 5
    assert all(name.startswith("Be") and name.lower() not in NAMES for name in generated)


def test_evaluation_does_not_depend_on_world_size(tmp_path, data):
    """One checkpoint evaluated by 1 and by 3 ranks: each row once, equal counts, the loss equal to rounding."""
    folder = train(tmp_path / "run", data, train={"epochs": 1})
    (expected,) = of_split(folder, "eval")
    # A batch per rank, so that any world size can restore the checkpoint. It then still has to be evaluated.
    settings = {"train": {"epochs": 1}, "batch": {"global": None, "per_rank": 8}}
    resume = f"checkpoint.resume={newest_checkpoint(folder)}"
    (found,) = of_split(train(tmp_path / "on3", data, 3, resume, **settings), "eval")
    assert found["rows_used"] == found["rows"] == 23
    assert found["top1"] == expected["top1"]
    assert found["mean_class_accuracy"] == expected["mean_class_accuracy"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
