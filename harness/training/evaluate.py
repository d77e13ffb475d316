"""Evaluation over all ranks: every row counted once, at any world size."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import torch

from harness.config.schema import Config
from harness.training.metrics import Sums
from harness.training.run import Run
from harness.training.task import OpenedTask

log = logging.getLogger("harness")


def evaluate(run: Run) -> dict[str, Any] | None:
    """Metrics of the present weights (their moving average, where there is one) over all evaluation rows.

    None if a stop was agreed on the way. Collective: ranks ask equally often whether to stop, however many batches each
    has, and meet again only in the reduction. No rank waits for another's batch, unless the weights are sharded: every
    rank then calls the model equally often, at last on a row that does not count.
    """
    run.average_buffers()  # or each rank would evaluate a model of its own
    data, module, sums = run.eval_data, run.parallel.evaluated, Sums()
    rows = bad = 0
    module.eval()
    batches = data.batches()
    start = time.perf_counter()
    try:
        with torch.no_grad(), run.averaged():
            for _ in range(data.num_batches()):
                if run.stop.agreed():
                    return None
                batch = next(batches, None)
                bad += len(batch.bad) if batch is not None else 0
                if batch is None or not len(batch):  # this rank is done, or could not read it; another goes on
                    if run.parallel.sharded:
                        module(prepare(run, run.train_data.any_inputs()))
                else:
                    rows += len(batch)
                    outputs = module(prepare(run, batch.inputs))
                    sums.add(run.task.evaluate(outputs, batch.targets))
    finally:
        module.train()
    total = sums.reduce(run.runtime)
    counted, unread = run.runtime.sum(torch.tensor([rows, bad], device=run.runtime.device)).tolist()
    metrics = {**run.task.report(total), "rows_used": counted, "rows": data.num_rows, "bad_rows": unread}
    return {**metrics, "samples_per_s": counted / (time.perf_counter() - start)}


class Prepares(Protocol):
    """What ``prepare`` needs of a run."""

    @property
    def config(self) -> Config: ...

    @property
    def task(self) -> OpenedTask: ...


def prepare(run: Prepares, inputs: torch.Tensor) -> torch.Tensor:
    """Inputs as the model takes them, in the memory format of its weights."""
    inputs = run.task.prepare(inputs)
    if run.config.model.channels_last and inputs.dim() == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs
