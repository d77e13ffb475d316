"""apex-harness: the NVIDIA Apex training recipe on current PyTorch.

    from harness import predict, train

    result = train("configs/digits.yaml", {"train.epochs": 3})
    table = predict(result.folder, "new.csv")

All that a user's own code needs is here; docs/python_api.md explains it. A module is imported once one of its names is
used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from harness.version import __version__ as __version__

# How often a thread of torch's OpenMP looks for work before it sleeps. The default of 300,000 makes the threads of a
# busy machine wait for each other's time slices: a step of a small transformer on two cores, one of them busy, took
# 700 ms instead of 12 ms. On a quiet machine this number costs nothing (measured on two cores).
_SPINS = "3000"
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is imported

if TYPE_CHECKING:
    from harness.api import TrainResult as TrainResult
    from harness.api import load_config as load_config
    from harness.api import load_model as load_model
    from harness.api import open_run as open_run
    from harness.api import predict as predict
    from harness.api import train as train
    from harness.config.base import Mark as Mark
    from harness.config.base import Section as Section
    from harness.config.targets import LabelledTask as LabelledTask
    from harness.errors import CheckpointError as CheckpointError
    from harness.errors import ConfigError as ConfigError
    from harness.errors import DataError as DataError
    from harness.errors import HarnessError as HarnessError
    from harness.errors import OwnCodeError as OwnCodeError
    from harness.errors import TrainingError as TrainingError
    from harness.training import loop
    from harness.training.checkpoints import checkpointing
    from harness.training.parts import Checkpoints as Checkpoints
    from harness.training.parts import Runtime as Runtime
    from harness.training.parts import Sums as Sums
    from harness.training.parts import amp as amp
    from harness.training.parts import bounds as bounds
    from harness.training.parts import load as load
    from harness.training.parts import num_steps as num_steps
    from harness.training.parts import open_runtime as open_runtime
    from harness.training.parts import save as save
    from harness.training.parts import shard as shard
    from harness.training.run import Run as Run
    from harness.training.strategies.base import ParallelStrategy as ParallelStrategy
    from harness.training.task import Arrays as Arrays
    from harness.training.task import BaseTask as BaseTask
    from harness.training.task import Batch as Batch
    from harness.training.task import Classification as Classification
    from harness.training.task import OpenedTask as OpenedTask
    from harness.training.task import RowFiles as RowFiles
    from harness.training.task import TaskSection as TaskSection
    from harness.training.task import prepare as prepare
    from harness.training.task import row_seed as row_seed
    from harness.training.task import seeded_torch as seeded_torch

    save_run, evaluate_run = checkpointing.save, loop.evaluation

_NAMES = {  # of each module, as imported above; NAME=OTHER: it is called OTHER there
    "api": "TrainResult load_config load_model open_run predict train",
    "config.base": "Mark Section",
    "config.targets": "LabelledTask",
    "errors": "CheckpointError ConfigError DataError HarnessError OwnCodeError TrainingError",
    "training.checkpoints.checkpointing": "save_run=save",
    "training.loop": "evaluate_run=evaluation",
    "training.parts": "Checkpoints Runtime Sums amp bounds load num_steps open_runtime save shard",
    "training.run": "Run",
    "training.strategies.base": "ParallelStrategy",
    "training.task": "Arrays BaseTask Batch Classification OpenedTask RowFiles TaskSection prepare row_seed "
    "seeded_torch",
}
_FROM = {
    word.partition("=")[0]: (module, word.rpartition("=")[2])
    for module, words in _NAMES.items()
    for word in words.split()
}
__all__ = ["__version__", *_FROM]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    module, inside = _FROM[name]
    return getattr(importlib.import_module(f"harness.{module}"), inside)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
