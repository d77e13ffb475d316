"""Each tracker, read back with its own reader: after a kill no entry is missing and none is there twice."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.config import loader
from harness.trackers import metrics_log, pictures
from harness.trackers.base import LabelPairs, Sample, scalars
from tests.end_to_end.processes import wait_until
from tests.fixtures import make_config, write_rows

IMAGES = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
SAMPLE = Sample(
    ["id", "prediction", "label", "score_cat", "score_dog"],
    [["a.png", "cat", "cat", 0.9, 0.1], ["b.png", "cat", "dog", 0.6, 0.4], ["c.png", "dog", "dog", 0.2, 0.8]],
    IMAGES,
    confusion=LabelPairs(["cat", "dog"], np.array([[1, 0], [1, 1]])),
)
WRONG = Sample(SAMPLE.columns, SAMPLE.rows[1:2], IMAGES[1:2], "wrong")
BIN = Path(sys.executable).parent


@pytest.fixture
def start(tmp_path):
    """Opens the log of a run with one tracker, rewound to an offset."""
    write_rows(tmp_path, "train", 4)
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"weights")
    (folder / "summary.json").write_text("{}")

    def start(name: str, offset: int, **settings):
        config = make_config(tmp_path, trackers=[name], **settings)
        log = metrics_log.open_log(folder / "metrics.jsonl", 0, config, loader.to_text(config))
        log.rewind(offset)
        return log

    return start


def killed_and_resumed(start, folder: Path, name: str) -> list[dict]:
    """The entries of a run that was killed after step 13 and an evaluation, and resumed from step 10."""
    log = start(name, 0)
    for step in range(1, 11):
        log.log("train", {"step": step, "epoch": 0, "loss": 1 / step, "wall_s": step * 0.5})
    offset = log.offset()
    log.log("eval", {"step": 10, "epoch": 1, "top1": 0.25, "loss": float("nan"), "wall_s": 5.2})
    for step in (11, 12, 13):
        log.log("train", {"step": step, "epoch": 1, "loss": 1 / step, "wall_s": step * 0.5})
    log.close()  # every entry has reached the tracker: the worst case for the resume

    log = start(name, offset, train={"epochs": 20})
    log.log("eval", {"step": 10, "epoch": 1, "top1": 0.25, "loss": float("nan"), "wall_s": 7.2})
    for step in range(11, 16):
        log.log("train", {"step": step, "epoch": 1, "loss": 1 / step, "wall_s": step * 0.7})
    log.show(SAMPLE)
    log.show(WRONG)
    log.close(done=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 16
    return [json.loads(line) for line in lines]


def expected(lines: list[dict], name: str) -> list[tuple[int, float]]:
    return [(line["step"], scalars(line)[name]) for line in lines if name in scalars(line)]


@pytest.fixture(autouse=True)
def no_warning(caplog, monkeypatch):
    """Fails a test whose tracker logs a warning, which is how trackers report errors."""
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    monkeypatch.setattr(metrics_log, "STOP_S", metrics_log.CLOSE_S)  # enough for every entry on a slow machine
    yield
    assert [r.getMessage() for r in caplog.records if r.name == "harness" and r.levelno >= logging.WARNING] == []


def test_tensorboard(tmp_path, start):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "runs" / "small" / "tensorboard"
    folder.mkdir()
    watching = EventAccumulator(str(folder))  # like an open TensorBoard
    seen_early = start("tensorboard", 0)
    seen_early.log("train", {"step": 9, "epoch": 0, "loss": 5.0, "wall_s": 1.0})
    seen_early.close()
    watching.Reload()
    assert [event.step for event in watching.Scalars("train/loss")] == [9]

    lines = killed_and_resumed(start, folder.parent, "tensorboard")
    fresh = EventAccumulator(str(folder))
    for reader in (fresh, watching):
        reader.Reload()
        for name in ("train/loss", "eval/top1"):
            points = [(event.step, event.value) for event in reader.Scalars(name)]
            assert points == [(step, pytest.approx(value)) for step, value in expected(lines, name)], name
    assert set(fresh.Tags()["scalars"]) == {"train/loss", "eval/top1"}  # eval/loss was not finite; the rest is no chart
    plugin = fresh.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optimizer.name" in plugin
    assert b"train.log_every" not in plugin  # which changes nothing of what is trained
    metrics = fresh.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert all(f"eval/{name}".encode() in metrics for name in ("top1", "loss"))
    started = json.loads((folder.parent / "trackers.json").read_text())["started"]
    assert [event.wall_time for event in fresh.Scalars("train/loss")][10] == pytest.approx(started + 11 * 0.7)
    (config,) = fresh.Tensors("config/text_summary")
    assert "epochs: 20" in config.tensor_proto.string_val[0].decode()
    (table,) = fresh.Tensors("predictions/text_summary")
    assert "|b.png|cat|dog|0.6|0.4|" in table.tensor_proto.string_val[0].decode()
    images = fresh.Tags()["images"]
    assert [name.partition(" ")[0] for name in images] == [
        *(f"predictions/0{n}" for n in range(3)),
        "confusion",
        "wrong/00",
    ]
    assert images[4] == "wrong/00 prediction cat, label dog"
    assert fresh.Images(images[1])[0].encoded_image_string.startswith(b"\x89PNG")


def test_names_in_a_picture_can_be_told_apart():
    names = ["猫", "犬", "northern cardinal", "northern cardoon", "dog"]
    assert pictures.short_names(names) == ["? 0", "? 1", "northern card~ 2", "northern card~ 3", "dog"]


def records_of(file: Path) -> Iterator[bytes]:
    """The records of an offline wandb file: LevelDB's log format after a header of 7 bytes."""
    content, block = file.read_bytes(), 32768
    assert content[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(content):
        left = block - position % block
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or last fragment
            yield record
            record = b""


def history_of(file: Path) -> tuple[list[dict], list]:
    """The rows that were logged, and all records, parsed with wandb's own classes."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    def whole() -> list[Record]:
        with suppress(struct.error, DecodeError):
            found = [Record.FromString(record) for record in records_of(file)]
            return found if any(record.WhichOneof("record_type") == "exit" for record in found) else []
        return []

    records = wait_until(whole, 30, "the end of the file, which a wandb process writes after finish() has returned")
    rows = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return rows, records


@pytest.mark.slow
def test_wandb(tmp_path, start, monkeypatch):
    pytest.importorskip("wandb")
    folder = tmp_path / "runs" / "small"
    lines = killed_and_resumed(start, folder, "wandb")
    run_id = json.loads((folder / "trackers.json").read_text())["id"]
    (offline,) = (folder / "wandb").glob("offline-run-*")  # one for both starts, complete
    assert offline.name.endswith(run_id)
    rows, records = history_of(offline / f"run-{run_id}.wandb")
    assert not any("train/wall_s" in row for row in rows)
    for name in ("train/loss", "eval/top1"):
        assert [(row["step"], row[name]) for row in rows if name in row] == expected(lines, name), name
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.display_name, run.project) == (run_id, "small", "apex-harness")
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["train.epochs"] == 20
    (table,) = [row for row in rows if "predictions/path" in row]
    assert (table["predictions/ncols"], table["predictions/nrows"]) == (6, 3)
    content = json.loads((offline / "files" / table["predictions/path"]).read_text())
    assert content["columns"] == ["id", "image", "prediction", "label", "score_cat", "score_dog"]
    assert content["data"][1][0] == "b.png"
    artifact, _ = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    staged = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert len(staged) == 4  # the table, with its images
    assert sum("confusion/path" in row for row in rows) == 1
    assert all(path.is_relative_to(folder / "wandb") for path in staged.values())  # not in the user's home
    whole = json.loads(staged["predictions.table.json"].read_text())
    assert staged[whole["data"][1][1]["path"]].read_bytes().startswith(b"\x89PNG")
    done = subprocess.run(
        [BIN / "wandb", "sync", "--dry-run", offline], capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert run_id in done.stdout + done.stderr


def test_wandb_keeps_the_images_of_other_runs_in_a_shared_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from harness.trackers.wandb import Tracker

    monkeypatch.setattr(wandb, "init", lambda **_: SimpleNamespace(dir="x", define_metric=lambda *_, **__: None))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    files = []
    for name in ("one", "two"):
        os.environ.pop("WANDB_DATA_DIR", None)  # as in another process
        Tracker().start(SimpleNamespace(id=name, name=name, folder=tmp_path, settings={}), ())
        files.append(Path(os.environ["WANDB_DATA_DIR"]) / f"{name}.png")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].touch()
    assert all(file.is_file() for file in files)


def test_wandb_shows_images_of_one_row_or_column():
    pytest.importorskip("wandb")
    from harness.trackers.wandb import Tracker

    for shape, expected in {(1, 1, 5): ("L", (5, 1)), (3, 1, 5): ("RGB", (5, 1)), (3, 4, 1): ("RGB", (1, 4))}.items():
        tracker, logged = Tracker(), {}
        tracker._run = SimpleNamespace(log=logged.update)
        tracker.show(Sample(columns=["id"], rows=[[0]], images=np.zeros((1, *shape), np.uint8)))
        picture = logged["predictions"].data[0][1].image
        assert (picture.mode, picture.size) == expected


def test_wandb_follows_its_environment_variables(start, monkeypatch, caplog):
    pytest.importorskip("wandb")
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = start("wandb", 0)
    log.log("train", {"step": 1, "loss": 1.0})
    log.close(done=True)
    assert "WANDB_MODE=disabled" in caplog.text


def test_wandb_with_an_api_key_resumes_the_online_run(start, monkeypatch, caplog):
    """Entries that the server already has are not sent again. ``wandb.init`` is replaced: there is no server here."""
    wandb = pytest.importorskip("wandb")
    caplog.set_level(logging.INFO)
    seen, logged = {}, []

    class Run:
        url, dir = "https://wandb.example/run", "x"
        summary = {"train/step": 12, "eval/step": 10}

        def define_metric(self, *args, **options): ...

        def log(self, values):
            logged.append(values)

        def finish(self, exit_code): ...

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "init", lambda **options: seen.update(options) or Run())
    log = start("wandb", 0)
    log.log("eval", {"step": 10, "top1": 0.5})
    for step in (11, 12, 13):
        log.log("train", {"step": step, "loss": 0.5})
    log.close(done=True)
    assert (seen["mode"], seen["resume"]) == ("online", "allow")
    assert logged == [{"step": 13, "train/step": 13, "train/loss": 0.5}]
    assert "view at https://wandb.example/run" in caplog.text


class FakeTrackio:
    """What the tracker uses of trackio 0.36, with its signatures; the runs are in memory."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def Api(self) -> FakeTrackio:
        return SimpleNamespace(runs=self._of)

    def _of(self, project: str) -> list[Any]:
        if not self.runs:
            raise ValueError(f"Project '{project}' does not exist")
        return [SimpleNamespace(name=name, delete=lambda name=name: self.runs.pop(name)) for name in self.runs]

    def init(self, project: str, name: str | None = None, group: str | None = None, config: dict | None = None,
             resume: str = "never", embed: bool = True) -> Any:  # fmt: skip
        assert resume == "allow" or name not in self.runs
        run = self.runs.setdefault(name, {"config": config, "rows": [], "project": project, "group": group})
        step = max((row["step"] for row in run["rows"]), default=-1)
        return SimpleNamespace(
            log=lambda metrics, step=None: run["rows"].append({**metrics, "step": step}),
            finish=lambda: None, _next_step=step + 1,
        )  # fmt: skip

    def Image(self, value: np.ndarray, caption: str | None = None) -> Any:
        assert (value.dtype, value.ndim, value.shape[-1]) == (np.uint8, 3, 3)
        return {"_type": "trackio.image"}

    def Table(self, columns=None, data=None, dataframe=None) -> Any:
        return {"_type": "trackio.table", "_value": dataframe.to_dict("records")}


@pytest.fixture(params=["installed", "fake"])
def trackio_runs(request, tmp_path, monkeypatch):
    """Returns {name of a run: rows} of a project."""
    monkeypatch.delitem(sys.modules, "harness.trackers.trackio", raising=False)
    if request.param == "fake":
        fake = FakeTrackio()
        monkeypatch.setitem(sys.modules, "trackio", fake)
        monkeypatch.setattr(metrics_log.importlib.util, "find_spec", lambda name: object())
        return lambda project: {name: run["rows"] for name, run in fake.runs.items() if run["project"] == project}
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="install the extra trackio")
    from trackio.sqlite_storage import SQLiteStorage

    return lambda project: {run.name: SQLiteStorage.get_logs(project, run.name) for run in trackio.Api().runs(project)}


def test_trackio(tmp_path, start, trackio_runs):
    """One run for both starts, which shows the log and the predictions."""
    lines = killed_and_resumed(start, tmp_path / "runs" / "small", "trackio")
    run_id = json.loads((tmp_path / "runs" / "small" / "trackers.json").read_text())["id"]
    found = trackio_runs("apex-harness")
    assert list(found) == [f"small-{run_id}"]
    (rows,) = found.values()
    for name in ("train/loss", "eval/top1"):
        points = [(row["step"], row[name]) for row in rows if name in row]
        assert points == [(step, pytest.approx(value)) for step, value in expected(lines, name)], name
    (shown,) = [row for row in rows if "predictions" in row]
    table = shown["predictions"]["_value"]
    assert [row["id"] for row in table] == ["a.png", "b.png", "c.png"]
    assert all(row["image"]["_type"] == "trackio.image" for row in table)
    assert shown["confusion"]["_type"] == "trackio.image"
    assert sum("wrong" in row for row in rows) == 1


@pytest.mark.parametrize("trackio_runs", ["fake"], indirect=True)
def test_trackio_of_a_space_resumes_its_run(start, trackio_runs, monkeypatch, caplog):
    """What is there cannot be removed, so only steps from the last one on are sent."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    for last in (12, 14):
        log = start("trackio", 0)
        for step in range(10, last + 1):
            log.log("train", {"step": step, "epoch": 0, "loss": 0.5})
        log.close(done=True)
    (rows,) = trackio_runs("mine").values()
    assert [row["step"] for row in rows] == [10, 11, 12, 12, 13, 14]
    assert "view at me/space" in caplog.text


@pytest.mark.slow
def test_mlflow(tmp_path, start, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    (tmp_path / "runs" / "small" / "predictions.csv").write_text("id\n1\n")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # as if it was not set
    lines = killed_and_resumed(start, tmp_path / "runs" / "small", "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("apex-harness")
    assert experiment.artifact_location == (tmp_path / "runs" / "mlartifacts").as_uri()
    assert (tmp_path / "runs" / "mlflow.db.lock").exists()
    (run,) = client.search_runs([experiment.experiment_id])  # one for both starts
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    kept = json.loads((tmp_path / "runs" / "small" / "trackers.json").read_text())
    assert (run.data.tags["apex_harness.id"], run.info.start_time) == (kept["id"], int(kept["started"] * 1000))
    for name in ("train/loss", "eval/top1"):
        points = sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))
        assert points == expected(lines, name), name
    assert run.data.params["optimizer.name"] == "sgd"
    assert run.data.params["train.epochs"] == "10"  # MLflow parameters cannot change; config.yaml is current
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "summary.json", "predictions.csv", "predictions", "wrong", "confusion.png", "model"}
    assert [file.path for file in client.list_artifacts(run.info.run_id, "model")] == ["model/weights.safetensors"]
    pictures = [file.path for file in client.list_artifacts(run.info.run_id, "predictions")]
    assert pictures[1] == "predictions/01 prediction cat_ label dog.png"
    config = Path(client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path)))
    assert "epochs: 20" in config.read_text()

    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts of another store
    other = shutil.copy(tmp_path / "runs" / "mlflow.db", tmp_path / "elsewhere.db")  # to create one takes seconds
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    start("mlflow", (tmp_path / "runs" / "small" / "metrics.jsonl").stat().st_size).close()  # stopped early
    client = MlflowClient(f"sqlite:///{other}")
    (late,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert late.info.status == "KILLED"
    points = sorted((metric.step, metric.value) for metric in client.get_metric_history(late.info.run_id, "train/loss"))
    assert points == expected(lines, "train/loss")  # replayed from the log
