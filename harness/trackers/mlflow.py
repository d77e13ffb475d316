"""MLflow: an SQLite store in the output folder, shared by all runs there, or the server at MLFLOW_TRACKING_URI."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harness.runs import layout
from harness.runs.locks import locked
from harness.trackers import pictures
from harness.trackers.base import Entry, EntryTimes, RunInfo, Sample, scalars

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run contacts only hosts that the user named

from mlflow import MlflowClient  # noqa: E402 - mlflow reads the variable when it is imported
from mlflow.entities import Metric, Param, RunTag  # noqa: E402

EXPERIMENT = "apex-harness"  # unless MLFLOW_EXPERIMENT_NAME names another
TAG = "apex_harness.id"  # by which a resumed run finds its MLflow run
KIND = {"mlflow.experimentKind": "custom_model_development"}  # otherwise its page shows traces of language models
_LOCK_S = 600.0  # for another run that creates the tables
MAX_PARAM = 6000  # characters, MLflow's limit
MAX_PARAMS = 100  # per request, MLflow's limit


class Tracker:
    """A run of MLflow, found by its tag. Settings are its parameters, and files its artifacts."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """Resume the same MLflow run. MLflow cannot delete values, so steps that a resumed run repeats, with the same
        numbers, are not sent again."""
        for name in ("alembic", "mlflow.store.db.utils"):  # they log every table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        folder, server = info.output.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{folder / 'mlflow.db'}"
        # Two runs that start at once must not both create the tables.
        with contextlib.nullcontext() if server else locked(folder / "mlflow.db.lock", _LOCK_S):
            self._client = MlflowClient(uri)
            self._run_id = self._find(info, None if server else (folder / "mlartifacts").as_uri())
        self._times = EntryTimes(info.started)
        self._sent = self._last_steps()
        for entry in entries:
            self.log(entry)
        flag = "" if uri.startswith("http") else f" --backend-store-uri {uri}"
        return f"view with: mlflow ui{flag}" if flag else f"view at {uri}"

    def _find(self, info: RunInfo, artifacts: str | None) -> str:
        """Return the id of this run in MLflow. A new run is created with the settings as parameters, and a new
        experiment with the folder ``artifacts``; None: where the server keeps them."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(name, artifacts, KIND)
        runs = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{info.id}'")
        run = (
            runs[0]
            if runs
            else self._client.create_run(experiment_id, int(info.started * 1000), {TAG: info.id}, info.name)
        )
        run_id: str = run.info.run_id
        self._client.update_run(run_id, status="RUNNING")
        params = [
            Param(key, str(value)[:MAX_PARAM]) for key, value in info.settings.items() if key not in run.data.params
        ]
        for edge in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[edge : edge + MAX_PARAMS])
        # MLflow parameters cannot change, but train.epochs may between two starts: the file holds the current settings.
        self._client.log_text(run_id, info.config_yaml, layout.CONFIG)
        self._client.log_batch(run_id, tags=[RunTag("run_folder", str(info.folder))])
        return run_id

    def _last_steps(self) -> dict[str, int]:
        """Return {split: the last step that MLflow has}."""
        names = [name for name in self._client.get_run(self._run_id).data.metrics if name.endswith("/epoch")]
        history = {name: self._client.get_metric_history(self._run_id, name) for name in names}
        return {name.partition("/")[0]: max(metric.step for metric in samples) for name, samples in history.items()}

    def log(self, entry: Entry) -> None:
        now, step = int(self._times.time(entry) * 1000), entry["step"]
        if step <= self._sent.get(entry["split"], -1):
            return
        values = {f"{entry['split']}/epoch": entry.get("epoch", 0), **scalars(entry)}  # epoch: for ``_last_steps``
        metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def show(self, sample: Sample) -> None:
        for row, image in enumerate(sample.images if sample.images is not None else ()):
            name = "".join(letter if letter.isalnum() or letter in " -_" else "_" for letter in sample.title(row))
            self._client.log_image(self._run_id, np.moveaxis(image, 0, -1), f"{sample.name}/{row:02d} {name}.png")
        if sample.confusion is not None:
            matrix = np.moveaxis(pictures.confusion(sample.confusion), 0, -1)
            self._client.log_image(self._run_id, matrix, "confusion.png")

    def finish(self, files: list[Path], done: bool) -> None:
        for path in files:
            self._client.log_artifact(self._run_id, str(path), "model" if path.suffix == ".safetensors" else None)
        self._client.set_terminated(self._run_id, "FINISHED" if done else "KILLED")
