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
from harness.data.batch import Batch
from harness.data.loader import BatchRequest, Loader, StoppedWaiting
from harness.data.table.table import TableRows
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import DataError, HarnessError, first_line, plural, readable, reason, users_line
from harness.runs.console import ProgressBar
from harness.runs.weights_file import load_weights
from harness.training.evaluation.objective import ROWS_OF_FILE, Objective
from harness.training.evaluation.prediction_files import RowFiles, folder_of
from harness.training.evaluation.prediction_table import FIRST_COLUMNS, Block, PredictionFile, Totals
from harness.training.evaluation.sums import Pairs, Sums
from harness.training.evaluation.task_checks import add_pairs, column, numbers
from harness.training.task import PredictingTask, SupportsErrors, prepare

log = logging.getLogger("harness")

_IN_TABLE = 20  # labels
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
    copied: Sequence[str] = ()
    """Other columns of the table that has the rows, which the table of predictions gets, too."""


class TableError(OSError):
    """The table of predictions, its ``filename``, cannot be written; an OSError of the model's or the task's code is
    another one."""


def block_rows(config: Config) -> int:
    """Return the number of rows per forward pass, the same at any world size."""
    batch = config.batch
    micro_batch = max(1, (batch.global_ or batch.per_rank or BLOCK_ROWS) // batch.accumulate)
    return batch.eval_per_rank or min(BLOCK_ROWS, micro_batch)


def write(predictor: Predictor, loader: Loader, stop: Stop, out: Path, progress: ProgressBar) -> Totals | None:
    """Predict every row of ``loader`` into ``out`` (.csv or .parquet), which appears complete or not at all.

    Returns None if the ranks agreed to stop. Collective; an error on any rank is raised on all.
    """
    runtime, size, num_rows = predictor.runtime, block_rows(predictor.config), len(loader.dataset)
    num_blocks, compiles = -(-num_rows // size), predictor.config.model.compile
    own_blocks = range(runtime.rank, num_blocks, runtime.world_size)
    rows_of_blocks = [np.arange(block * size, min((block + 1) * size, num_rows)) for block in own_blocks]
    batches = loader.fetch(BatchRequest(rows, None) for rows in rows_of_blocks)
    table, failures = PredictionFile(out) if runtime.rank == 0 else None, list[Exception]()
    turns = -(-num_blocks // runtime.world_size)

    @contextmanager
    def noting(reason: str) -> Iterator[None]:
        """Context in which an error is kept until all ranks have stopped because of ``reason``."""
        try:
            yield
        except StoppedWaiting:
            raise
        except Exception as error:
            failures.append(error)
            stop.request(reason)

    progress.open(out.name, "batch", 0, turns)
    try:
        for turn in range(turns):
            if stop.poll():
                break
            ready, new_block = None, None
            with runtime.announced("compiling the model") if compiles and turn == 0 else nullcontext():
                try:
                    with noting("a prediction failed"):
                        if not failures and turn < len(own_blocks):
                            ready = next(batches), _known(predictor.task, rows_of_blocks[turn])
                except StoppedWaiting:
                    continue
                idle = None
                if predictor.sharded:
                    ready, idle = _agreed(runtime, loader, ready, bool(failures))
                with noting("a prediction failed"):
                    if ready is not None:
                        new_block = _block(predictor, *ready, rows_of_blocks[turn], size, folder_of(out).name)
                    if idle is not None:
                        _forward(predictor, idle, size)
            blocks = runtime.gather_to_first(new_block)
            with noting("the table could not be written"), _table_errors(out):
                if table is not None and not failures:
                    for block in filter(None, blocks):
                        table.add(block)
            progress.step()
        with runtime.together("predicting"):
            if failures:
                raise failures[-1]
        if stop.verdict:
            return None

        def finish() -> Totals:
            with _table_errors(out):
                return table.finish() if table is not None else Totals()

        return runtime.patiently("writing the predictions", finish)
    finally:
        progress.stop()
        if table is not None:
            table.discard()


@contextmanager
def _table_errors(out: Path) -> Iterator[None]:
    """Context in which an error of the system becomes a TableError of ``out``."""
    try:
        yield
    except OSError as error:
        raise TableError(error.errno, reason(error), str(out)) from error


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
    columns = {name: column(task, "known", name, values, len(rows)) for name, values in task.known(rows).items()}
    return {"id": pa.array(rows), **columns}


def _block(
    predictor: Predictor, batch: Batch, columns: dict[str, pa.Array], rows: np.ndarray, size: int, folder: str
) -> Block:
    """Return the predictions of ``rows``, whose files are in ``folder``."""
    files: dict[str, bytes] = {}
    pairs: Pairs = {}
    why_not = ""
    if len(batch):
        outputs = _forward(predictor, batch, size)
        places = {row: position for position, row in enumerate(batch.rows.tolist())}
        read = pa.array(np.searchsorted(rows, batch.rows))
        known = {name: values.take(read) for name, values in columns.items()}
        if predictor.objective is not None:
            try:
                pairs = _pairs(predictor.objective, outputs, batch.targets, known)
            except Exception as error:  # of the user's own loss or metric: the predictions do not need it
                predictor.objective, why_not = None, first_line(readable(error))
        place_of = pa.array([places.get(row) for row in rows.tolist()])
        for name, values in predictor.task.predictions(outputs).items():
            if isinstance(values, RowFiles):
                encoded = values.encoded(name, batch.rows.tolist(), known)
                if twins := files.keys() & encoded.keys():
                    message = f"the task's predictions()[{name!r}] and another column both write {min(twins)}"
                    raise HarnessError(message, hint="rename one of them; in the name of a file, / becomes _")
                files |= encoded
                values = [f"{folder}/{file}" for file in encoded]
            columns[name] = column(predictor.task, "predictions", name, values, len(batch)).take(place_of)
        if isinstance(predictor.task, SupportsErrors):
            arrays = {name: values.to_numpy(zero_copy_only=False) for name, values in columns.items()}
            columns |= {name: pa.array(values) for name, values in predictor.task.errors(arrays).items()}
    names = [name for name in FIRST_COLUMNS if name in columns]
    names += [name for name in columns if name not in FIRST_COLUMNS]
    table = pa.table({name: columns[name] for name in names})
    return Block(table, list(batch.bad), files, pairs, why_not, _copied(predictor, rows))


def _copied(predictor: Predictor, rows: np.ndarray) -> pa.Table | None:
    """Return the other columns of the table for consecutive ``rows``; None if there are none."""
    dataset = predictor.task.eval
    if not (predictor.copied and isinstance(dataset, TableRows)):
        return None
    views = {name: dataset.table.slice(name, rows[0], rows[-1] + 1) for name in predictor.copied}
    return pa.table(views).take(pa.array(rows - rows[0]))  # of a view, pickle would send the whole file


def _pairs(
    objective: Objective | PredictingTask, outputs: Tensor, targets: Tensor, columns: dict[str, pa.Array]
) -> Pairs:
    """Return what the rows of ``outputs`` with labels add to the metrics, on the CPU. ``columns``: their columns."""
    if isinstance(objective, Objective):
        texts = [columns[name].to_pylist() for name in objective.labels.label_columns if name in columns]
        return objective.pairs_of_new(outputs, texts)
    labels = columns["label"].to_pylist() if "label" in columns else []
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


def shown_metrics(predictor: Predictor, totals: Totals) -> list[str]:
    """Return the lines about the rows of a new file that have labels: their number and the metrics; empty if none
    has."""
    objective, names = predictor.objective, predictor.config.task.metrics
    if isinstance(objective, Objective):
        return shown_report(objective, totals.sums, totals.rows)
    if objective is None or ROWS_OF_FILE not in totals.sums.pairs:
        return []
    evaluated = int(totals.sums.pairs.pop(ROWS_OF_FILE)[0])
    metrics = numbers(objective, totals.sums, names)
    lines = [f"rows evaluated: {evaluated:,} of {totals.rows:,}"]
    return lines + [f"{name}: {metrics[name]:.4f}" for name in names]


def shown_report(objective: Objective, sums: Sums, num_rows: int) -> list[str]:
    """Return the lines for a file of ``num_rows``: which rows are evaluated, the metrics, and precision, recall, F1 and
    rows of each label: of many labels, those with the lowest F1. Empty if the file has no labels."""
    if ROWS_OF_FILE not in sums.pairs:
        return []
    counts, total = sums.pairs[ROWS_OF_FILE]
    evaluated, blank, read = map(int, (*counts, total))
    left_out = {
        "without a label": blank,
        f"with a label {objective.labels.unusable}": read - evaluated - blank,
        "that could not be read": num_rows - read,
    }
    lines = [f"rows evaluated: {evaluated:,} of {num_rows:,}"]
    lines += [f"rows left out, {reason}: {count:,}" for reason, count in left_out.items() if count]
    if not evaluated:
        return lines
    metrics, title = objective.report(sums), objective.labels.title
    lines += [f"{name}: {metrics[name]:.4f}" for name in objective.section.metrics if name in metrics]
    scores = [each for each in objective.labels.per_label(sums) if each.f1 is not None]
    if len(scores) > _IN_TABLE:
        lines.append(f"the {_IN_TABLE} of {len(scores)} {title} with the lowest f1:")
        scores = sorted(scores, key=lambda each: each.f1 or 0.0)[:_IN_TABLE]
    width = max((len(str(each.label)) for each in scores), default=0)
    heading = [f"{title:>{width}}  precision  recall      f1    rows"] if scores else []
    table = (
        f"{each.label!s:>{width}}  {each.precision or 0:9.4f}  {each.recall or 0:6.4f}  {each.f1 or 0:6.4f}  "
        f"{each.true:6.0f}"
        for each in scores
    )
    return [*lines, *heading, *table]


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


def best_weights(runtime: Runtime, path: Path) -> dict[str, Tensor]:
    """Read the weights at ``path``, a safetensors file, on rank 0; return them on every rank. Collective."""
    first = runtime.rank == 0
    weights = runtime.patiently("reading the best weights", lambda: load_weights(path) if first else {})
    with runtime.announced("sending the best weights"):
        return runtime.from_first(weights)
