"""Predict every row of a dataset, once and in order, with the same bytes at any world size.

Kernels round differently in a batch of 31 than in one of 32. So rows are processed in blocks that depend on the row
number only: block k has rows k*size to (k+1)*size - 1, the last block is padded, and rank r of W takes blocks r, r+W,
... Every row then gets the same arithmetic at any world size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.batch import Batch, Dataset
from harness.data.loader import BatchRequest, Loader, StoppedWaiting
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import DataError, HarnessError, first_line, plural, readable, users_line
from harness.runs import layout
from harness.runs.console import ProgressBar
from harness.runs.weights_file import load_weights
from harness.trackers.base import LabelPairs, Sample
from harness.training.evaluation.evaluate import add_pairs, numbers, prepare
from harness.training.evaluation.objective import ROWS_OF_FILE, Objective
from harness.training.evaluation.prediction_files import RowFiles, folder_of
from harness.training.evaluation.prediction_table import FIRST_COLUMNS, ROW, PredictionFile, Written
from harness.training.evaluation.sums import Pairs, Sums
from harness.training.run import Run
from harness.training.strategies import sharding
from harness.training.task import PredictingTask, SupportsErrors, SupportsPredictions

log = logging.getLogger("harness")

MAX_CONFUSION = 64  # classes in the picture of a confusion matrix
BLOCK_ROWS = 64  # fewer if the configuration has smaller batches


@dataclass
class Predictor:
    """A model with its weights, on every rank. ``sharded``: its forward pass is collective."""

    config: Config
    runtime: Runtime
    task: PredictingTask
    model: nn.Module
    sharded: bool = False
    objective: Objective | PredictingTask | None = None
    """What evaluates the rows that have labels, which may be the task; None: nothing, or it has failed."""


class TableError(OSError):
    """The table of predictions cannot be written; an OSError of the model's or the task's code is another one."""


def block_rows(config: Config) -> int:
    """Return the number of rows per forward pass, the same at any world size."""
    batch = config.batch
    micro_batch = max(1, (batch.global_ or batch.per_rank or BLOCK_ROWS) // batch.accumulate)
    return batch.eval_per_rank or min(BLOCK_ROWS, micro_batch)


def write(predictor: Predictor, loader: Loader, stop: Stop, out: Path, progress: ProgressBar) -> Written | None:
    """Predict every row of ``loader`` into ``out`` (.csv or .parquet), which appears complete or not at all.

    Returns None if the ranks agreed to stop. Collective; an error on any rank is raised on all.
    """
    runtime, size, num_rows = predictor.runtime, block_rows(predictor.config), len(loader.dataset)
    num_blocks, compiles = -(-num_rows // size), predictor.config.model.compile
    mine = range(runtime.rank, num_blocks, runtime.world_size)
    asked = [np.arange(block * size, min((block + 1) * size, num_rows)) for block in mine]
    batches = loader.fetch(BatchRequest(rows, None) for rows in asked)
    table, failure = PredictionFile(out) if runtime.rank == 0 else None, None
    turns = -(-num_blocks // runtime.world_size)
    progress.open(out.name, "batch", 0, turns)
    try:
        for turn in range(turns):
            if stop.poll():
                break
            ready, found = None, None
            with runtime.announced("compiling the model") if compiles and turn == 0 else nullcontext():
                try:
                    if failure is None and turn < len(mine):
                        ready = next(batches), _known(predictor.task, asked[turn])
                except StoppedWaiting:
                    continue
                except Exception as error:
                    failure = error
                    stop.request("a prediction failed")
                idle = None
                if predictor.sharded:
                    ready, idle = _agreed(runtime, loader, ready, failure is not None)
                try:
                    if ready is not None:
                        found = _block(predictor, *ready, asked[turn], size, folder_of(out).name)
                    if idle is not None:
                        _forward(predictor, idle, size)
                except Exception as error:
                    failure = error
                    stop.request("a prediction failed")
            blocks = runtime.gather_to_first(found)
            try:
                if table is not None and failure is None:
                    with _table_errors():
                        for block in blocks:
                            if block is not None:
                                table.add(*block)
            except Exception as error:
                failure = error
                stop.request("the table could not be written")
            progress.step()
        with runtime.together("predicting"):
            if failure is not None:
                raise failure
        if stop.verdict:
            return None

        def finish() -> Written:
            with _table_errors():
                return table.finish() if table is not None else Written()

        return runtime.patiently("writing the predictions", finish)
    finally:
        progress.stop()
        if table is not None:
            table.discard()


@contextmanager
def _table_errors() -> Iterator[None]:
    """Context in which an error of the system becomes a TableError."""
    try:
        yield
    except OSError as error:
        raise TableError(*error.args) from error


Ready = tuple[Batch, dict[str, pa.Array]]  # a block's rows, and the columns that do not need the model


def _agreed(runtime: Runtime, loader: Loader, ready: Ready | None, failed: bool) -> tuple[Ready | None, Batch | None]:
    """Return (``ready``, a row of zeros if this rank must call a sharded model without a row of its own): all ranks
    call it equally often. If one has ``failed``, none goes on. Collective."""
    inputs = ready[0].inputs if ready is not None and len(ready[0]) else None
    ranks = runtime.gather((failed, None if inputs is None else (inputs.shape[1:], inputs.dtype)))
    if any(has_failed for has_failed, _ in ranks):
        return None, None
    kind = next((kind for _, kind in ranks if kind is not None), None)
    if inputs is not None or kind is None:
        return ready, None
    row = torch.zeros(1, *kind[0], dtype=kind[1], device=loader.device)
    return ready, Batch(row, torch.zeros(1, dtype=torch.int64), np.zeros(1, np.int64))


def _known(task: PredictingTask, rows: np.ndarray) -> dict[str, pa.Array]:
    """Return the columns of ``rows`` that do not need the model."""
    columns = {name: _array(values, len(rows), f"known()[{name!r}]") for name, values in task.known(rows).items()}
    return {"id": pa.array(rows), **columns}


def _block(
    predictor: Predictor, batch: Batch, columns: dict[str, pa.Array], rows: np.ndarray, size: int, folder: str
) -> tuple[pa.Table, list[int], dict[str, bytes], Pairs | str]:
    """Return (the table of ``rows``, the unreadable rows, which have no prediction, the files in ``folder`` that
    it names, what the rows with labels add to the metrics, or why that cannot be computed)."""
    files: dict[str, bytes] = {}
    pairs: Pairs | str = {}
    if len(batch):
        outputs = _forward(predictor, batch, size)
        places = {row: place for place, row in enumerate(batch.rows.tolist())}
        if predictor.objective is not None:
            try:
                read = pa.array(np.searchsorted(rows, batch.rows))
                pairs = _pairs(
                    predictor.objective, outputs, batch.targets, {k: v.take(read) for k, v in columns.items()}
                )
            except Exception as error:  # of the user's own loss or metric: the predictions do not need it
                predictor.objective, pairs = None, first_line(readable(error))
        place_of = pa.array([places.get(row) for row in rows.tolist()])
        for name, values in predictor.task.predictions(outputs).items():
            if isinstance(values, RowFiles):
                encoded = values.encoded(name, batch.rows.tolist())
                files |= encoded
                values = [f"{folder}/{file}" for file in encoded]
            columns[name] = _array(values, len(batch), f"predictions()[{name!r}]").take(place_of)
        if isinstance(predictor.task, SupportsErrors):
            known = {name: values.to_numpy(zero_copy_only=False) for name, values in columns.items()}
            columns |= {name: pa.array(values) for name, values in predictor.task.errors(known).items()}
    names = [name for name in FIRST_COLUMNS if name in columns]
    names += [name for name in columns if name not in FIRST_COLUMNS]
    return pa.table({name: columns[name] for name in names}), list(batch.bad), files, pairs


def _pairs(
    objective: Objective | PredictingTask, outputs: Tensor, targets: Tensor, known: dict[str, pa.Array]
) -> Pairs:
    """Return what the rows of ``outputs`` with labels add to the metrics, on the CPU. ``known``: their columns."""
    if isinstance(objective, Objective):
        texts = [known[name].to_pylist() for name in objective.label_columns if name in known]
        return objective.pairs_of_new(outputs, texts)
    labels = known["label"].to_pylist() if "label" in known else []
    rows = [row for row, label in enumerate(labels) if label not in (None, "") and label == label]
    if not rows:
        return {}
    sums = Sums()
    add_pairs(sums, objective, outputs[rows], targets[rows])
    sums = sums.on_cpu()
    return {
        ROWS_OF_FILE: (torch.tensor(len(rows)), 1),
        **sums.pairs,
        **{name: kept[0] for name, kept in sums.rows.items()},
    }


def shown_metrics(predictor: Predictor, written: Written) -> list[str]:
    """Return the lines about the rows of a new file that have labels: their number and the metrics; empty if none
    has."""
    objective, names = predictor.objective, predictor.config.task.metrics
    if isinstance(objective, Objective):
        return objective.shown_report(written.sums, written.rows)
    if objective is None or ROWS_OF_FILE not in written.sums.pairs:
        return []
    evaluated = int(written.sums.pairs.pop(ROWS_OF_FILE)[0])
    found = numbers(objective, written.sums, names)
    lines = [f"rows evaluated: {evaluated:,} of {written.rows:,}"]
    return lines + [f"{name}: {found[name]:.4f}" for name in names]


def _forward(predictor: Predictor, batch: Batch, size: int) -> Tensor:
    """Return the outputs for ``batch``, computed in a batch of exactly ``size`` rows."""
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
                where=users_line(error),
                hint="predict rows like those it was trained on (task.image_size scales images)",
            ) from None
    return outputs[: len(batch)]


def _array(values: Sequence[object] | np.ndarray | Tensor, num_rows: int, what: str) -> pa.Array:
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
    weights = runtime.patiently("reading the best weights", lambda: load_weights(path) if first else {})
    with runtime.announced("sending the best weights"):
        return runtime.from_first(weights)


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
    predictor = Predictor(run.config, run.runtime, run.task, run.parallel.eval_model, run.parallel.sharded)
    out = run.folder.path / layout.PREDICTIONS
    written = write(predictor, run.eval_data.loader, run.stop, out, run.progress)
    if written is None:
        return False
    if written.rows:
        for sample in _samples(run.task.eval, written):
            run.tracker.show(sample)
        log.info("predictions.csv: %s, with the weights of step %d", plural(written.rows, "row"), run.state.best_step)
        written.warn_of_one_class()
    return True


def _samples(dataset: Dataset, written: Written) -> Iterator[Sample]:
    """Yield the samples of a file of predictions that trackers show."""
    names = sorted({name for pair in written.pairs for name in pair}, key=lambda name: (len(name), name))
    matrix = None
    if 2 <= len(names) <= MAX_CONFUSION:
        place = {name: index for index, name in enumerate(names)}
        counts = np.zeros((len(names), len(names)), np.int64)
        for (label, prediction), count in written.pairs.items():
            counts[place[label], place[prediction]] = count
        matrix = LabelPairs(names, counts)
    if (some := written.some.table()) is not None:
        yield _sample(dataset, some, "predictions", matrix)
    if (wrong := written.wrong.table()) is not None:
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
