"""The table of predictions: one row for each row of the data, in the rows' order, whatever the number of ranks.

Kernels give a row other last digits in a batch of 31 than in one of 32, so rows are taken in blocks that depend on
their number alone: block k holds rows k*size to (k+1)*size - 1, the last one is filled up, and rank r of W takes blocks
r, r+W, ... Each row then meets the same arithmetic at any world size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.batch import Batch, Dataset
from harness.data.loader import BatchRequest, Loader
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import CheckpointError, DataError, HarnessError, first_line
from harness.runs import layout
from harness.runs.files import commit, temporary_for
from harness.trackers.base import Sample
from harness.training import fsdp as sharded
from harness.training.evaluate import prepare
from harness.training.run import Run
from harness.training.task import PredictingTask, SupportsPredictions

log = logging.getLogger("harness")

BLOCK_ROWS = 64  # unless the configuration wants fewer at once
GROUP_ROWS = 1 << 15  # written at once; a row group of Parquet
SAMPLE_ROWS = 32  # shown by trackers
FIRST = ("id", "prediction", "label")  # columns, where there are such; the task's others follow in its order


@dataclass(frozen=True)
class Predictor:
    """A model with the weights to predict with, on every rank. ``sharded``: its forward pass is collective."""

    config: Config
    runtime: Runtime
    task: PredictingTask
    model: nn.Module
    sharded: bool = False


@dataclass(frozen=True)
class Written:
    """What rank 0 has written; on other ranks nothing."""

    rows: int = 0
    bad: int = 0
    head: pa.Table | None = None  # the first SAMPLE_ROWS rows


def block_rows(config: Config) -> int:
    """Rows that the model is given at once: the same at any world size."""
    batch = config.batch
    micro_batch = max(1, (batch.global_ or batch.per_rank or BLOCK_ROWS) // batch.accumulate)
    return batch.eval_per_rank or min(BLOCK_ROWS, micro_batch)


def write(predictor: Predictor, loader: Loader, stop: Stop, out: Path) -> Written | None:
    """Predict every row of ``loader`` into ``out`` (.csv or .parquet), which appears whole or not at all.

    None if a stop was agreed on the way. Collective; an error of any rank is raised by all.
    """
    runtime, size, num_rows = predictor.runtime, block_rows(predictor.config), len(loader.dataset)
    num_blocks = -(-num_rows // size)
    mine = range(runtime.rank, num_blocks, runtime.world_size)
    asked = [np.arange(block * size, min((block + 1) * size, num_rows)) for block in mine]
    batches = loader.fetch(BatchRequest(rows, None) for rows in asked)
    table, failure = _File(out) if runtime.rank == 0 else None, None
    try:
        for turn in range(-(-num_blocks // runtime.world_size)):
            if stop.agreed():
                break
            found = None
            try:
                if failure is None:
                    found = _block(predictor, next(batches), asked[turn], size) if turn < len(mine) else None
                if found is None and predictor.sharded:
                    _forward(predictor, loader.dataset.batch(np.zeros(1, np.int64), None).to(loader.device), size)
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
        with runtime.together("writing the predictions"):
            return table.finish() if table is not None else Written()
    finally:
        if table is not None:
            table.discard()


def _block(predictor: Predictor, batch: Batch, rows: np.ndarray, size: int) -> tuple[pa.Table, int]:
    """The part of the table for ``rows``, and how many of them could not be read: those have no prediction."""
    columns = {name: _array(values) for name, values in predictor.task.known(rows).items()}
    columns = {"id": pa.array(rows), **columns}
    if len(batch):
        outputs = _forward(predictor, batch, size)
        places = {row: place for place, row in enumerate(batch.rows.tolist())}
        place_of = pa.array([places.get(row) for row in rows.tolist()])
        for name, values in predictor.task.predictions(outputs).items():
            columns[name] = _array(values).take(place_of)
    names = [*(name for name in FIRST if name in columns), *(name for name in columns if name not in FIRST)]
    return pa.table({name: columns[name] for name in names}), len(batch.bad)


def _forward(predictor: Predictor, batch: Batch, size: int) -> Tensor:
    """Outputs for the rows of ``batch``, computed in a batch of exactly ``size``."""
    filled = batch.inputs
    if len(filled) < size:
        filled = torch.cat([filled, filled[-1:].expand(size - len(filled), *filled.shape[1:])])
    with torch.no_grad():
        inputs = prepare(predictor, filled)
        try:
            outputs: Tensor = predictor.model(inputs)
        except torch.OutOfMemoryError:
            raise HarnessError(
                f"the device has too little memory for {size} rows at once",
                hint=f"batch.eval_per_rank={max(1, size // 4)}",
            ) from None
        except RuntimeError as error:
            raise DataError(
                f"the model cannot take inputs of shape {tuple(inputs.shape[1:])}: {first_line(error)}",
                hint="give it rows like those it was trained on (task.image_size scales images)",
            ) from None
    return outputs[: len(batch)]


def _array(values: Any) -> pa.Array:
    return pa.array(values.cpu().numpy() if isinstance(values, Tensor) else values)


class _File:
    """A CSV or Parquet file that is written block by block under a temporary name. Only one rank has it."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, temporary_for(path)
        self._waiting: list[pa.Table] = []
        self._head: pa.Table | None = None
        self._schema: pa.Schema | None = None
        self._file: Any = None
        self._parquet: Any = None
        self._rows = self._bad = 0

    def add(self, blocks: Sequence[tuple[pa.Table, int]]) -> None:
        for block, bad in blocks:
            self._waiting.append(block)
            self._rows, self._bad = self._rows + len(block), self._bad + bad
            if sum(map(len, self._waiting)) >= GROUP_ROWS:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        names = max((block.column_names for block in self._waiting), key=len)  # a block of unreadable rows has few
        table = pa.concat_tables(self._waiting, promote_options="permissive")
        self._waiting = []
        if self._schema is None:
            if "prediction" not in names and not set(names) - set(FIRST):
                raise DataError(
                    f"none of the first {len(table)} rows could be read",
                    hint="check task.root: paths in the CSV are relative to it",
                )
            table = table.select(names)
            self._schema, self._head = table.schema, table.slice(0, SAMPLE_ROWS)
            self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish or discard
            if self._path.suffix == ".parquet":
                self._parquet = pq.ParquetWriter(self._file, self._schema)
            else:
                self._file.write(self._csv(table.slice(0, 0), header=True))
        for name in self._schema.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        table = table.select(self._schema.names).cast(self._schema)
        if self._parquet is not None:
            self._parquet.write_table(table.combine_chunks(), row_group_size=len(table))
        else:
            self._file.write(self._csv(table, header=False))

    @staticmethod
    def _csv(table: pa.Table, header: bool) -> bytes:
        """Numbers as short as they can be read back exactly; what is missing is empty."""
        frame = table.to_pandas(integer_object_nulls=True)
        text: str = frame.to_csv(index=False, header=header, lineterminator="\n")
        return text.encode()

    def finish(self) -> Written:
        """Put the file in its place."""
        self._flush()
        if self._parquet is not None:
            self._parquet.close()
        self._file.close()
        commit(self._temporary, self._path)
        return Written(self._rows, self._bad, self._head)

    def discard(self) -> None:
        """Leave nothing half written; after ``finish`` there is nothing to do."""
        if self._file is not None and not self._file.closed:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def best_weights(runtime: Runtime, path: Path) -> dict[str, Tensor]:
    """The weights at ``path`` (a ``weights.safetensors``), read by rank 0, on all ranks. Collective."""
    weights: dict[str, Tensor] | None = None
    with runtime.together("reading the best weights"):
        if runtime.rank == 0:
            try:
                weights = load_file(path)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"the best weights cannot be read: {error}",
                    where=str(path),
                    hint="each evaluation that is the best so far writes them: train for another epoch",
                ) from None
    weights = runtime.from_first(weights)
    assert weights is not None  # or ``together`` had raised
    return weights


def of_run(run: Run) -> bool:
    """At the end of training: ``predictions.csv`` of the evaluation rows, by the best weights, and some to the tracker.

    False if it was stopped on the way; the same command then does it. Collective. The model holds the best weights
    after it.
    """
    if not isinstance(run.task, SupportsPredictions) or run.state.best is None:
        return True
    weights = best_weights(run.runtime, run.folder.weights)
    run.module.load_state_dict(sharded.model_parts(run.module, weights))
    run.module.eval()
    predictor = Predictor(run.config, run.runtime, run.task, run.parallel.evaluated, run.parallel.sharded)
    written = write(predictor, run.eval_data.loader, run.stop, run.folder.path / layout.PREDICTIONS)
    if written is None:
        return False
    if written.head is not None:
        run.tracker.show(_sample(run.task.eval, written.head))
        log.info("predictions.csv: %d rows, by the weights of step %d", written.rows, run.state.best_step)
    return True


def _sample(dataset: Dataset, head: pa.Table) -> Sample:
    """The first rows as trackers show them, with their images if that is what the inputs are."""
    batch = dataset.batch(np.arange(len(head)), None)
    head = head.take(pa.array(batch.rows))  # without rows that could not be read
    inputs = batch.inputs
    images = inputs.dtype == torch.uint8 and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
    rows = [list(row.values()) for row in head.to_pylist()]
    return Sample(head.column_names, rows, inputs.numpy() if images else None)
