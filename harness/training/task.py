"""The interface of a task, and what the module of a task imports; docs/add_a_task.md builds one step by step.

A task is a module with a class ``Task``: a ``TaskSection`` whose fields are the ``task:`` section of the YAML, with

    metrics                    {name of an evaluation metric: "max" or "min"}, the one that picks the best model first
    open(seed, cache_dir)      the OpenedTask: data, model, loss and metrics

``BaseTask`` has defaults for most of an OpenedTask. The protocols whose names begin with Supports are optional. A task
knows nothing of amp and checkpoints, and of ranks only what ``SupportsFileCheck`` and ``SupportsFileCopies`` divide
among them. ``Pairs``, ``Sums``, ``Report`` and ``Columns`` are types of ``harness.training.evaluation``, in
``sums`` and ``labels``.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.schema import Config, ModelSection, TaskSection
from harness.config.targets import LabelledTask
from harness.data.arrays import Arrays
from harness.data.batch import Batch, Dataset, described, read
from harness.data.seeds import row_seed, seeded_torch
from harness.errors import OwnCodeError, TrainingError, place_of
from harness.training.evaluation.labels import Columns, SingleLabel
from harness.training.evaluation.losses import LabelCounts
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.prediction_files import RowFiles
from harness.training.evaluation.sums import Pairs, Report, Sums
from harness.training.model import model_builder

__all__ = [
    "Arrays", "BaseTask", "Batch", "Classification", "Columns", "Dataset", "ModelSection", "OpenedTask", "Pairs",
    "Report", "RowFiles", "Sums", "Supervised", "SupportsErrors", "SupportsFileCheck", "SupportsFileCopies",
    "SupportsLearned", "SupportsLook", "SupportsNewData", "SupportsPredictions",
    "SupportsSample", "SupportsSignature", "TaskSection", "model_builder", "row_seed",
    "seeded_torch",
]  # fmt: skip


class OpenedTask(Protocol):
    """A task with its data opened, as ``Task.open`` returns it."""

    @property
    def train(self) -> Dataset:
        """All training rows; the harness decides which rank reads which."""
        ...

    @property
    def eval(self) -> Dataset:
        """All evaluation rows."""
        ...

    @property
    def summary(self) -> Mapping[str, object]:
        """Facts to print before training: number of rows, classes, ..."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Warnings about data that is usable but unusual, one sentence each."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of the data: equal on two nodes if and only if they read the same data."""
        ...

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        """Return the number of training rows in [start, stop) per class; None if the task has no classes."""
        ...

    def model(self, section: ModelSection) -> nn.Module:
        """Build the model on the CPU in float32, not wrapped; usually with ``model_builder.build``."""
        ...

    def prepare(self, inputs: Tensor) -> Tensor:
        """Turn the inputs of a batch, already on the device, into what the model takes."""
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the rows of the batch."""
        ...

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Return {name: (sum, count)} over the batch; the harness adds them up over batches and ranks."""
        ...

    def report(self, sums: Sums) -> Report:
        """Return {name: value} of the added-up pairs; includes every metric that ``Task.metrics`` names."""
        ...


@runtime_checkable
class SupportsPredictions(Protocol):
    """An opened task with a table of predictions for its evaluation rows, ``predictions.csv``."""

    def predictions(self, outputs: Tensor) -> Mapping[str, Sequence[object] | np.ndarray | Tensor | RowFiles]:
        """Columns that the model adds: ``prediction`` and scores. A column of ``RowFiles`` has an array for each row,
        such as a mask, which is written to a file of its own; the table has the path."""
        ...

    def known(self, rows: np.ndarray) -> Columns:
        """Columns known without the model for these rows of ``eval``: ``id``, if it is not the number of the row, and
        ``label``, if there is one."""
        ...


@runtime_checkable
class SupportsErrors(Protocol):
    """An opened task whose table of predictions has columns that follow from the others."""

    def errors(self, columns: Mapping[str, np.ndarray]) -> Columns:
        """Columns made of those of ``predictions`` and ``known``, both as arrays."""
        ...


class PredictingTask(OpenedTask, SupportsPredictions, Protocol):
    """An opened task with a table of predictions."""


@runtime_checkable
class SupportsLearned(Protocol):
    """An opened task that keeps facts from its training data, such as the classes, in the run folder."""

    @property
    def learned(self) -> Mapping[str, object]:
        """Facts that ``Task.open_new`` needs, as JSON."""
        ...


@runtime_checkable
class SupportsFileCheck(Protocol):
    """An opened task whose rows name files that may be missing."""

    def require_files(self, rank: int, world_size: int, limit_s: float) -> None:
        """Raise DataError that lists the missing files of this rank's rows, as far as they can be looked up within
        ``limit_s`` seconds. Every start calls it, and ``harness predict``, whose rows are those of ``eval``."""
        ...


@runtime_checkable
class SupportsLook(Protocol):
    """An opened task whose evaluation rows may be damaged, which a run would otherwise notice after its first epoch."""

    def look(self, rows: range, ended: Callable[[], bool]) -> None:
        """Raise DataError if one of these rows of ``eval`` cannot be read. Until the first evaluation, a thread calls
        it while the run trains: it draws no random numbers, and returns soon after ``ended()`` is true."""
        ...


@runtime_checkable
class SupportsFileCopies(Protocol):
    """An opened task that reads files for which loader workers would wait long at their first use."""

    def copy_files(self, train: range, evaluated: range, rank: int) -> None:
        """Copy what these rows need to this machine. It may take as long as it makes progress. The ranks of a machine
        call it at the same time, each with its ``rank``, so that they can begin at different files."""
        ...


@runtime_checkable
class SupportsSample(Protocol):
    """An opened task whose rows name files that may be damaged, or unlike each other."""

    def sample(self, limit_s: float) -> str:
        """Read files of rows spread over both splits for at most ``limit_s`` seconds; return what was read, in words.
        Raises DataError. Only ``harness check`` calls it."""
        ...


@runtime_checkable
class SupportsNewData(Protocol):
    """A ``Task`` for ``harness predict``, which predicts the rows of a new file without the training data."""

    def open_new(self, learned: Mapping[str, object], source: str, cache_dir: Path | None) -> PredictingTask:
        """Open the file ``source`` as ``eval``; ``learned`` is what the trained task kept."""
        ...


@runtime_checkable
class SupportsSignature(Protocol):
    """An opened task that describes its model's input and output for ``harness export``."""

    @property
    def signature(self) -> Mapping[str, object]:
        """{"input": name, "output": name, "max_length": of a row, if batches differ in their length, "classes": [...],
        "preprocessing": {...}}, all optional."""
        ...


class BaseTask:
    """An opened task with defaults: inherit from it, set ``train`` and ``eval``, and write ``loss``.

    The model is built for two rows of ``train``, and the only metric is the loss. Override what should differ; each
    member is documented in ``harness.OpenedTask``, optional ones in the ``Supports`` classes of this module. Those
    without arguments may also be set in ``__init__``.
    """

    train: Dataset
    eval: Dataset
    loss: Callable[[Tensor, Tensor], Tensor]

    @cached_property
    def num_outputs(self) -> int | None:
        """How many numbers the model must return for each row; None allows anything."""
        return None

    @cached_property
    def summary(self) -> Mapping[str, object]:
        """Number of rows."""
        return {"train rows": len(self.train), "eval rows": len(self.eval)}

    @cached_property
    def notes(self) -> Sequence[str]:
        """No warnings."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all rows of ``Arrays``. Of another dataset it covers about 64 rows, of ``train`` without the
        inputs, which may be augmented: override it, or a run does not notice changes of the others."""
        digest = hashlib.sha256()
        for data, epoch in ((self.train, 0), (self.eval, None)):
            parts: list[np.ndarray | Tensor]
            if isinstance(data, Arrays):
                parts = [data.inputs, data.targets]
            else:
                rows = np.arange(0, len(data), max(len(data) // 64, 1))
                batch = read(copy.copy(data), rows, epoch)  # a file opened at first use is not for loader workers
                parts = [batch.targets] if epoch == 0 else [batch.inputs, batch.targets]
            digest.update(str([len(data), *((str(part.dtype), tuple(part.shape)) for part in parts)]).encode())
            for part in parts:
                if isinstance(part, Tensor):  # NumPy has no bfloat16
                    part = part.detach().reshape(-1).view(torch.uint8).numpy()
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        """None: rows have no classes."""
        return None

    def model(self, section: ModelSection) -> nn.Module:
        """Build the configured model. It gets ``num_outputs`` as its ``num_classes``, if it takes that."""
        example = self.prepare(read(copy.copy(self.train), np.arange(min(2, len(self.train))), 0).inputs)
        arguments = {} if self.num_outputs is None else {"num_classes": self.num_outputs}
        return model_builder.build(section.name, section.args, arguments, example, self.num_outputs)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return the inputs as they are."""
        return inputs

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Return the loss."""
        rows = torch.full((), float(len(targets)), device=targets.device)  # a copy of it would make the host wait
        loss = self.loss(outputs, targets)
        require_loss(self, loss, trains=False)
        return {"loss": (loss * rows, rows)}

    def report(self, sums: Sums) -> Report:
        """Return sum / count of each pair that ``evaluate`` returns."""
        return {name: sums.ratio(name) for name in sums.pairs}

    def known(self, rows: np.ndarray) -> Columns:
        """Return no columns: ``predictions``, if the task has it, then stands beside the numbers of the rows."""
        return {}


class Supervised(BaseTask):
    """A task with an ``objective``, which has its loss, its metrics and its predictions."""

    objective: Objective

    @cached_property
    def summary(self) -> Mapping[str, object]:
        """Number of rows, labels, loss and metrics."""
        return {**super().summary, **self.objective.summary(len(self.eval))}

    @cached_property
    def notes(self) -> Sequence[str]:
        """Warnings about the labels."""
        return self.objective.notes

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the rows of the batch."""
        return self.objective.loss(outputs, targets)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Return the loss and the metrics of a batch as sums and counts."""
        return self.objective.evaluate(outputs, targets)

    def report(self, sums: Sums) -> Report:
        """Return {metric: value} of the reduced pairs, and details of the evaluation."""
        return self.objective.report(sums)

    def predictions(self, outputs: Tensor) -> Columns:
        """Columns that the model adds to the table of predictions."""
        return self.objective.labels.predictions(outputs)

    def errors(self, columns: Mapping[str, np.ndarray]) -> Columns:
        """Columns that follow from the predictions and the labels."""
        return self.objective.labels.errors(columns)

    @property
    def signature(self) -> Mapping[str, object]:
        """The meaning of the outputs: the classes, or how numbers get into the unit of their column."""
        return self.objective.labels.signature


class Classification(Supervised):
    """``Supervised`` for a task with one class per row, whose model returns logits (batch, classes).

    ``classes[index]`` is the label of a class index. If the task's ``options`` are a LabelledTask, they choose the loss
    and the metrics; otherwise the loss is the cross entropy.
    """

    classes: Sequence[str | int]

    @cached_property
    def num_outputs(self) -> int | None:
        """One number for each class."""
        return len(self.classes)

    @cached_property
    def objective(self) -> Objective:  # type: ignore[override]
        options = getattr(self, "options", None)
        section = options if isinstance(options, LabelledTask) else LabelledTask(name="labelled")
        labels = SingleLabel(tuple(self.classes))
        return Objective(section, labels, lambda: LabelCounts(self.label_counts(0, len(self.train)), len(self.train)))

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        """Count the classes of ``Arrays``; None for another dataset."""
        if not isinstance(self.train, Arrays):
            return None
        return np.bincount(self.train.targets[start:stop], minlength=len(self.classes))


def require_loss(task: BaseTask | OpenedTask, loss: object, trains: bool = True) -> None:
    """Raise an error unless ``loss`` is one number, and if it ``trains``, one to differentiate. Its value is not looked
    at, for which the host would wait."""
    hint = "return the mean over the rows, one number, as torch's functions compute it from the outputs"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        description = described(loss)
    elif trains and not loss.requires_grad:
        description = "a number without a gradient"
        hint = "remove .detach(), .item(), torch.tensor() or torch.no_grad() from loss() or the model"
    else:
        return
    raise wrong_return(task, "loss", description, hint)


def wrong_return(task: BaseTask | OpenedTask, method: str, returned: str, hint: str) -> TrainingError:
    """Return the error for ``returned``, which ``method`` of ``task`` returned: of the user's own code, if that is."""
    where = place_of(type(task), method)
    kind = OwnCodeError if where else TrainingError
    return kind(f"{type(task).__name__}.{method}() returned {returned}", where=where or "task", hint=hint)


class HasTask(Protocol):
    """The attributes of a run that ``prepare`` needs."""

    @property
    def config(self) -> Config: ...

    @property
    def task(self) -> OpenedTask: ...


def laid_out(dataset: Dataset, config: Config) -> Dataset:
    """Return ``dataset``; one of images delivers them in the memory format of the model's weights."""
    if config.model.channels_last and hasattr(dataset, "channels_last") and is_dataclass(dataset):
        return replace(dataset, channels_last=True)
    return dataset


def prepare(run: HasTask, inputs: Tensor) -> Tensor:
    """Turn the inputs of a batch into the model's input, in the memory format of its weights."""
    if not run.config.model.channels_last:
        return run.task.prepare(inputs)
    return _channels_last(run.task.prepare(_channels_last(inputs)))  # bytes are copied faster than floats


def _channels_last(inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
