"""Predict every row of a dataset, once and in order, with the same bytes at any world size.

Kernels round differently in a batch of 31 than in one of 32. So rows are processed in blocks that depend on the row
number only: block k has rows k*size to (k+1)*size - 1, the last block is padded, and rank r of W takes blocks r, r+W,
... Every row then gets the same arithmetic at any world size.
"""

from __future__ import annotations

import csv
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.batch import Batch, Dataset
from harness.data.loader import BatchRequest, Loader, StoppedWaiting
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import DataError, HarnessError, first_line, listed, plural, readable, users_line
from harness.runs import layout
from harness.runs.console import ProgressBar
from harness.runs.files import commit, temporary_for
from harness.runs.locks import Lock
from harness.runs.weights_file import load_weights
from harness.trackers.base import LabelPairs, Sample
from harness.training.evaluation.evaluate import prepare
from harness.training.evaluation.metrics import Pairs, Sums
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.prediction_files import FilesFolder, RowFiles, folder_of
from harness.training.run import Run
from harness.training.strategies import sharding
from harness.training.task import PredictingTask, SupportsErrors, SupportsPredictions

log = logging.getLogger("harness")

MAX_CONFUSION = 64  # classes in the picture of a confusion matrix
BLOCK_ROWS = 64  # fewer if the configuration has smaller batches
GROUP_ROWS = 1 << 15  # written at once; one row group of Parquet
SAMPLE_ROWS = 32
_FEW_ROWS = 20  # of which one class does not say that nothing was learned
ROW = "row of the dataset"
FIRST_COLUMNS = ("id", "prediction", "label")  # if present; the task's other columns follow in its order


@dataclass
class Predictor:
    """A model with its weights, on every rank. ``sharded``: its forward pass is collective."""

    config: Config
    runtime: Runtime
    task: PredictingTask
    model: nn.Module
    sharded: bool = False
    objective: Objective | None = None
    """What evaluates the rows that have labels; None: nothing, or it has failed."""


class TableError(OSError):
    """The table of predictions cannot be written; an OSError of the model's or the task's code is another one."""


def block_rows(config: Config) -> int:
    """Number of rows per forward pass: the same at any world size."""
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
) -> tuple[pa.Table, int, dict[str, bytes], Pairs | str]:
    """Return (the table of ``rows``, number of unreadable rows, which have no prediction, the files in ``folder`` that
    it names, what the rows with labels add to the metrics, or why that cannot be computed)."""
    files: dict[str, bytes] = {}
    pairs: Pairs | str = {}
    if len(batch):
        outputs = _forward(predictor, batch, size)
        places = {row: place for place, row in enumerate(batch.rows.tolist())}
        if (objective := predictor.objective) is not None:
            try:
                read = pa.array(np.searchsorted(rows, batch.rows))
                texts = [columns[name].take(read).to_pylist() for name in objective.label_columns if name in columns]
                pairs = objective.pairs_of_new(outputs, texts)
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
    return pa.table({name: columns[name] for name in names}), len(batch.bad), files, pairs


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


@dataclass
class Written:
    """The totals of the written file on rank 0; other ranks have the defaults."""

    rows: int = 0
    bad: int = 0
    """Rows without a prediction, because they could not be read."""
    some: SomeRows = field(default_factory=lambda: SomeRows())
    wrong: SomeRows = field(default_factory=lambda: SomeRows())
    """Rows whose prediction is not the label."""
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """{(label, prediction): number of rows}."""
    squares: dict[str, tuple[float, int]] = field(default_factory=dict)
    """{column: (squared errors, rows)}."""
    sums: Sums = field(default_factory=Sums)
    """Of the rows with labels, if the predictor has an objective."""
    not_evaluated: str = ""
    """Why these sums are not those of all rows with labels."""

    @property
    def fit(self) -> str:
        """How well the predictions fit the labels of the rows, in words; empty without labels."""
        labelled = {pair: count for pair, count in self.pairs.items() if pair[0].strip()}
        if total := sum(labelled.values()):
            right = sum(count for (label, prediction), count in labelled.items() if label == prediction)
            return f"{right:,} of {total:,} predictions are correct ({right / total:.4f})"
        found = [f"{name} {math.sqrt(total / rows):.5g}" for name, (total, rows) in self.squares.items() if rows]
        return f"root mean square error of {', '.join(found)}" if found else ""

    def warn_of_unknown_labels(self, classes: Sequence[str | int]) -> None:
        """Warn of labels that are not among ``classes``, the only ones that the model predicts."""
        known, unknown = set(map(str, classes)), Counter[str]()
        for (label, _), count in self.pairs.items():
            if label.strip() and label not in known:
                unknown[label] += count
        if unknown:
            log.warning(
                "%s with labels that the model was not trained on, and never predicts: %s; it predicts %s",
                plural(unknown.total(), "row"), listed(sorted(unknown), 5), listed(list(map(str, classes)), 5),
            )  # fmt: skip

    def warn_of_one_class(self) -> None:
        """Warn if all rows are predicted alike, though they have several labels: the weights have learned nothing."""
        labelled = {pair: count for pair, count in self.pairs.items() if pair[0].strip()}
        labels, predicted = ({pair[place] for pair in labelled} for place in (0, 1))
        if len(predicted) == 1 < len(labels) and sum(labelled.values()) >= _FEW_ROWS:
            log.warning(
                "the model predicts %r for every row, but there are %d labels: it has learned nothing that tells them "
                "apart; look at the training loss, and try another optimizer.lr, or more epochs",
                *predicted, len(labels),
            )  # fmt: skip


class SomeRows:
    """Up to SAMPLE_ROWS rows of a table that comes in parts: the first ones of each class, of all classes equally
    many. Of more classes than that, they are spread over them in the order of the table."""

    def __init__(self) -> None:
        self._seen: Counter[str | None] = Counter()
        self._kept: list[pa.Table] = []
        self._places: list[int] = []  # of each row that is kept, among those of its class

    def add(self, rows: pa.Table, classes: Sequence[str | None]) -> None:
        """Add the next ``rows``, with the class of each."""
        kept = []
        for row, name in enumerate(classes):
            place = self._seen[name]
            self._seen[name] += 1
            if place < -(-SAMPLE_ROWS // len(self._seen)):
                kept.append(row)
                self._places.append(place)
        if kept:
            self._kept.append(rows.take(kept))

    def table(self) -> pa.Table | None:
        """Return them in the order of the table; None if there are none."""
        if not self._kept:
            return None
        order = sorted(range(len(self._places)), key=lambda row: (self._places[row], row))
        if len(self._seen) > SAMPLE_ROWS:  # the first row of each comes first
            order = [order[at] for at in np.linspace(0, len(self._seen) - 1, SAMPLE_ROWS).round().astype(int)]
        return pa.concat_tables(self._kept).take(sorted(order[:SAMPLE_ROWS]))


class PredictionFile:
    """The CSV or Parquet file at ``path``, written block by block under a temporary name until ``finish``."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, temporary_for(path)
        self._lock = Lock(self._temporary)
        self._waiting: list[pa.Table] = []
        self._schema: pa.Schema | None = None
        self._file: Any = None
        self._parquet: Any = None
        self._written = Written()
        self._files = FilesFolder(path)

    def add(self, block: pa.Table, bad: int, files: Mapping[str, bytes], pairs: Pairs | str = "") -> None:
        """Append rows, of which ``bad`` could not be read, the ``files`` that they name, and their ``pairs``."""
        try:
            self._written.sums.add({} if isinstance(pairs, str) else pairs)
        except Exception as error:  # of an own metric whose states have another shape than before
            pairs = first_line(error)
        if isinstance(pairs, str):
            self._written.not_evaluated = self._written.not_evaluated or pairs
        if files and self._file is None:
            self._claim()
        self._files.add(files)
        self._waiting.append(block)
        self._written.rows += len(block)
        self._written.bad += bad
        if sum(map(len, self._waiting)) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        names = max((block.column_names for block in self._waiting), key=len)  # a block of unreadable rows has few
        table = pa.concat_tables(self._waiting, promote_options="permissive")
        if self._schema is None:
            if "prediction" not in names and not set(names) - set(FIRST_COLUMNS):
                raise DataError(
                    f"none of the rows could be read (tried: {len(table)})",
                    hint="paths in the CSV are relative to the task.root of the run: set task.root=FOLDER",
                )
            self._open(table.select(names))
        assert self._schema is not None
        for name in self._schema.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        table = table.select(self._schema.names).cast(self._schema)
        self._sample(table, self._written.rows - sum(map(len, self._waiting)))
        self._waiting = []
        if self._parquet is not None:
            self._parquet.write_table(table.combine_chunks(), row_group_size=len(table))
        else:
            self._file.write(_csv(table, header=False))

    def _sample(self, table: pa.Table, first: int) -> None:
        """Count the pairs of label and prediction, and keep some rows, of them some in which they differ; ``table``
        begins at row ``first``. Of a regression, whose numbers nearly always differ, only the first rows."""
        numbered = table.append_column(ROW, pa.array(np.arange(first, first + len(table))))
        names = [name for name in ("label", "prediction") if name in table.column_names]
        self._add_squares(table)
        if any(pa.types.is_floating(table[name].type) for name in names) or "prediction" not in names:
            self._written.some.add(numbered, [None] * len(table))
            return
        classes, predicted = (table[name].cast(pa.string()).to_pylist() for name in (names[0], "prediction"))
        read = [row for row, name in enumerate(predicted) if name is not None]
        self._written.some.add(numbered.take(pa.array(read, pa.int64())), [classes[row] for row in read])
        if "label" in names:
            labelled = [row for row in read if classes[row] is not None]
            self._written.pairs.update((classes[row], predicted[row]) for row in labelled)
            wrong = [row for row in labelled if classes[row] != predicted[row]]
            self._written.wrong.add(numbered.take(pa.array(wrong, pa.int64())), [classes[row] for row in wrong])

    def _add_squares(self, table: pa.Table) -> None:
        """Add the squared errors of a regression, whose labels may be text."""
        for name in table.column_names:
            label = name.replace("prediction", "label", 1)
            if name.startswith("prediction") and pa.types.is_floating(table[name].type) and label in table.column_names:
                errors = table[name].to_pandas() - pd.to_numeric(table[label].to_pandas(), errors="coerce")
                total, rows = self._written.squares.get(name, (0.0, 0))
                self._written.squares[name] = total + float((errors**2).sum()), rows + int(errors.count())

    def _open(self, first: pa.Table) -> None:
        """Write the header, by the columns of ``first``."""
        self._claim()
        self._schema = first.schema
        if self._path.suffix == ".parquet":
            import pyarrow.parquet as pq

            self._parquet = pq.ParquetWriter(self._file, self._schema)
        else:
            self._file.write(_csv(first.slice(0, 0), header=True))

    def _claim(self) -> None:
        """Create the temporary file, or empty one that a killed process left. Raises HarnessError if another process
        is writing it."""
        if self._file is not None:
            return
        if self._temporary.is_symlink():  # in the folder of someone else, to a file of this user
            self._temporary.unlink()
        if not self._lock.try_acquire():
            owner = f" ({self._lock.owner})" if self._lock.owner else ""
            raise HarnessError(
                f"cannot write the output: another process is writing it{owner}",
                where=str(self._path),
                hint="wait for it, or choose another file with --out FILE",
            )
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish or discard

    def finish(self) -> Written:
        """Write the remaining rows and give the file its name."""
        self._flush()
        if self._parquet is not None:
            self._parquet.close()
        if self._file is not None:
            self._file.close()
            self._files.finish()  # first, so that the table names files that are there
            commit(self._temporary, self._path)
            self._file = None
            self._lock.release()
        return self._written

    def discard(self) -> None:
        """Delete the unfinished file; does nothing after ``finish``."""
        if self._file is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._files.discard()
        self._lock.release()


def _csv(table: pa.Table, header: bool) -> bytes:
    """CSV with the shortest numbers that round-trip exactly, and empty fields for missing values."""
    frame = table.to_pandas(integer_object_nulls=True)
    text: str = frame.to_csv(index=False, header=header, lineterminator="\n")
    if "\r" in text:  # which readers take for the end of a row, but pandas does not quote
        text = frame.to_csv(index=False, header=header, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    return text.encode()


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
    if not isinstance(run.task, SupportsPredictions) or run.state.best is None or run.done_at == run.state.step:
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
    rows, table = some[ROW].to_numpy(), some.drop_columns([ROW])
    batch = dataset.batch(rows, None)
    readable = np.flatnonzero(np.isin(rows, batch.rows))
    inputs = batch.inputs
    images = inputs.dtype == torch.uint8 and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
    values = [list(row.values()) for row in table.take(readable).to_pylist()]
    return Sample(table.column_names, values, inputs.numpy() if images else None, name, matrix)
