"""Predict every row of a dataset, once and in order, with the same bytes at any world size.

Kernels round differently in a batch of 31 than in one of 32. So rows are processed in blocks that depend on the row
number only: block k has rows k*size to (k+1)*size - 1, the last block is padded, and rank r of W takes blocks r, r+W,
... Every row then gets the same arithmetic at any world size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.batch import Batch, Dataset
from harness.data.loader import BatchRequest, Loader, StoppedWaiting
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop, StoppedAlone
from harness.errors import DataError, HarnessError, first_line, plural
from harness.runs import checkpoint, layout
from harness.trackers.base import LabelPairs, Sample
from harness.training import fsdp
from harness.training.evaluate import prepare
from harness.training.prediction_file import FIRST_COLUMNS, ROW, PredictionFile, Written
from harness.training.run import Run
from harness.training.task import PredictingTask, SupportsErrors, SupportsPredictions

log = logging.getLogger("harness")

MAX_CONFUSION = 64  # classes in the picture of a confusion matrix
BLOCK_ROWS = 64  # fewer if the configuration has smaller batches


@dataclass(frozen=True)
class Predictor:
    """A model with its weights, on every rank. ``sharded``: its forward pass is collective."""

    config: Config
    runtime: Runtime
    task: PredictingTask
    model: nn.Module
    sharded: bool = False


def block_rows(config: Config) -> int:
    """Number of rows per forward pass: the same at any world size."""
    batch = config.batch
    micro_batch = max(1, (batch.global_ or batch.per_rank or BLOCK_ROWS) // batch.accumulate)
    return batch.eval_per_rank or min(BLOCK_ROWS, micro_batch)


def write(predictor: Predictor, loader: Loader, stop: Stop, out: Path) -> Written | None:
    """Predict every row of ``loader`` into ``out`` (.csv or .parquet), which appears complete or not at all.

    Returns None if the ranks agreed to stop. Collective; an error on any rank is raised on all.
    """
    runtime, size, num_rows = predictor.runtime, block_rows(predictor.config), len(loader.dataset)
    num_blocks, compiles = -(-num_rows // size), predictor.config.model.compile
    mine = range(runtime.rank, num_blocks, runtime.world_size)
    asked = [np.arange(block * size, min((block + 1) * size, num_rows)) for block in mine]
    batches = loader.fetch(BatchRequest(rows, None) for rows in asked)
    table, failure = PredictionFile(out) if runtime.rank == 0 else None, None
    try:
        for turn in range(-(-num_blocks // runtime.world_size)):
            if stop.agreed():
                break
            found = None
            with runtime.announced("compiling the model") if compiles and turn == 0 else nullcontext():
                try:
                    if failure is None:
                        found = _block(predictor, next(batches), asked[turn], size) if turn < len(mine) else None
                    if found is None and predictor.sharded:
                        _forward(predictor, loader.dataset.batch(np.zeros(1, np.int64), None).to(loader.device), size)
                except StoppedWaiting:
                    continue
                except StoppedAlone:
                    raise
                except Exception as error:
                    failure = error
                    stop.request("a prediction failed")
            blocks = runtime.gather_to_first(found)
            try:
                if table is not None and failure is None:
                    table.add([block for block in blocks if block is not None])
            except Exception as error:
                failure = error
                stop.request("the table could not be written")
        with runtime.together("predicting"):
            if failure is not None:
                raise failure
        if stop.verdict:
            return None
        return runtime.patiently("writing the predictions", lambda: table.finish() if table is not None else Written())
    finally:
        if table is not None:
            table.discard()


def _block(predictor: Predictor, batch: Batch, rows: np.ndarray, size: int) -> tuple[pa.Table, int]:
    """(the table of ``rows``, number of unreadable rows, which have no prediction)."""
    columns = {
        name: _array(values, len(rows), f"known()[{name!r}]") for name, values in predictor.task.known(rows).items()
    }
    columns = {"id": pa.array(rows), **columns}
    if len(batch):
        outputs = _forward(predictor, batch, size)
        places = {row: place for place, row in enumerate(batch.rows.tolist())}
        place_of = pa.array([places.get(row) for row in rows.tolist()])
        for name, values in predictor.task.predictions(outputs).items():
            columns[name] = _array(values, len(batch), f"predictions()[{name!r}]").take(place_of)
        if isinstance(predictor.task, SupportsErrors):
            known = {name: values.to_numpy(zero_copy_only=False) for name, values in columns.items()}
            columns |= {name: pa.array(values) for name, values in predictor.task.errors(known).items()}
    names = [name for name in FIRST_COLUMNS if name in columns]
    names += [name for name in columns if name not in FIRST_COLUMNS]
    return pa.table({name: columns[name] for name in names}), len(batch.bad)


def _forward(predictor: Predictor, batch: Batch, size: int) -> Tensor:
    """The outputs for ``batch``, computed in a batch of exactly ``size`` rows."""
    filled = batch.inputs
    if len(filled) < size:
        filled = torch.cat([filled, filled[-1:].expand(size - len(filled), *filled.shape[1:])])
    with torch.no_grad():
        inputs = prepare(predictor, filled)
        try:
            outputs: Tensor = predictor.model(inputs)
        except torch.OutOfMemoryError:
            raise HarnessError(
                f"not enough device memory for {plural(size, 'row')} at once",
                hint=f"set batch.eval_per_rank={max(1, size // 4)}",
            ) from None
        except RuntimeError as error:
            raise DataError(
                f"the model cannot process inputs of shape {tuple(inputs.shape[1:])}: {first_line(error)}",
                hint="predict rows like those it was trained on (task.image_size scales images)",
            ) from None
    return outputs[: len(batch)]


def _array(values: Any, num_rows: int, what: str) -> pa.Array:
    array = pa.array(values.cpu().numpy() if isinstance(values, Tensor) else values)
    if len(array) != num_rows:
        raise HarnessError(
            f"the task's {what} has {plural(len(array), 'value')} for {plural(num_rows, 'row')}",
            hint="return one per row",
        )
    return array


def best_weights(runtime: Runtime, path: Path) -> dict[str, Tensor]:
    """Read the weights at ``path``, a safetensors file, on rank 0; return them on every rank. Collective."""
    first = runtime.rank == 0
    weights = runtime.patiently("reading the best weights", lambda: checkpoint.load_weights(path) if first else {})
    with runtime.announced("sending the best weights"):
        return runtime.from_first(weights)


def write_for_run(run: Run) -> bool:
    """At the end of training, predict the evaluation rows with the best weights into ``predictions.csv``.

    Trackers get the first rows. Returns False if the ranks agreed to stop; the same command then resumes here. The
    model has the best weights afterwards. Collective.
    """
    if not isinstance(run.task, SupportsPredictions) or run.state.best is None:
        return True
    weights = best_weights(run.runtime, run.folder.weights)
    run.module.load_state_dict(fsdp.model_parts(run.module, weights))
    run.module.eval()
    predictor = Predictor(run.config, run.runtime, run.task, run.parallel.evaluated, run.parallel.sharded)
    written = write(predictor, run.eval_data.loader, run.stop, run.folder.path / layout.PREDICTIONS)
    if written is None:
        return False
    if written.head is not None:
        for sample in _samples(run.task.eval, written):
            run.tracker.show(sample)
        log.info("predictions.csv: %s, with the weights of step %d", plural(written.rows, "row"), run.state.best_step)
    return True


def _samples(dataset: Dataset, written: Written) -> Iterator[Sample]:
    """The samples of a file of predictions that trackers show."""
    assert written.head is not None  # otherwise the file has no rows
    names = sorted({name for pair in written.pairs for name in pair}, key=lambda name: (len(name), name))
    matrix = None
    if 2 <= len(names) <= MAX_CONFUSION:
        place = {name: index for index, name in enumerate(names)}
        counts = np.zeros((len(names), len(names)), np.int64)
        for (label, prediction), count in written.pairs.items():
            counts[place[label], place[prediction]] = count
        matrix = LabelPairs(names, counts)
    yield _sample(dataset, np.arange(len(written.head)), written.head, "predictions", matrix)
    if written.wrong is not None:
        rows = written.wrong[ROW].to_numpy()
        yield _sample(dataset, rows, written.wrong.drop_columns([ROW]), "wrong")


def _sample(dataset: Dataset, rows: np.ndarray, table: pa.Table, name: str, matrix: LabelPairs | None = None) -> Sample:
    """``rows`` of ``dataset``, with their predictions in ``table``, and their images if the inputs are images."""
    batch = dataset.batch(rows, None)
    readable = np.flatnonzero(np.isin(rows, batch.rows))
    inputs = batch.inputs
    images = inputs.dtype == torch.uint8 and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
    values = [list(row.values()) for row in table.take(readable).to_pylist()]
    return Sample(table.column_names, values, inputs.numpy() if images else None, name, matrix)
