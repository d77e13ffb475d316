"""MLflow: an SQLite store in the output folder, shared by the runs there, or the server of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from harness.runs import layout
from harness.trackers.mirror import Clock, Facts, Line, Sample, scalars

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run calls nobody that the user did not name

from mlflow import MlflowClient  # noqa: E402 - it reads that at its import
from mlflow.entities import Metric, Param, RunTag  # noqa: E402

EXPERIMENT = "apex-harness"  # unless MLFLOW_EXPERIMENT_NAME says otherwise
TAG = "apex_harness.id"  # by which a resumed run is found again
KIND = {"mlflow.experimentKind": "custom_model_development"}  # or its page looks for traces of language models
MAX_PARAM = 6000  # characters that MLflow takes
MAX_PARAMS = 100  # at once


class Mirror:
    def start(self, facts: Facts, lines: Iterable[Line]) -> str:
        """The same MLflow run goes on. What it was told cannot be taken back, so steps that a resumed run repeats,
        with the same numbers, are not told again."""
        for talker in ("alembic", "mlflow.store.db.utils"):  # which tell of each table that they make
            logging.getLogger(talker).setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{facts.output.resolve() / 'mlflow.db'}"
        with _alone(facts.output, embedded="MLFLOW_TRACKING_URI" not in os.environ):
            self._client = MlflowClient(uri)
            self._run_id = self._find(facts)
        self._clock = Clock(facts.started)
        self._told = self._last_steps()
        for line in lines:
            self.log(line)
        flag = "" if uri.startswith("http") else f" --backend-store-uri {uri}"
        return f"look at {uri}" if not flag else f"look with: mlflow ui{flag}"

    def _find(self, facts: Facts) -> str:
        """The id of this run in MLflow, which is made where there is none yet, with its settings as parameters."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            own = None if "MLFLOW_TRACKING_URI" in os.environ else (facts.output.resolve() / "mlartifacts").as_uri()
            experiment_id = self._client.create_experiment(name, own, KIND)
        runs = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{facts.id}'")
        run = (
            runs[0]
            if runs
            else self._client.create_run(experiment_id, int(facts.started * 1000), {TAG: facts.id}, facts.name)
        )
        run_id: str = run.info.run_id
        self._client.update_run(run_id, status="RUNNING")
        params = [
            Param(key, str(value)[:MAX_PARAM]) for key, value in facts.settings.items() if key not in run.data.params
        ]
        for edge in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[edge : edge + MAX_PARAMS])
        # A parameter cannot change in MLflow, but train.epochs may between two starts: the file has what is in force.
        self._client.log_text(run_id, facts.text, layout.CONFIG)
        self._client.log_batch(run_id, tags=[RunTag("run_folder", str(facts.folder))])
        return run_id

    def _last_steps(self) -> dict[str, int]:
        """{split: the last step that MLflow has of it}."""
        names = [name for name in self._client.get_run(self._run_id).data.metrics if name.endswith("/epoch")]
        history = {name: self._client.get_metric_history(self._run_id, name) for name in names}
        return {name.partition("/")[0]: max(metric.step for metric in found) for name, found in history.items()}

    def log(self, line: Line) -> None:
        now, step = int(self._clock.time(line) * 1000), line["step"]
        if step <= self._told.get(line["split"], -1):
            return
        metrics = [Metric(name, float(value), now, step) for name, value in scalars(line).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def show(self, sample: Sample) -> None:
        for row, image in enumerate(sample.images if sample.images is not None else ()):
            pixels: Any = np.moveaxis(image, 0, -1)
            name = "".join(letter if letter.isalnum() or letter in " -_" else "_" for letter in sample.title(row))
            self._client.log_image(self._run_id, pixels, f"predictions/{row:02d} {name}.png")

    def finish(self, files: list[Path], done: bool) -> None:
        for path in files:
            self._client.log_artifact(self._run_id, str(path), "model" if path.suffix == ".safetensors" else None)
        self._client.set_terminated(self._run_id, "FINISHED" if done else "KILLED")


@contextlib.contextmanager
def _alone(output: Path, embedded: bool) -> Iterator[None]:
    """Two runs that start at once must not both make the tables."""
    with FileLock(output / "mlflow.db.lock") if embedded else contextlib.nullcontext():
        yield
