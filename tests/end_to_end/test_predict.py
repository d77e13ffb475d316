"""From a run to its predictions and its exported model, through the command line."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.campaign.start import descendants
from harness import cli
from harness.apex import amp
from harness.config import loader
from harness.errors import HarnessError
from harness.inference import export
from harness.inference import predict as predict_module
from harness.inference.formats import base
from harness.runs import trained_run
from harness.runs.files import read_sealed, write_sealed
from harness.runs.weights_file import save_weights
from harness.training.evaluation import predictions
from harness.training.model.built_in import small_cnn
from harness.training.model.built_in.small_cnn import Model as SmallCNN
from tests.end_to_end.experiment import run, write_config, write_images
from tests.end_to_end.processes import environment_of, python, start_python, wait_until, without_greetings
from tests.ranks import free_port, launch_environment, start, wait_for

EPOCHS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run folder, data) of a run on two ranks that has learned something, with TensorBoard."""
    folder = tmp_path_factory.mktemp("predict")
    data = write_images(folder / "data")
    config = write_config(
        folder, data, train={"epochs": EPOCHS}, schedule={"name": "constant"}, trackers=["tensorboard"],
        precision={"opt_level": "O1"},
    )  # fmt: skip
    assert run(config, 2) == [0, 0]
    return folder / "runs" / "run", data


def predict(folder, out, *words, world=1, last=(), prepare=None):
    """(exit codes, output) of ``harness predict`` on ``world`` ranks that a launcher started. ``last``: words for the
    last rank only, where ``prepare`` is called first."""
    terminal = out.with_suffix(".txt")
    argv = ["predict", str(folder), "--out", str(out), *map(str, words)]
    port, ranks = free_port(), []
    for rank in range(world):
        own, before = (last, prepare) if rank == world - 1 else ((), None)
        environ = launch_environment(rank, world, port) if world > 1 else {}
        ranks.append(start(_rank, ([*argv, *own], str(terminal), before), environ))
    return wait_for(ranks, 90), terminal.read_text()


def _rank(argv, terminal, prepare):
    file = os.open(terminal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if prepare:
        prepare()
    raise SystemExit(cli.main(argv))


def _die_in_a_block():
    predictions._block = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def _break_the_disk():
    predict_module.open_task = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error", "eval.csv"))


def test_training_writes_predictions_of_the_best_weights(trained):
    folder, data = trained
    table, labels = pd.read_csv(folder / "predictions.csv"), pd.read_csv(data / "eval.csv")
    assert list(table) == ["id", "prediction", "label", "score_column", "score_row", "score_slope"]
    assert table["id"].tolist() == labels["path"].tolist()
    assert table["label"].tolist() == labels["label"].tolist()
    summary = json.loads((folder / "summary.json").read_text())
    assert (table["prediction"] == table["label"]).mean() == pytest.approx(summary["best"]["top1"])
    assert summary["best"]["top1"] > 0.5
    scores = table[["score_column", "score_row", "score_slope"]].to_numpy()
    assert scores.sum(1) == pytest.approx(1.0, abs=1e-5)
    assert len(summary["history"]) == EPOCHS  # the accuracies of every epoch
    assert {"step", "epoch", "top1", "loss"} <= set(summary["history"][0])


def test_tensorboard_shows_metrics_and_images(trained):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = trained
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    images = reader.Tags()["images"]
    assert "confusion" in images
    assert sum(name.startswith("predictions/") for name in images) == 23
    record = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for split, name in (("train", "loss"), ("eval", "top1")):
        points = [(event.step, event.value) for event in reader.Scalars(f"{split}/{name}")]
        assert points == [
            (line["step"], pytest.approx(line[name]))
            for line in record
            if line["split"] == split and line[name] is not None  # a window whose steps all overflowed has no loss
        ]  # fmt: skip


def test_run_that_is_not_finished_says_so(trained, tmp_path):
    copy = shutil.copytree(trained[0], tmp_path / "copy")
    summary = read_sealed(copy / "summary.json")
    write_sealed(copy / "summary.json", {**summary, "finished": False, "epoch": 2, "step": 16})
    codes, output = predict(copy, tmp_path / "rows.csv", "--csv", trained[1] / "eval.csv")
    assert codes == [0], output
    told = f"the run is not finished, its newest evaluation was after 2 of {EPOCHS} epochs: weights of step "
    assert f"{copy}: {told}{summary['best']['step']}\n" in output
    config = loader.load(copy / "config.yaml", ["train.max_steps=1000"])
    both = f"after 2 of {EPOCHS} epochs and 16 of 1,000 steps: "
    assert both in trained_run.unfinished(copy, config)
    assert trained_run.unfinished(trained[0], config) == ""
    for damaged in ({}, {"finished": False}, {**summary, "finished": False, "epoch": None}):
        write_sealed(copy / "summary.json", damaged)
        assert trained_run.unfinished(copy, config) == ""


def test_predictions_are_those_of_training_at_any_world_size(trained, tmp_path):
    folder, data = trained
    codes, output = predict(folder, tmp_path / "3.csv", "--csv", data / "eval.csv", world=3)
    assert codes == [0] * 3, output
    assert "23 rows in" in output
    assert "3 ranks" in output
    best = json.loads((folder / "summary.json").read_text())["best"]["top1"]
    assert f"labels of {data}/eval.csv:\nrows evaluated: 23 of 23\ntop1: {best:.4f}\nloss: " in output
    assert "predictions are correct" not in output
    assert (tmp_path / "3.csv").read_bytes() == (folder / "predictions.csv").read_bytes()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_other_columns_of_the_table_are_copied_as_text(trained, tmp_path, suffix):
    """Also of rows that cannot be read, of all ranks; a column with the name of one of ours gets another."""
    folder, data = trained
    rows = pd.read_csv(data / "eval.csv", dtype=str)
    rows["id"] = [f"00{row}" for row in range(len(rows))]
    rows["note"] = [f'a "{row}",\r\nb' if row % 2 else "" for row in range(len(rows))]
    rows["score_row"] = "mine"
    rows.loc[0, "path"] = "nowhere.png"
    rows.to_csv(tmp_path / "rows.csv", index=False, quoting=csv.QUOTE_ALL)
    words = ["--csv", tmp_path / "rows.csv", "task.on_bad_row=skip", "batch.eval_per_rank=1"]
    codes, output = predict(folder, out := tmp_path / f"out.{suffix}", *words, world=3)
    assert codes == [0] * 3, output
    table = pd.read_parquet(out) if suffix == "parquet" else pd.read_csv(out, dtype=str, keep_default_na=False)
    columns = ["id", "prediction", "label", "score_column", "score_row", "score_slope", "csv_id", "note"]
    assert list(table) == [*columns, "csv_score_row"]
    copied = table[["csv_id", "note", "csv_score_row"]].set_axis(["id", "note", "score_row"], axis=1)
    pd.testing.assert_frame_equal(copied, rows[["id", "note", "score_row"]], check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": {"opt_level": "O2"}, "train": {"ema_decay": 0.9}},
        {"parallel": {"strategy": "fsdp"}, "data": {"num_workers": 1}},
    ],
    ids=["O2 averaged", "fsdp"],
)
def test_predictions_are_those_of_training_with_other_recipes(tmp_path, settings):
    """Trained on two ranks, predicted on three."""
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path, data, **settings)
    assert run(config, 2) == [0, 0]
    folder = tmp_path / "runs" / "run"
    codes, output = predict(folder, tmp_path / "again.csv", "--csv", data / "eval.csv", world=3)
    assert codes == [0, 0, 0], output
    assert (tmp_path / "again.csv").read_bytes() == (folder / "predictions.csv").read_bytes()


@pytest.mark.slow
def test_predict_starts_its_own_ranks(trained, tmp_path):
    """``--world 2`` needs no training data and no labels, and skips unreadable images."""
    folder, data = trained
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(folder, elsewhere / "run")
    images = sorted((data / "images").glob("eval*.png"))
    names = [str(image) for image in images] + ["missing.png"]
    (elsewhere / "new.csv").write_text("photographer,path\n" + "".join(f"me,{name}\n" for name in names))
    words = [
        "-m", "harness", "predict", "run", "--csv", "new.csv", "--out", "new.parquet",
        "--world", "2", "task.on_bad_row=skip", "task.root=.", "task.train_csv=gone.csv", "task.eval_csv=gone.csv",
    ]  # fmt: skip
    terminal = tmp_path / "terminal.txt"
    assert python(words, terminal, cwd=elsewhere) == 0, terminal.read_text()
    named = (
        "rows that could not be read: 1; they have no prediction: new.csv:25: missing.png (No such file or directory)\n"
    )
    assert named in terminal.read_text()
    table = pd.read_parquet(elsewhere / "new.parquet")
    assert list(table) == ["id", "prediction", "score_column", "score_row", "score_slope", "photographer"]
    assert table["id"].tolist() == names
    assert table["prediction"].isna().tolist() == [False] * 23 + [True]
    trained_on = pd.read_csv(folder / "predictions.csv").set_index("id")
    names = [f"images/{image.name}" for image in images]
    assert dict(zip(names, table["prediction"], strict=False)) == trained_on["prediction"].to_dict()


@pytest.mark.slow
def test_killed_predict_leaves_no_process_and_no_file(trained, tmp_path):
    folder, data = trained
    images = sorted((data / "images").glob("eval*.png"))
    (tmp_path / "new.csv").write_text("photographer,path\n" + "".join(f"me,{name}\n" for name in images * 2500))
    words = [
        "-m", "harness", "predict", folder, "--csv", tmp_path / "new.csv", "--out", tmp_path / "out.csv",
        "--world", "2", f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip
    process = start_python(words, tmp_path / "terminal.txt")
    try:
        wait_until(lambda: list(tmp_path.glob("*out.csv*")), 100, "the first rows")
        left = descendants(process[0].pid)
    finally:
        process[0].kill()
        wait_for([process], 10)
    assert len(left) >= 2
    wait_until(lambda: not any(map(environment_of, left)), 25, "the end of the ranks")
    assert not list(tmp_path.glob("*out.csv*"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["RUN", "--csv", "CSV", "--out", "x.txt"], 2, "must end in .csv or .parquet"),
        (["RUN", "--csv", "CSV", "--out", "gone/x.csv"], 2, "there is no folder gone"),
        (["DATA", "--csv", "CSV", "--out", "x.csv"], 2, "not a run folder"),
        (["FRESH", "--csv", "CSV", "--out", "x.csv"], 2, "no weights yet"),
        (["FORGOT", "--csv", "CSV", "--out", "x.csv"], 2, "task.json"),
        (["RUN", "--csv", "gone.csv", "--out", "x.csv"], 65, "gone.csv"),
        (["RUN", "--csv", "CSV", "--out", "x.csv", "task.path_column=file"], 65, "no column 'file'"),
        (
            ["RUN", "--csv", "CSV", "--out", "x.csv", "task.root=nowhere", "model.args.width=5"],  # before the model
            65,
            "set task.root=DATA",
        ),
        (
            ["RUN", "--csv", "CSV"],
            2,
            "predictions.csv: this file already exists\n  -> --out predictions.csv replaces it",
        ),
        (["RUN", "--csv", "missing.csv"], 65, "missing.csv: no such annotation file"),
        (["RUN", "--images", "gone.jpg"], 65, "gone.jpg: there is no such image or folder"),
        (["RUN", "--images", "gone/day=1.jpg"], 65, "gone/day=1.jpg: there is no such image or folder"),
        (["RUN", "--out", "x.csv", "--images", "file:///gone/a.jpg?b=c"], 65, "image not found: /gone/a.jpg?b=c"),
        (["RUN", "--images", "fresh"], 65, "fresh: no images; skipped: "),
        (["RUN", "."], 2, " --images ."),
        (["RUN", "new.csv"], 2, " --csv new.csv"),
        (["nope", "--csv", "CSV"], 2, "nope: there is no such folder"),
        (["RUN", "--csv", "CSV", "--out", "x.csv", "model.args.width=5"], 70, "do not fit this model"),
        (["RUN", "--csv", "CSV", "--out", "x.csv", "modle.name=x"], 2, "did you mean model"),
        (["RUN", "--csv", "CSV", "--out", "x.csv", "--world", "2", "task.path_column=file"], 65, "no column 'file'"),
    ],
)
def test_errors_come_before_anything_is_written(trained, tmp_path, monkeypatch, capfd, words, code, message):
    folder, data = trained
    monkeypatch.chdir(tmp_path)
    fresh = shutil.copytree(folder, tmp_path / "fresh")
    (fresh / "weights.safetensors").unlink()
    forgot = shutil.copytree(folder, tmp_path / "forgot")
    (forgot / "task.json").unlink()
    places = {"RUN": folder, "CSV": data / "eval.csv", "DATA": data, "FRESH": fresh, "FORGOT": forgot}
    (tmp_path / "predictions.csv").write_text("mine")
    assert cli.main(["predict", *(str(places.get(word, word)) for word in words)]) == code
    message = message.replace("DATA", str(data))
    assert message in capfd.readouterr().err
    assert not list(tmp_path.glob("*x.*"))


def test_predictions_have_a_default_name(trained, tmp_path, monkeypatch):
    folder, data = trained
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict", str(folder), "--csv", str(data / "eval.csv")]) == 0
    amp.reset()  # the process of a command ends with it
    assert (tmp_path / "predictions.csv").read_bytes() == (folder / "predictions.csv").read_bytes()


@pytest.mark.parametrize("former", ["id,prediction\n1,a\n", "", "id,label\n1,a\n", "notes", "\0\n"])
def test_only_former_predictions_are_replaced(trained, tmp_path, capfd, former):
    (out := tmp_path / "mine.csv").write_text(former)
    code = cli.main(["predict", str(trained[0]), "--csv", str(trained[1] / "eval.csv"), "--out", str(out)])
    amp.reset()
    may_be_replaced = not former or "prediction" in former
    assert (code == 0, out.read_text() != former) == (may_be_replaced, may_be_replaced)
    assert ("it would replace a file that is no table of predictions" in capfd.readouterr().err) != may_be_replaced


@pytest.mark.parametrize("world", [1, 2])
def test_predictions_of_images_without_a_table(trained, tmp_path, monkeypatch, world):
    """Images are named as they are found, settings after them are settings, and damaged ones are named."""
    folder, data = trained
    monkeypatch.chdir(tmp_path)
    expected = pd.read_csv(folder / "predictions.csv", index_col="id")["prediction"]
    places = {"new/deep/1.png": 3, "new/it's, 2.PNG": 4, "one=two.png": 5}
    (tmp_path / "new" / "deep").mkdir(parents=True)
    for place, number in places.items():
        shutil.copy(data / "images" / f"eval{number}.png", place)
    (tmp_path / "new" / "notes.txt").touch()
    words = ["--images", "new", "one=two.png", "train.epochs=1"]
    codes, output = predict(folder, tmp_path / "some.csv", *words, world=world)
    assert codes == [0] * world, output
    found = pd.read_csv("some.csv", index_col="id")["prediction"]
    assert found.to_dict() == {place: expected[f"images/eval{number}.png"] for place, number in places.items()}
    assert ("3 images; skipped: .txt files (1)\n" in output) == (world == 1)
    (tmp_path / "new" / "3.png").write_bytes(b"\x89PNG and no more")
    codes, output = predict(folder, tmp_path / "none.csv", *words, world=world)
    assert (codes, "image cannot be decoded: new/3.png" in output) == ([65] * world, True), output
    codes, output = predict(folder, tmp_path / "all.csv", *words, "task.on_bad_row=skip", world=world)
    assert (codes, "they have no prediction: new/3.png (the PNG is damaged" in output) == ([0] * world, True), output
    assert "harness-" not in output, "no temporary file is named"
    (tmp_path / "scan.tif").write_bytes(b"II*\0 and more")
    words = ["--images", "scan.tif", "new/3.png", "task.on_bad_row=skip"]
    codes, output = predict(folder, tmp_path / "no.csv", *words, world=world)
    told = "(tried: 2): scan.tif (the TIFF is damaged or incomplete (Pillow: "
    assert (codes, told in output, "new/3.png (the PNG is" in output) == ([65] * world, True, True), output
    assert "CSV" not in output
    assert "harness-" not in output


def test_images_for_a_model_of_texts(trained, tmp_path, capsys):
    other = shutil.copytree(trained[0], tmp_path / "texts")
    (other / "config.yaml").write_text(
        "name: x\ntask: {name: text_csv, train_csv: a.csv, eval_csv: b.csv}\n"
        "model: {name: text_cnn}\nbatch: {global: 8}\n"
    )
    assert cli.main(["predict", str(other), "--images", str(tmp_path)]) == 2
    assert "give a CSV with text: --csv CSV" in capsys.readouterr().err


def test_no_command_replaces_what_it_reads(trained, tmp_path, monkeypatch, capfd):
    folder, data = trained
    monkeypatch.chdir(tmp_path)
    shutil.copy(data / "eval.csv", tmp_path / "a.csv")
    os.link(tmp_path / "a.csv", tmp_path / "b.csv")
    train_csv, run = str(data / "train.csv"), str(folder)
    before = {path: path.read_bytes() for path in (tmp_path / "a.csv", data / "train.csv", *folder.glob("*.*"))}
    for words in (
        ["predict", run, "--csv", "a.csv", "--out", "a.csv"],
        ["predict", run, "--csv", "a.csv", "--out", "b.csv", "--world", "2"],
        ["predict", run, "--csv", "a.csv", "--out", train_csv],
        ["predict", run, "--csv", "a.csv", "--out", f"{run}/predictions.csv"],
        ["export", run, "--format", "safetensors", "--out", train_csv],
        ["export", run, "--format", "safetensors", "--out", f"{run}/weights.safetensors"],
        ["report", run, "--out", f"{run}/confusion.csv"],
    ):
        assert cli.main(words) == 2, words
        assert "cannot write the output: it would replace" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_world_must_match_the_launcher(trained, tmp_path):
    folder, data = trained
    codes, output = predict(folder, tmp_path / "x.csv", "--csv", data / "eval.csv", "--world", 3, world=2)
    assert codes == [2, 2]
    assert "--world 3, but a launcher has started 2 processes" in output


# What the last rank has of its own; the exit codes; parts of the output.
DIFFERENT_RANKS = {
    "another setting": (
        {"last": ["batch.eval_per_rank=3"]}, [2, 2],
        ["the ranks were started differently", "batch.eval_per_rank: null on rank 0"],
    ),
    "an error": ({"prepare": _break_the_disk}, [70, 70], ["Input/output error"]),
    "a killed rank": (
        {"prepare": _die_in_a_block}, [70, -9], ["lost contact with the other ranks: rank 1: its process"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT_RANKS)
def test_ranks_that_differ_are_named(trained, tmp_path, case):
    folder, data = trained
    own, codes, words = DIFFERENT_RANKS[case]
    out = tmp_path / "x.csv"
    found, output = predict(folder, out, "--csv", data / "eval.csv", "runtime.timeout_s=60", world=2, **own)
    assert found == codes, output
    for word in words:
        assert output.count(word) == 1, output
    assert "gloo" not in without_greetings(output)
    assert "Traceback" not in output
    assert not out.exists()


def test_task_that_cannot_predict_files(trained, tmp_path, capsys):
    folder, data = trained
    other = shutil.copytree(folder, tmp_path / "names")
    (other / "config.yaml").write_text(
        "name: x\ntask: {name: pet_names}\nmodel: {name: char_lstm}\nbatch: {global: 8}\n"
    )
    assert cli.main(["predict", str(other), "--csv", str(data / "eval.csv"), "--out", str(tmp_path / "x.csv")]) == 2
    assert "harness generate" in capsys.readouterr().err


# Export


def reference(folder, data):
    """(inputs as the metadata describe them, outputs of the model)."""
    from torchvision.io import ImageReadMode, decode_image

    paths = pd.read_csv(data / "eval.csv")["path"]
    pixels = torch.stack([decode_image(str(data / path), mode=ImageReadMode.GRAY) for path in paths])
    model = SmallCNN(3, 1, width=4)
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    inputs = (pixels / 255 - 0.5) / 0.5
    with torch.no_grad():
        return inputs, model.eval()(inputs)


@pytest.mark.parametrize("kind", ["safetensors", "torch_export", "onnx"])
def test_exported_models_compute_the_same(trained, tmp_path, kind, capsys):
    folder, data = trained
    out = tmp_path / f"model{base.find(kind).suffix}"
    if kind == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
    assert cli.main(["export", str(folder), "--format", kind, "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    inputs, expected = reference(folder, data)
    facts = json.loads((tmp_path / f"{out.name}.json").read_text())
    assert facts["classes"] == ["column", "row", "slope"]
    assert facts["inputs"] == [{"name": "images", "type": "float32", "shape": ["batch", 1, 8, 8]}]
    assert facts["outputs"] == [{"name": "logits", "type": "float32", "shape": ["batch", 3]}]
    assert facts["preprocessing"]["mean"] == facts["preprocessing"]["std"] == [0.5]
    assert facts["checked"]["largest_difference"] <= facts["checked"]["allowed"] == base.find(kind).tolerance
    if kind == "safetensors":
        best, exported = load_file(folder / "weights.safetensors"), load_file(out)
        assert best.keys() == exported.keys()
        assert all(torch.equal(best[name], exported[name]) for name in best)
        again = SmallCNN(3, 1, width=4).eval()
        again.load_state_dict(load_file(out))
    elif kind == "torch_export":
        again = torch.export.load(out).module()
    else:
        session = onnxruntime.InferenceSession(str(out))

        def again(batch):
            return torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0])

    for size in (23, 1, 2):  # any number of rows
        with torch.no_grad():
            found = again(inputs[:size])
        np.testing.assert_allclose(found.numpy(), expected[:size].numpy(), atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([out.name, out.name + ".json"])


def test_export_that_is_killed_leaves_nothing_that_the_next_one_does_not_remove(trained, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(tensors, path, metadata):
        (Path(path).parent / ".tmpaBc123").write_bytes(b"half")  # as safetensors does
        raise Killed

    folder, out = trained[0], tmp_path / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("harness.runs.weights_file.save_file", killed)
        with pytest.raises(Killed):
            export.export(folder, "safetensors", out)
    assert not list(tmp_path.iterdir())
    (left := tmp_path / "model.safetensors.tmp.tmp").mkdir()  # by SIGKILL
    (left / ".tmpaBc123").write_bytes(b"half")
    export.export(folder, "safetensors", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, f"{out.name}.json"]


def test_export_with_wrong_outputs_is_not_written(trained, tmp_path, monkeypatch):
    folder, _ = trained
    load = torch.export.load

    class Wrong:
        def __init__(self, file):
            self.right = load(file).module()

        def module(self):
            return lambda inputs: self.right(inputs) + 1e-3

    monkeypatch.setattr(torch.export, "load", Wrong)
    with pytest.raises(HarnessError, match="the exported model's outputs differ from the original's by"):
        export.export(folder, "torch_export", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_model_that_cannot_be_traced(trained, tmp_path, monkeypatch):
    class Branching(SmallCNN):
        def forward(self, images):
            outputs = super().forward(images)
            return outputs * 2 if outputs.sum() > 0 else outputs

    folder, _ = trained
    monkeypatch.setattr(small_cnn, "Model", Branching)
    with pytest.raises(HarnessError, match="torch.export cannot trace this model"):
        export.export(folder, "torch_export", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_export_needs_the_data_of_the_training(trained, tmp_path, capsys):
    folder, data = trained
    (data / "other.csv").write_text((data / "train.csv").read_text() + "images/train0.png,zebra\n")
    words = ["export", str(folder), "--format", "safetensors", "--out", str(tmp_path / "x")]
    assert cli.main([*words, f"task.train_csv={data / 'other.csv'}"]) == 2
    assert "differ from the run's task.json" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"classes": 3}, {"image_size": "x"}, {"mean": 5}])
def test_facts_of_a_wrong_type(trained, tmp_path, capsys, wrong):
    folder, data = trained
    damaged = shutil.copytree(folder, tmp_path / "run")
    facts = read_sealed(damaged / "task.json")
    (damaged / "task.json").write_text(json.dumps(facts | wrong))
    out = str(tmp_path / "out")
    for words in (
        ["predict", str(damaged), "--csv", str(data / "train.csv"), "--out", f"{out}.csv"],
        ["export", str(damaged), "--format", "safetensors", "--out", out],
    ):
        assert cli.main([*words, "--trust"]) == 2
        assert "task.json" in capsys.readouterr().err


def test_export_of_damaged_weights(trained, tmp_path, capsys):
    damaged = shutil.copytree(trained[0], tmp_path / "run")
    (damaged / "weights.safetensors").write_bytes(b"half")
    assert cli.main(["export", str(damaged), "--format", "safetensors"]) == 70
    assert "weights.safetensors: the best weights cannot be read" in capsys.readouterr().err


def test_weights_of_a_diverged_run_are_refused(trained, tmp_path, capsys):
    diverged = shutil.copytree(trained[0], tmp_path / "run")
    weights = load_file(diverged / "weights.safetensors")
    name = list(weights)[1]
    weights[name].view(-1)[0] = torch.nan
    save_weights(weights, diverged / "weights.safetensors", {}, tmp_path / "work")
    out = tmp_path / "out.csv"
    for words in (["export", str(diverged), "--format", "safetensors", "--out", str(tmp_path / "x")],
                  ["predict", str(diverged), "--csv", str(trained[1] / "eval.csv"), "--out", str(out)]):  # fmt: skip
        assert cli.main(words) == 70
        said = f"the weights are infinite or NaN in {name} (1 of {len(weights)} tensors): the training diverged"
        assert said in capsys.readouterr().err
    assert not out.exists()
    assert not (tmp_path / "x").exists()


def test_onnx_without_its_packages(trained, tmp_path, monkeypatch):
    folder, _ = trained
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(HarnessError) as error:
        export.export(folder, "onnx", tmp_path / "x.onnx")
    assert "missing packages: onnxruntime" in str(error.value)
    assert "pip install 'apex-harness[onnx]'" in str(error.value)


# Flipped bits in the files that commands trust


@pytest.fixture
def flipped(trained, tmp_path):
    """A function that copies the run and flips a bit of a digit after ``words`` in one of its files."""

    def flip(name, words):
        folder = shutil.copytree(trained[0], tmp_path / "runs" / "run")
        content = bytearray((folder / name).read_bytes())
        place = content.index(words.encode()) + len(words)
        while not chr(content[place]).isdigit():
            place += 1
        content[place] ^= 1
        (folder / name).write_bytes(content)
        return folder

    return flip


@pytest.mark.parametrize(
    ("name", "words", "refusing"),
    [
        ("config.yaml", "momentum: ", ["predict", "export", "compare"]),
        ("task.json", "image_size", ["predict", "export"]),
        ("summary.json", '"top1"', ["compare"]),
    ],
)
def test_a_flipped_bit_is_refused_and_listed_by_report(trained, flipped, tmp_path, capsys, name, words, refusing):
    folder, out = flipped(name, words), str(tmp_path / "out")
    commands = {
        "predict": [str(folder), "--csv", str(trained[1] / "train.csv"), "--out", f"{out}.csv", "--trust"],
        "export": [str(folder), "--format", "safetensors", "--out", out, "--trust"],
        "compare": [str(trained[0]), str(folder)],
    }
    for verb in refusing:
        assert cli.main([verb, *commands[verb]]) == 2
        assert re.search(f"{name}.*damaged or edited", capsys.readouterr().err)
    if name != "task.json":
        pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")
        assert cli.main(["report", str(folder), "--out", f"{out}.html"]) == 0
        assert f"{name} cannot be read: it was damaged or edited" in Path(f"{out}.html").read_text()


@pytest.mark.parametrize(
    ("name", "words", "more", "code", "line"),
    [
        ("config.yaml", "momentum: ", 0, 2, "the configuration of the earlier run in this folder is damaged"),
        ("summary.json", '"top1"', 0, 2, "the summary of this finished run cannot be trusted"),
        ("summary.json", '"top1"', 1, 0, "summary.json is written again at the next evaluation"),
        ("task.json", "image_size", 0, 0, "task.json is written again now"),
    ],
)
def test_a_flipped_bit_is_refused_or_repaired_by_a_resume(trained, flipped, tmp_path, name, words, more, code, line):
    folder = flipped(name, words)
    config = shutil.copy(trained[0].parent.parent / "config.yaml", tmp_path)
    assert run(Path(config), 1, f"output={tmp_path / 'runs'}", f"train.epochs={EPOCHS + more}") == [code]
    assert line in (tmp_path / "terminal-0.txt").read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    if code == 0:
        read_sealed(folder / name)
