"""The tools themselves, read back by their own readers: nothing is missing, and nothing is there twice after a kill."""

from __future__ import annotations

import json
import logging
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from harness.config import loader
from harness.trackers import mirrors
from harness.trackers.mirror import Sample, scalars
from tests.end_to_end.processes import wait_until
from tests.fixtures import make_config, write_rows

IMAGES = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
SAMPLE = Sample(
    ["id", "prediction", "label", "score_cat", "score_dog"],
    [["a.png", "cat", "cat", 0.9, 0.1], ["b.png", "cat", "dog", 0.6, 0.4], ["c.png", "dog", "dog", 0.2, 0.8]],
    IMAGES,
)
BIN = Path(sys.executable).parent


@pytest.fixture
def start(tmp_path):
    """Starts a run that mirrors to one tool: a tracker, which goes on where the record is cut."""
    write_rows(tmp_path, "train", 4)
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"weights")
    (folder / "summary.json").write_text("{}")

    def start(name: str, offset: int, **settings):
        config = make_config(tmp_path, trackers=[name], **settings)
        tracker = mirrors.make(folder / "metrics.jsonl", 0, config, loader.to_text(config))
        tracker.rewind(offset)
        return tracker

    return start


def two_halves(start, name: str, done: bool = True) -> list[dict]:
    """A run that is killed after step 13 and an evaluation, and goes on from step 10: the lines of its record."""
    tracker = start(name, 0)
    for step in range(1, 11):
        tracker.log("train", {"step": step, "epoch": 0, "loss": 1 / step, "wall_s": step * 0.5})
    offset = tracker.offset()
    tracker.log("eval", {"step": 10, "epoch": 1, "top1": 0.25, "loss": float("nan"), "wall_s": 5.2})
    for step in (11, 12, 13):
        tracker.log("train", {"step": step, "epoch": 1, "loss": 1 / step, "wall_s": step * 0.5})
    tracker.close()  # all that was told has arrived, which is the worst case

    tracker = start(name, offset, train={"epochs": 20})
    tracker.log("eval", {"step": 10, "epoch": 1, "top1": 0.25, "loss": float("nan"), "wall_s": 7.2})
    for step in range(11, 16):
        tracker.log("train", {"step": step, "epoch": 1, "loss": 1 / step, "wall_s": step * 0.7})
    tracker.show(SAMPLE)
    tracker.close(done)
    record = tracker._path.read_text().splitlines()
    assert len(record) == 16
    return [json.loads(line) for line in record]


def expected(lines: list[dict], name: str) -> list[tuple[int, float]]:
    return [(line["step"], scalars(line)[name]) for line in lines if name in scalars(line)]


@pytest.fixture(autouse=True)
def no_warning(caplog, monkeypatch):
    """A tool that fails is a warning, which here is a failure."""
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    monkeypatch.setattr(mirrors, "STOP_S", mirrors.CLOSE_S)  # two_halves: all has arrived, on a slow machine too
    yield
    assert [r.getMessage() for r in caplog.records if r.name == "harness" and r.levelno >= logging.WARNING] == []


def test_tensorboard(tmp_path, start):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "runs" / "small" / "tensorboard"
    folder.mkdir()
    watching = EventAccumulator(str(folder))  # as a TensorBoard that somebody looks at all the while
    seen_early = start("tensorboard", 0)
    seen_early.log("train", {"step": 9, "epoch": 0, "loss": 5.0, "wall_s": 1.0})
    seen_early.close()
    watching.Reload()
    assert [event.step for event in watching.Scalars("train/loss")] == [9]

    lines = two_halves(start, "tensorboard")
    fresh = EventAccumulator(str(folder))
    for reader in (fresh, watching):
        reader.Reload()
        for name in ("train/loss", "train/wall_s", "eval/top1"):
            points = [(event.step, event.value) for event in reader.Scalars(name)]
            assert points == [(step, pytest.approx(value)) for step, value in expected(lines, name)], name
    assert "eval/loss" not in fresh.Tags()["scalars"]  # it was not finite
    started = json.loads((folder.parent / "trackers.json").read_text())["started"]
    assert [event.wall_time for event in fresh.Scalars("train/loss")][10] == pytest.approx(started + 11 * 0.7)
    (config,) = fresh.Tensors("config/text_summary")
    assert "epochs: 20" in config.tensor_proto.string_val[0].decode()
    (table,) = fresh.Tensors("predictions/text_summary")
    assert "|b.png|cat|dog|0.6|0.4|" in table.tensor_proto.string_val[0].decode()
    images = fresh.Tags()["images"]
    assert len(images) == 3
    assert "prediction" in images[1]
    assert fresh.Images(images[1])[0].encoded_image_string.startswith(b"\x89PNG")


def records_of(file: Path) -> Iterator[bytes]:
    """The records in a file that wandb left on disk: LevelDB's log format after 7 bytes of its own."""
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
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def history_of(file: Path) -> tuple[list[dict], list]:
    """The rows that were logged, and all records, as wandb's own classes understand them."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    def whole() -> list[Record]:
        with suppress(struct.error, DecodeError):
            found = [Record.FromString(record) for record in records_of(file)]
            return found if any(record.WhichOneof("record_type") == "exit" for record in found) else []
        return []

    records = wait_until(whole, 30, "the end of the file, which a process of wandb's writes after finish() returned")
    rows = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return rows, records


def test_wandb(tmp_path, start, monkeypatch):
    pytest.importorskip("wandb")
    lines = two_halves(start, "wandb")
    folder = tmp_path / "runs" / "small"
    run_id = json.loads((folder / "trackers.json").read_text())["id"]
    (offline,) = (folder / "wandb").glob("offline-run-*")  # of both starts: one, whole
    assert offline.name.endswith(run_id)
    rows, records = history_of(offline / f"run-{run_id}.wandb")
    for name in ("train/loss", "train/wall_s", "eval/top1"):
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
    (artifact,) = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    staged = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert len(staged) == 4  # the table, with its images
    assert all(path.is_relative_to(folder / "wandb") for path in staged.values())  # not in somebody's home
    whole = json.loads(staged["predictions.table.json"].read_text())
    assert staged[whole["data"][1][1]["path"]].read_bytes().startswith(b"\x89PNG")
    said = subprocess.run(
        [BIN / "wandb", "sync", "--dry-run", offline], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert said.returncode == 0, said.stderr
    assert run_id in said.stdout + said.stderr


def test_wandb_does_as_its_environment_says(start, monkeypatch, caplog):
    pytest.importorskip("wandb")
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = start("wandb", 0)
    tracker.log("train", {"step": 1, "loss": 1.0})
    tracker.close(done=True)
    assert "WANDB_MODE=disabled" in caplog.text


def test_wandb_is_online_with_a_key_and_goes_on_there(start, monkeypatch, caplog):
    """With a key: the same run, and what the server has already is not told again. The server is played."""
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
    tracker = start("wandb", 0)
    tracker.log("eval", {"step": 10, "top1": 0.5})
    for step in (11, 12, 13):
        tracker.log("train", {"step": step, "loss": 0.5})
    tracker.close(done=True)
    assert (seen["mode"], seen["resume"]) == ("online", "allow")
    assert logged == [{"step": 13, "train/step": 13, "train/loss": 0.5}]
    assert "look at https://wandb.example/run" in caplog.text


@pytest.mark.slow
def test_mlflow(tmp_path, start, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    (tmp_path / "runs" / "small" / "predictions.csv").write_text("id\n1\n")
    lines = two_halves(start, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("apex-harness")
    (run,) = client.search_runs([experiment.experiment_id])  # of both starts: one
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    kept = json.loads((tmp_path / "runs" / "small" / "trackers.json").read_text())
    assert (run.data.tags["apex_harness.id"], run.info.start_time) == (kept["id"], int(kept["started"] * 1000))
    for name in ("train/loss", "eval/top1"):
        points = sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))
        assert points == expected(lines, name), name
    assert run.data.params["optimizer.name"] == "sgd"
    assert run.data.params["train.epochs"] == "10"  # a parameter cannot change; what is in force is in config.yaml
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "summary.json", "predictions.csv", "predictions", "model"}
    assert [file.path for file in client.list_artifacts(run.info.run_id, "model")] == ["model/weights.safetensors"]
    pictures = [file.path for file in client.list_artifacts(run.info.run_id, "predictions")]
    assert pictures[1] == "predictions/01 prediction cat_ label dog.png"
    config = Path(client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path)))
    assert "epochs: 20" in config.read_text()

    monkeypatch.chdir(tmp_path)  # where MLflow puts the artifacts of a store that is not ours
    other = tmp_path / "elsewhere.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    start("mlflow", (tmp_path / "runs" / "small" / "metrics.jsonl").stat().st_size).close()  # stopped before its end
    client = MlflowClient(f"sqlite:///{other}")
    (late,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert late.info.status == "KILLED"
    points = sorted((metric.step, metric.value) for metric in client.get_metric_history(late.info.run_id, "train/loss"))
    assert points == expected(lines, "train/loss")  # lines that it was never told: the process died before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["tensorboard", "--help"], ["--logdir"]),
        (["wandb", "sync", "--help"], ["PATHS"]),
        (["mlflow", "ui", "--help"], ["--backend-store-uri", "--port"]),
    ],
)
def test_the_commands_of_the_documentation_exist(command, words):
    """That docs/trackers.md says them, and that the tool takes them."""
    pytest.importorskip(command[0])
    text = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    said = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True, timeout=120)
    for word in [*command[:-1], *words]:
        if word.isupper():
            assert word in said.stdout
            continue
        assert word in text
        assert word in " ".join(command) or word in said.stdout
