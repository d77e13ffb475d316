"""The file names of a run folder, each defined only here.

config.yaml  provenance.json  metrics.jsonl  summary.json  task.json  failure.json  confusion.csv  predictions.csv
predictions_files/COLUMN/ROW.{png, npz}
weights.safetensors  weights.former.safetensors  report.html  trackers.json  start.json (runs at a URL)
checkpoints/step-N/{state.pt, manifest.json, and shards}  checkpoints/{latest, best}
huggingface/NAME-DIGEST/{config.json, and files of the tokenizer}
logs/rank-N.log  logs/rank-N.exit.json  logs/losses.jsonl
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

CONFIG = "config.yaml"  # the resolved configuration
PROVENANCE = "provenance.json"  # one entry per start: command, commit, package versions
METRICS = "metrics.jsonl"  # the log: one JSON object per line
SUMMARY = "summary.json"
EPOCHS = "epochs.jsonl"  # the evaluations of a workflow of Flyte
TASK = "task.json"  # what the task learned from the training data
FAILURE = "failure.json"
CONFUSION = "confusion.csv"
PREDICTIONS = "predictions.csv"
PREDICTED = "predictions_files"  # folder of the arrays that predictions.csv names
WEIGHTS = "weights.safetensors"  # of the best step
FORMER_WEIGHTS = "weights.former.safetensors"  # those of the end before the last extension, if it was the best step
REPORT = "report.html"
TRACKERS = "trackers.json"  # the run's identity in the trackers
START = "start.json"  # the start that owns a run at a URL

CHECKPOINTS = "checkpoints"
LATEST = "latest"  # a text file that names the newest checkpoint
BEST = "best"  # likewise the best
STATE = "state.pt"
MANIFEST = "manifest.json"  # the format, and size and SHA-256 of each file

LOGS = "logs"
RANK_EXITS = "rank-*.exit.json"  # glob pattern inside LOGS
LOSSES = "losses.jsonl"  # inside LOGS: ranks that were lost before a restart

SWEEP = "sweep.json"  # of a sweep folder
SWEEP_LOCK = "lock"  # of a sweep folder: the process that sweeps in it
TRIALS = "trials"  # folder of the sweep's runs

OF_TRAINING = frozenset(
    [CONFIG, PROVENANCE, METRICS, SUMMARY, TASK, FAILURE, CONFUSION, PREDICTIONS, WEIGHTS, TRACKERS, START, CHECKPOINTS]
)  # which no other command may replace


def pointer(name: str) -> str:
    """Return the path of LATEST or BEST in the run folder."""
    return f"{CHECKPOINTS}/{name}"


RESULTS = (METRICS, SUMMARY, WEIGHTS, PREDICTIONS, CONFUSION, pointer(LATEST), SWEEP)

_STEP = re.compile(r"step-(\d+)")


OF_HUB = "huggingface/"  # the folder of the copies of ``of_hub``


def of_hub(name: str) -> str:
    """Return the folder with copies of the small files of ``hf:PLACE``, for uses of the run without them."""
    return f"{OF_HUB}{Path(name).name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint of ``step``."""
    return f"step-{step}"


def step_number(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for any other name."""
    match = _STEP.fullmatch(name.strip())
    return int(match[1]) if match else None


OF_RANKS = "rank-*"  # in LOGS: logs and exit records


def rank_log(rank: int) -> str:
    """Return the log of ``rank``, inside LOGS."""
    return f"rank-{rank}.log"


def rank_exit(rank: int | None) -> str:
    """Return the exit record of ``rank``, inside LOGS."""
    return RANK_EXITS.replace("*", str(rank))
