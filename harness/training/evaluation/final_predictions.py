"""The predictions at the end of training, of the evaluation rows with the best weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch

from harness.data.batch import Dataset
from harness.errors import plural
from harness.runs import layout
from harness.trackers.base import LabelPairs, Sample
from harness.training.evaluation.prediction_table import ROW, Totals
from harness.training.evaluation.predictions import Predictor, best_weights, write
from harness.training.run import Run
from harness.training.strategies import sharding
from harness.training.task import SupportsPredictions

log = logging.getLogger("harness")

MAX_CONFUSION = 64  # classes in the picture of a confusion matrix


def write_for_run(run: Run) -> bool:
    """At the end of training, predict the evaluation rows with the best weights into ``predictions.csv``.

    Trackers get some rows. Returns False if the ranks agreed to stop; the same command then resumes here. The
    model has the best weights afterwards. Collective.
    """
    was_done = run.this_start.done_at == run.state.step
    if not isinstance(run.task, SupportsPredictions) or run.state.best is None or was_done:
        return True
    weights = best_weights(run.runtime, run.folder.weights)
    run.module.load_state_dict(sharding.model_parts(run.module, weights))
    run.module.eval()
    predictor = Predictor(run.config, run.runtime, run.task, run.parallel.eval_model, run.parallel.holds_shard)
    out = run.folder.path / layout.PREDICTIONS
    totals = write(predictor, run.eval_data.loader, run.stop, out, run.progress)
    if totals is None:
        return False
    if totals.rows:
        for sample in samples(run.task.eval, totals):
            run.tracker.show(sample)
        log.info("predictions.csv: %s, with the weights of step %d", plural(totals.rows, "row"), run.state.best_step)
        totals.warn_of_one_class()
    return True


def samples(dataset: Dataset, totals: Totals) -> Iterator[Sample]:
    """Yield the samples of a file of predictions that trackers show."""
    names = sorted({name for pair in totals.pairs for name in pair}, key=lambda name: (len(name), name))
    matrix = None
    if 2 <= len(names) <= MAX_CONFUSION:
        position = {name: index for index, name in enumerate(names)}
        counts = np.zeros((len(names), len(names)), np.int64)
        for (label, prediction), count in totals.pairs.items():
            counts[position[label], position[prediction]] = count
        matrix = LabelPairs(names, counts)
    if (some := totals.some.table()) is not None:
        yield _sample(dataset, some, "predictions", matrix)
    if (wrong := totals.wrong.table()) is not None:
        yield _sample(dataset, wrong, "wrong")


def _sample(dataset: Dataset, some: pa.Table, name: str, matrix: LabelPairs | None = None) -> Sample:
    """Return the rows of ``dataset`` whose numbers and predictions are in ``some``, and their images if the inputs are
    images."""
    rows, table = some[ROW].to_numpy().copy(), some.drop_columns([ROW])
    batch = dataset.batch(rows, None)
    readable = np.flatnonzero(np.isin(rows, batch.rows))
    inputs = batch.inputs
    images = inputs.dtype == torch.uint8 and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
    values = [list(row.values()) for row in table.take(readable).to_pylist()]
    return Sample(table.column_names, values, inputs.numpy() if images else None, name, matrix)
