"""A trained model as a torch module, for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.config.targets import TableTask
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError, DataError, listed
from harness.inference import predict
from harness.inference.rows import as_file, may_be_table
from harness.runs import trained_run
from harness.training import build
from harness.training.evaluation.labels import TO_UNITS
from harness.training.reproducibility import rng
from harness.training.rows import opening
from harness.training.task import OpenedTask, SupportsLearned, SupportsNewData, SupportsSignature

if TYPE_CHECKING:
    from harness.inference.rows import Rows


class TrainedModel(nn.Module):
    """The model of a run with its best weights, in float32 and eval mode, on the CPU.

    Call it with what ``preprocess`` returns, or with inputs as ``description["preprocessing"]`` explains. It is as any
    module: ``.to("cuda")``, ``.train()`` and ``torch.compile`` work. Numbers of a regression on a table are in the unit
    of their column. ``module`` is the bare model, whose numbers are standardized. The outputs of a task of your own are
    as its model returns them, unless its ``signature`` has the ``postprocessing`` of such a regression.
    """

    classes: Sequence[str | int]
    """The labels, in the order of the outputs; empty for a task without."""
    description: Mapping[str, Any]
    """Names and meaning of inputs and outputs, as ``harness export`` writes them: ``preprocessing``, ``classes`` and
    more, by task."""
    _mean: Tensor | None
    _std: Tensor | None

    def __init__(self, module: nn.Module, description: Mapping[str, Any], run: Path, config: Config) -> None:
        super().__init__()
        scale = scale_of(description)
        self.module, self.description = module, in_units(description) if scale else description
        for name, values in zip(("_mean", "_std"), scale or (None, None), strict=True):
            self.register_buffer(name, values, persistent=False)
        self.classes = tuple(description.get("classes", ()))
        self._run, self._config = run, config

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.module(inputs)
        return outputs if self._std is None else outputs * self._std + self._mean

    def preprocess(self, rows: Rows) -> Tensor:
        """Return the input of the model for ``rows``, in their order, on its device.

        ``rows``: a CSV or Parquet file, a table, or a list of dictionaries, as for ``harness.predict``, which suits
        large files: here all rows are in memory at once. A model with one input column also takes a list of its values,
        one of pairs a tuple or a list of them, one of texts a text with a space. One of images takes an image, or a
        list: paths from the working folder or below ``task.root``, images of PIL, or arrays, uint8 (height, width, 3).
        Raises HarnessError, also if a row cannot be read.
        """
        columns = tuple(getattr(self._config.task, "input_columns", ()))
        if self.description.get("input") == "tokens" and len(columns) == 1 and isinstance(rows, str) and " " in rows:
            rows = rows if may_be_table(rows) else list[Any]([rows])
        if isinstance(rows, tuple):
            rows = list[Any]([rows])
        stop = {"on_bad_row": "stop"} if hasattr(self._config.task, "on_bad_row") else {}  # which tells the reason
        config = self._config.model_copy(update={"task": self._config.task.model_copy(update=stop)})
        with as_file(rows, columns, self.description.get("input") == "images") as (file, cache):
            task = predict.open_task(config, self._run, file, cache)
            batch = task.eval.batch(np.arange(len(task.eval)), None)
            if batch.bad:
                raise DataError(f"rows that cannot be read: {listed(list(map(str, batch.bad)))}", hint="leave them out")
            device = next((tensor.device for tensor in self.module.state_dict().values()), torch.device("cpu"))
            return task.prepare(batch.to(device).inputs)


def scale_of(signature: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the mean and the standard deviation of each column if the model returns standardized numbers, as
    ``signature`` of the task tells; else None."""
    facts = signature.get("postprocessing")
    if not (isinstance(facts, Mapping) and facts.get("scale") == TO_UNITS):
        return None
    return torch.tensor(facts["mean"]), torch.tensor(facts["std"])


def in_units(signature: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``signature`` of a model whose numbers are in the unit of their column."""
    return {key: value for key, value in signature.items() if key != "postprocessing"}


def load(run: Path, overrides: Sequence[str] = (), trust: bool = False, written_at: str | None = None) -> TrainedModel:
    """Return the model of the run folder ``run``. Raises HarnessError. Arguments: see ``trained_run.configuration``."""
    config = trained_run.configuration(run, overrides, trust, written_at)
    trained_run.warn_if_unfinished(run, config)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    on = [torch.device("cuda", index) for index in devices]
    streams = rng.get_state(*on)  # which building a model seeds
    try:
        task = _without_data(run, config) or with_training_data(run, config)
        module = build.build_model(config, task)
    finally:
        rng.set_state(streams, *on)
    trained_run.load_into(module, trained_run.best_weights(run), run)
    described = dict(task.signature) if isinstance(task, SupportsSignature) else {}
    return TrainedModel(module.float(), described, run, config).eval()


def _without_data(run: Path, config: Config) -> OpenedTask | None:
    """Open the task with a made-up row, from which no model depends; None if its columns are not known."""
    if not (isinstance(config.task, SupportsNewData) and isinstance(config.task, TableTask)):
        return None
    row = pd.DataFrame({column: ["none"] for column in config.task.input_columns})
    with as_file(row) as (file, cache):
        return predict.open_task(config, run, file, cache)


def with_training_data(run: Path, config: Config) -> OpenedTask:
    """Open the task with the data of the training. Raises ConfigError if it has changed."""
    task = opening.open_task(config, Runtime())
    if isinstance(task, SupportsLearned) and task.learned != trained_run.task_facts(run):
        raise ConfigError(
            "the classes or the image size of the training data differ from the run's task.json",
            where=str(run),
            hint="restore the files that changed after the training",
        )
    return task
