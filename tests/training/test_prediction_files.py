"""Predictions that are arrays: one file per row, whose path is in the table."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import harness
from harness.cli import main
from harness.errors import HarnessError
from harness.runs import layout
from harness.tasks.image_csv import config as image_csv
from harness.tasks.image_csv.task import ImageCsv
from harness.tools.compare.exactness import differences
from harness.training.evaluation import prediction_table, predictions
from harness.training.evaluation.prediction_files import FilesFolder, RowFiles, folder_of, read
from harness.training.loop import evaluation
from harness.training.task import Batch
from tests.conftest import ROOT
from tests.end_to_end.experiment import run
from tests.fixtures import settings, write_rows, write_yaml

ROWS = 11


class Masks(ImageCsv):
    """Classes, with a mask and boxes for each image that follow from the outputs."""

    def predictions(self, outputs):
        scale = outputs.float().softmax(1)[:, :1]
        mask = (scale[:, :, None] * torch.arange(12).view(1, 3, 4) * 20).to(torch.uint8)
        boxes = [{"boxes": row.numpy(), "number": np.asarray(place)} for place, row in enumerate(outputs)]
        return {**super().predictions(outputs), "mask": RowFiles(mask, "png"), "boxes": RowFiles(boxes)}


class Task(image_csv.Task):
    name: str

    def open(self, seed, cache_dir):
        return _masks(super().open(seed, cache_dir))

    def open_new(self, learned, source, cache_dir):
        return _masks(super().open_new(learned, source, cache_dir))


def _masks(opened):
    return Masks(**{each.name: getattr(opened, each.name) for each in fields(opened)})


def write(folder: Path, **sections: object) -> Path:
    """The configuration of a run on images, of which those that are unreadable are skipped."""
    write_rows(folder, "train", 12)
    write_rows(folder, "eval", ROWS)
    tree = settings(folder, name="run", train={"epochs": 1}, precision={"opt_level": "O0"}, **sections)
    tree["task"] |= {"name": __name__, "image_size": [8, 8], "on_bad_row": "skip"}
    return write_yaml(folder / "config.yaml", tree)


def files(table: Path) -> dict[str, bytes]:
    folder = folder_of(table)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run on two ranks."""
    folder = tmp_path_factory.mktemp("masks")
    config = write(folder)
    assert run(config, 2) == [0, 0], (folder / "terminal-0.txt").read_text()
    return folder


def rows_of(table: Path) -> list[dict[str, str]]:
    with open(table) as file:
        return list(csv.DictReader(file))


def test_a_run_writes_a_file_for_each_row(trained):
    folder = trained / "runs" / "run"
    rows = rows_of(folder / layout.PREDICTIONS)
    assert [row["mask"] for row in rows] == [f"predictions_files/mask/{row:06d}.png" for row in range(ROWS)]
    assert [row["boxes"] for row in rows] == [f"predictions_files/boxes/{row:06d}.npz" for row in range(ROWS)]
    for row in rows:
        assert read(folder / row["mask"]).shape == (3, 4)
        scores = np.exp(read(folder / row["boxes"])["boxes"])
        shown = [float(row[f"score_{name}"]) for name in range(3)]
        np.testing.assert_allclose(scores / scores.sum(), shown, rtol=1e-4)
        assert read(folder / row["mask"])[2, 3] == int(np.float32(shown[0]) * 220)
    assert len(files(folder / layout.PREDICTIONS)) == 2 * ROWS


def test_predict_writes_the_same_bytes_on_any_number_of_ranks(trained, tmp_path, monkeypatch):
    """Again over the files of a longer table; a row that cannot be read has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the two ranks import this file
    words = ["predict", str(trained / "runs" / "run"), "--csv", str(trained / "eval.csv"), "--out"]
    for ranks in ("1", "2"):
        assert main([*words, f"{ranks}.csv", "--world", ranks]) == 0
    before = files(trained / "runs" / "run" / layout.PREDICTIONS)
    assert files(Path("1.csv")) == files(Path("2.csv")) == before
    assert rows_of(Path("2.csv"))[10]["mask"] == "2_files/mask/000010.png"
    lines = (trained / "eval.csv").read_text().splitlines()
    Path("few.csv").write_text("\n".join([lines[0], lines[3], "none.png,0", lines[1]]))
    words[3] = "few.csv"
    assert main([*words, "1.csv"]) == 0
    assert [row["mask"] for row in rows_of(Path("1.csv"))] == ["1_files/mask/000000.png", "", "1_files/mask/000002.png"]
    kinds = [("boxes", "npz"), ("mask", "png")]
    assert [*files(Path("1.csv"))] == [f"{name}/{row:06d}.{kind}" for name, kind in kinds for row in (0, 2)]
    assert files(Path("1.csv"))["mask/000000.png"] == before["mask/000002.png"]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_column_of_the_task_names_the_files(trained, tmp_path, monkeypatch):
    """Without a name for a row, or with one of two rows, also of different batches, no table is written."""
    monkeypatch.chdir(tmp_path)
    pixels = torch.zeros(3, 4, dtype=torch.uint8)
    monkeypatch.setattr(Masks, "predictions", lambda self, out: {"mask": RowFiles([pixels] * len(out), "png", "id")})
    lines = (trained / "eval.csv").read_text().splitlines()
    words = ["predict", str(trained / "runs" / "run"), "batch.eval_per_rank=2", "--csv", "rows.csv", "--out", "out.csv"]

    def written(*rows: str) -> list[str]:
        Path("rows.csv").write_text("\n".join([lines[0], *rows]))
        return [*files(Path("out.csv"))] if main(words) == 0 else []

    ids = [row["id"] for row in rows_of(trained / "runs" / "run" / layout.PREDICTIONS)]
    names = [f"mask/{each.replace('/', '_')}.png" for each in ids]
    assert written(lines[3], "none.png,0", *lines[1:3]) == sorted(names[:3])
    shown = [row["mask"].removeprefix("out_files/") for row in rows_of(Path("out.csv"))]
    assert shown == [names[2], "", *names[:2]]
    Path("out.csv").unlink()
    for twins in (lines[1], lines[1]), (lines[1], lines[2], lines[3], lines[1]):
        assert not written(*twins)
        assert not Path("out.csv").exists()
    monkeypatch.setattr(Masks, "predictions", lambda self, out: {"mask": RowFiles([pixels] * len(out), "png", "no")})
    assert not written(lines[1])


def test_python_gets_the_arrays(trained):
    folder = trained / "runs" / "run"
    table = harness.predict(folder, pd.read_csv(trained / "eval.csv").head(3)[["path"]])
    for row, mask, boxes in zip(range(3), table["mask"], table["boxes"], strict=True):
        np.testing.assert_array_equal(mask, read(folder / f"predictions_files/mask/{row:06d}.png"))
        np.testing.assert_array_equal(boxes["boxes"], read(folder / f"predictions_files/boxes/{row:06d}.npz")["boxes"])


def test_a_loop_of_ones_own_ends_with_the_same_files(tmp_path):
    config = harness.load_config(write(tmp_path))
    with harness.open_run(config) as own:
        evaluation(own)
        own.state.add_step(False)
    assert len(files(tmp_path / "runs" / "run" / layout.PREDICTIONS)) == 2 * ROWS


def test_a_killed_start_leaves_nothing_that_the_next_one_keeps(trained, tmp_path):
    """Compared with a run that was not disturbed."""
    config = write(tmp_path)
    assert run(config, 2, "batch.eval_per_rank=2", APEX_TEST_DIE="1") != [0, 0]
    folder = tmp_path / "runs" / "run"
    stale = folder / "predictions_files.tmp" / "mask" / "009999.png"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_bytes(b"half")
    assert not (folder / layout.PREDICTIONS).exists()
    assert run(config, 2) == [0, 0]
    assert files(folder / layout.PREDICTIONS) == files(trained / "runs" / "run" / layout.PREDICTIONS)
    assert not list(folder.glob("*.tmp"))


def test_compare_reads_them(trained, tmp_path):
    import shutil

    one, other = trained / "runs" / "run", shutil.copytree(trained / "runs" / "run", tmp_path / "run")
    assert not differences(one, other)
    path = other / "predictions_files" / "mask" / "000003.png"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert [each.file for each in differences(one, other)] == ["predictions_files/mask/000003.png"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (RowFiles(torch.zeros(2, 3, 4), "png"), r"torch.float32 and shape \(3, 4\), which is no PNG -> return uint8"),
        (RowFiles(torch.zeros(2, 2, 3, 4, dtype=torch.uint8), "png"), "which is no PNG"),
        (RowFiles(torch.zeros(3, 3, 4)), "has 3 arrays for 2 rows -> return one per row"),
        (RowFiles(torch.zeros(2, 0, 4, dtype=torch.uint8), "png"), r"shape \(0, 4\), which is no PNG"),
        (RowFiles([[["a"]], None], "png"), "is not an array of numbers: .* -> return tensors or arrays"),
        (RowFiles([None, None], "png"), "is not an array of numbers"),
        (RowFiles([object(), object()]), "is not an array of numbers"),
        (RowFiles([{"array": 1}, {"array": 2}]), "the one key 'array', .* -> return the array, or choose another key"),
        (RowFiles([1, 2], "jpg"), "is of kind 'jpg' -> use png or npz"),
    ],
)
def test_what_is_refused(value, message):
    with pytest.raises(HarnessError, match="(?s)" + message.replace(" -> ", "\n? *-> ")):
        value.encoded("mask", [0, 1])


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_no_column_writes_outside_its_folder(name):
    with pytest.raises(HarnessError, match="no folder can have"):
        RowFiles(torch.zeros(1, 3)).encoded(name, [0])


def test_a_folder_of_the_user_is_not_removed_where_no_column_has_files(tmp_path):
    own = tmp_path / "table_files" / "own.txt"
    own.parent.mkdir()
    own.touch()
    FilesFolder(tmp_path / "table.csv").finish()
    assert own.exists()


def test_columns_do_not_overwrite_the_files_of_each_other(monkeypatch):
    monkeypatch.setattr(predictions, "_forward", lambda *_: torch.zeros(2))
    columns = {name: RowFiles(torch.zeros(2, 3)) for name in ("a/b", "a_b")}
    predictor = SimpleNamespace(objective=None, task=SimpleNamespace(predictions=lambda outputs: columns))
    rows = np.arange(2)
    with pytest.raises(HarnessError, match=r"'a_b'\] and another column both write a_b/000000.npz"):
        predictions._block(predictor, Batch(torch.zeros(2), torch.zeros(2), rows), {}, rows, 2, "files")


def test_kinds(tmp_path):
    """What was written is read again: masks, images, and arrays of any shape."""
    values = {
        "bool": (RowFiles(torch.eye(3, dtype=torch.bool)[None], "png"), np.eye(3) * 255),
        "rgb": (RowFiles(torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2), "png"), np.arange(12).reshape(3, 2, 2)),
        "wide": (RowFiles(np.arange(4.0).reshape(1, 4)), np.arange(4.0)),
        "a/b": (RowFiles([{"x": torch.ones(2), "file": 3}]), {"x": np.ones(2), "file": 3}),
        "leaves": (RowFiles([{"x": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}]), {"x": np.ones(2)}),
    }
    folder = FilesFolder(tmp_path / "table.csv")
    for name, (value, _) in values.items():
        folder.add(value.encoded(name, [7]))
    folder.finish()
    for name, (value, expected) in values.items():
        np.testing.assert_equal(
            read(tmp_path / "table_files" / name.replace("/", "_") / f"000007.{value.kind}"), expected
        )


def _die_after_a_block():
    """In the process of a test's rank only, by its environment."""
    import os
    import signal

    add = prediction_table.PredictionFile.add

    def added(self, *arguments):
        add(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("APEX_TEST_DIE"):
        prediction_table.PredictionFile.add = added


_die_after_a_block()
