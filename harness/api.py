"""The Python API: train and predict from a script or a notebook, with the objects that the command line uses.

Each function also works on every rank of a launcher such as torchrun, and raises instead of exiting: ``HarnessError``
with ``message``, ``where`` and ``hint``, or what the user's own code raised, as it is. Afterwards the process is as
before: its log handlers, signal handlers, random streams and settings of torch. docs/python_api.md has examples.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import OVERRIDES, ConfigError, TrainingError, plural

if TYPE_CHECKING:
    import pandas as pd

    from harness.config.schema import Config
    from harness.inference.trained_model import TrainedModel
    from harness.training.run import Run
    from harness.training.run_start import RunStart

log = logging.getLogger("harness")

# Environment variables that a run sets for libraries in its process.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "WANDB_DATA_DIR")
_calls = itertools.count()
_stores: list[Any] = []  # through which ranks have met; open, so that a faster rank finds it for its next call


@dataclass(frozen=True)
class TrainResult:
    """How ``train`` ended. The same on every rank."""

    folder: str
    """The run folder, or its URL: configuration, log, checkpoints, best weights, predictions."""
    finished: bool
    """False if a signal, such as Ctrl-C, stopped it early, with a checkpoint: the same call resumes."""
    step: int
    """Optimizer steps so far, over all starts of the run."""
    metrics: dict[str, float]
    """The metrics of the newest evaluation, by name; empty before the first."""
    best: float | None
    """The best value of ``config.best_metric``; None before the first evaluation."""
    best_step: int
    """The step at which it was reached, whose weights ``weights.safetensors`` holds."""
    history: list[dict[str, Any]]
    """Step, epoch and metrics of each evaluation. ``metrics.jsonl`` in the folder has the whole log."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Return the validated configuration in the YAML file ``path``.

    ``overrides``: settings on top, as words of the command line (``["train.epochs=3"]``) or by dotted key
    (``{"train.epochs": 3}``). Relative paths in the file are relative to the working folder. Raises ConfigError with
    all problems, each with its file and line.
    """
    from harness.config import loader

    return loader.load(os.fspath(path), _words(overrides), OVERRIDES)


def _words(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return ``overrides`` as words of the command line."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_yaml(key, value)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


def _yaml(key: str, value: Any) -> str:
    """Return ``value`` as ASCII JSON that is also YAML, in which a character above U+FFFF must not be two escapes."""
    try:  # numbers of NumPy have tolist
        text = json.dumps(value, ensure_ascii=False, default=lambda x: getattr(x, "tolist", lambda: os.fspath(x))())
    except (TypeError, ValueError) as error:
        where, hint = f"{OVERRIDES}: {key}", "give a number, a text, a path, a bool, None, a list or dictionary"
        raise ConfigError(f"{type(value).__name__} is no type of the YAML: {error}", where=where, hint=hint) from None
    return re.sub(r"[\x7f-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def train(config: Config | str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()) -> TrainResult:
    """Train ``config`` to its end in this process, as ``harness train`` does; every rank of a launcher calls it.

    ``config``: what ``load_config`` returns, or its arguments: the path of a YAML file, and ``overrides``.
    A run that was stopped or killed resumes from its newest checkpoint. Ctrl-C stops with a checkpoint. Raises
    HarnessError, or what the user's own task, model or optimizer raised.
    """
    from harness.training import loop
    from harness.training.evaluation import final_predictions

    config = _loaded(config, overrides)
    with _started(config) as start, start as run:
        start.done = loop.train(run) and final_predictions.write_for_run(run)
    state = run.state
    last = state.history[-1] if state.history else {}
    metrics = {name: last[name] for name in config.task.metrics if name in last}
    return TrainResult(
        run.folder.where, start.done, state.step, metrics, state.best, state.best_step, list(state.history)
    )


@contextmanager
def open_run(
    config: Config | str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Iterator[Run]:
    """Open the parts of a run, for a training loop of your own: a context with the ``harness.training.run.Run``.

    The run is restored from its newest checkpoint, if there is one, and hooks get ``before_training``. Once the body
    has taken steps (``run.state.add_step``) and ends, the run is done: what is due of checkpoint, evaluation and
    summary is made up, and predictions are written. After a request to stop, by a signal or
    ``run.stop.request(why)``, there is a checkpoint only, and the same call resumes. Every rank of a launcher enters
    it. Arguments and errors are those of ``train``.
    """
    from harness.training import loop
    from harness.training.checkpoints import checkpointing
    from harness.training.evaluation import final_predictions

    with _started(_loaded(config, overrides)) as start, start as run:
        _warn_of_own_loop(run)
        loop.begin(run)
        run.meter.restart_clock()
        before = run.state.to_dict()
        yield run
        if run.state.step > before["step"]:
            run.parallel.check_own_loop()
        _check_position(run, before)
        if run.finished() or run.state.step > before["step"]:
            checkpointing.save(run)  # without the reason for the end, so that a longer loop resumes from it
            if not run.finished():
                run.state.ended = "its loop has ended"
                log.info("training ended early, at step %d: %s", run.state.step, run.state.ended)
            start.done = loop.train_to_end(run) and final_predictions.write_for_run(run)


def _check_position(run: Run, before: dict[str, Any]) -> None:
    """Warn of steps since the state ``before`` if none was counted as one of an epoch. Raises TrainingError for groups
    of an epoch without a step."""
    state = run.state.to_dict()
    stays = all(state[key] == before[key] for key in ("epoch", "segments"))
    if state["step"] == before["step"] and not stays:
        raise TrainingError(
            "your loop has used the groups of an epoch, and counted no step",
            hint="call run.state.add_step(skipped) after each step, and remove the run folder, or choose another name",
        )
    if state["step"] > before["step"] and stays:
        log.warning(
            "your loop took %s and never called run.train_data.advance(): a resume repeats their rows, and no epoch "
            "ends; call run.train_data.advance(run.state.segments) after each step",
            plural(state["step"] - before["step"], "step"),
        )


def _warn_of_own_loop(run: Run) -> None:
    """Warn of what the configuration asks for and only ``harness.training.loop`` does."""
    from harness.config.schema import TrainSection
    from harness.training.hooks import AFTER_STEP

    config, defaults = run.config, TrainSection()
    names = ("clip_norm", "on_gradients", "on_nan", "mixup", "cutmix", "ema_decay")
    ignored = [f"train.{name}" for name in names if getattr(config.train, name) != getattr(defaults, name)]
    ignored += ["checkpoint.every"] if config.checkpoint.every is not None else []
    ignored += [f"{AFTER_STEP} of {hook.name}" for hook in run.hooks.all if hook.has(AFTER_STEP)]
    if ignored:
        log.warning(
            "these are left to your loop, and not done unless it does them: %s, and train lines in metrics.jsonl "
            "(run.tracker.log)",
            ", ".join(ignored),
        )


def predict(
    run: str | os.PathLike[str],
    rows: str | os.PathLike[str] | pd.DataFrame,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    trust: bool = False,
) -> pd.DataFrame:
    """Return the predictions of a trained model in this process, one row for each of ``rows``, in their order.

    ``run``: a run folder or its URL; its best weights are used. ``rows``: a CSV or Parquet file, a table, or a list of
    dictionaries, with the columns that the run was trained on; labels are optional. Without labels, also a list of
    values of the only input column, or of tuples of several; if it reads images, also an image or a folder of images.
    ``overrides`` change settings of the run (``["task.root=photos"]`` or ``{"task.root": "photos"}``). ``trust``:
    import code that a run of someone else names. The columns are those of predictions.csv: ``id``, ``label``,
    ``prediction``, scores; those of files have the arrays. Labels are strings, as in a file. Raises HarnessError.
    """
    import pandas as pd

    from harness.config.places import IMAGE_SUFFIXES
    from harness.inference import predict as inference
    from harness.inference.rows import as_file, images_of, without_temporary
    from harness.runs import fetched, trained_run
    from harness.training.evaluation import prediction_files

    run_folder, override_words, columns = fetched.local_copy(str(run)), _words(overrides), ()
    rows_path = os.fspath(rows) if isinstance(rows, str | os.PathLike) else ""
    of_images = rows_path.lower().endswith(IMAGE_SUFFIXES) or os.path.isdir(rows_path)
    if isinstance(rows, list) or of_images:
        task = trained_run.configuration(run_folder, override_words, trust, OVERRIDES).task
        columns = tuple(getattr(task, "input_columns", ()))
    source_rows: Any = images_of(task, [rows_path], rows_path, Counter())[1] if of_images else rows
    with tempfile.TemporaryDirectory(prefix="harness-") as folder, as_file(source_rows, columns) as (source, cache):
        out = Path(folder, "predictions.parquet")
        words = [*_words({"data.cache_dir": cache} if cache else {}), *override_words]
        request = inference.PredictRequest(run_folder, source, out, words, trust, OVERRIDES)
        with _as_before(), without_temporary({re.escape(str(out)): "predictions"}, folder):
            inference.in_this_process(request)
        table = pd.read_parquet(out)
        for column in table if prediction_files.folder_of(out).is_dir() else ():
            if (prediction_files.folder_of(out) / str(column).replace("/", "_")).is_dir():
                table[column] = [prediction_files.read(Path(folder, path)) if path else None for path in table[column]]
        return table


def load_model(
    run: str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = (), trust: bool = False
) -> TrainedModel:
    """Return the trained model of a run as a ``torch.nn.Module`` in eval mode, with its best weights, in float32.

    ``model.preprocess(rows)`` returns its inputs for a file, a table or a list, ``model.classes`` are the labels of its
    outputs, and ``model.description`` explains both. Numbers of a built-in task are in the unit of their column; the
    outputs of your own task are as its model returns them, which its ``predictions``, and so ``predict``, may convert.
    ``run``, ``overrides`` and ``trust`` are as for ``predict``; for a task that cannot predict new files, the data of
    the training must still be there. Raises HarnessError.
    """
    from harness.inference import trained_model
    from harness.runs import fetched

    return trained_model.load(fetched.local_copy(str(run)), _words(overrides), trust, OVERRIDES)


def _loaded(config: Config | str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any]) -> Config:
    """Return ``config``, loaded if it is a path. Raises ConfigError."""
    from harness.config.schema import Config

    if isinstance(config, str | os.PathLike):
        return load_config(config, overrides)
    if isinstance(config, Config) and not overrides:
        return config
    is_loaded = isinstance(config, Config)
    problem = "a loaded Config takes none" if is_loaded else f"a {type(config).__name__} is neither a Config nor a path"
    hint = "pass the path of a YAML file, and overrides if there are any: 'FILE.yaml', {'optimizer.lr': 0.1}"
    raise ConfigError(problem, where=OVERRIDES if is_loaded else "config", hint=hint)


@contextmanager
def _started(config: Config) -> Iterator[RunStart]:
    """Yield a ``RunStart`` that is not entered yet, in a process that is restored afterwards."""
    from harness.distributed.launch_env import detect
    from harness.distributed.meeting import telling_peers
    from harness.runs import console
    from harness.training import run_start
    from harness.training.exit_report import explained
    from harness.training.reproducibility import determinism

    with _as_before(), ExitStack() as stack:
        launch = replace(detect(os.environ), call=next(_calls))
        console.to_terminal(launch.rank)
        start: run_start.RunStart | None = None
        try:
            with telling_peers(launch):
                determinism.require(config.train.deterministic)  # before CUDA starts
            runtime = stack.enter_context(run_start.connected(launch, config))
            _stores[:] = [runtime.store]
            start = run_start.RunStart(config, runtime, shown=False)
            yield start
        except (Exception, SystemExit) as error:
            explanation = explained(error, start.run if start else None)
            if explanation is error:
                raise
            raise explanation from error


@contextmanager
def _as_before() -> Iterator[None]:
    """Restore the log handlers, the random streams and the settings of torch of before once the body has ended."""
    import random

    import numpy as np
    import torch

    from harness.apex import amp
    from harness.training.reproducibility import determinism

    with ExitStack() as after:  # runs its calls in reverse order
        for name in _VARIABLES:
            after.callback(_set_variable, name, os.environ.get(name))
        after.callback(torch.set_num_threads, torch.get_num_threads())
        cudnn, matmul, deterministic = torch.backends.cudnn, torch.backends.cuda.matmul, torch.utils.deterministic
        for backend in determinism.tf32_places():
            after.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
        for backend, name in (
            (cudnn, "benchmark"), (cudnn, "allow_tf32"), (matmul, "allow_tf32"),
            (deterministic, "fill_uninitialized_memory"),
        ):  # fmt: skip
            with suppress(RuntimeError):  # of allow_tf32, if the caller has set fp32_precision
                after.callback(setattr, backend, name, getattr(backend, name))
        after.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        if torch.cuda.is_initialized():
            after.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(torch.set_rng_state, torch.get_rng_state())
        after.callback(logging.captureWarnings, logging._warnings_showwarning is not None)  # type: ignore[attr-defined]
        for log in (logging.getLogger("harness"), logging.getLogger("py.warnings")):
            after.callback(_restore_log, log, log.handlers[:], log.level, log.propagate)
        logging.getLogger("harness").handlers = []  # console would close them
        after.callback(amp.reset)
        yield


def _restore_log(log: logging.Logger, handlers: list[logging.Handler], level: int, propagate: bool) -> None:
    for handler in set(log.handlers) - set(handlers):
        handler.close()
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
