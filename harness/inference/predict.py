"""Write the predictions of a trained model for the rows of a new file, on one or several processes."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.config import plugins
from harness.config.schema import Config
from harness.config.targets import LabelledTask, TableTask
from harness.data.batch import Dataset, SupportsFault, row_namer
from harness.data.image_folders import SUFFIXES
from harness.data.loader import Loader
from harness.data.table.table import TableRows
from harness.distributed import signals
from harness.distributed.launch_env import Launch, detect
from harness.distributed.meeting import telling_peers
from harness.distributed.monitor import follow_until_done
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop, on_signals
from harness.distributed.watchdog import Watchdog
from harness.distributed.worker_group import LocalRun
from harness.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXITS_BY_SIGNAL,
    ConfigError,
    LaunchError,
    first_line,
    plural,
    readable,
)
from harness.runs import console, trained_run
from harness.runs.files import output_error, require_output
from harness.training import build
from harness.training.evaluation import predictions
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.prediction_table import UNKNOWN_SHOWN, NoRowsError, Totals
from harness.training.evaluation.predictions import Predictor
from harness.training.exit_report import ExitReporter, failed_early
from harness.training.optimizer import emulated_half, optimizer_builder, precision, trained_parameters
from harness.training.reproducibility import determinism
from harness.training.rows import opening
from harness.training.run_start import connected
from harness.training.task import OpenedTask, PredictingTask, Supervised, SupportsNewData, laid_out

log = logging.getLogger("harness")

FORMATS = (".csv", ".parquet")
_NAMED = 5  # rows without a prediction
_END_S = 20.0  # for ranks to exit when they are asked to stop


@dataclass(frozen=True)
class PredictRequest:
    """Predict the rows of the file ``source`` with the best weights of ``run`` into the file ``out``."""

    run: Path
    source: str
    out: Path
    overrides: Sequence[str] = ()
    trust: bool = False
    written_at: str | None = None
    """Both: see ``trained_run.configuration``."""


def main(request: PredictRequest, world_size: int | None, environ: Mapping[str, str], words: Sequence[str]) -> int:
    """Predict; return the exit code. Under a launcher, this process is one of its ranks. Otherwise it starts
    ``world_size`` processes with ``words``, the arguments of this command."""
    console.to_terminal(0)
    launch = detect(environ)
    console.to_terminal(launch.rank)
    if launch.world_size == 1 and (world_size or 1) > 1:
        # So that errors are reported once, and the file is converted once.
        _open(request, _configuration(request, world_size, launch))
        return _start_ranks(world_size or 1, environ, words)
    return _rank(request, world_size, launch)


def _configuration(request: PredictRequest, world_size: int | None, launch: Launch) -> Config:
    if launch.world_size > 1 and world_size not in (None, launch.world_size):
        raise LaunchError(
            f"--world {world_size}, but a launcher has started {launch.world_size} processes",
            hint="remove --world, or start harness predict without a launcher",
        )
    config = trained_run.configuration(request.run, request.overrides, request.trust, request.written_at)
    if request.out.suffix not in FORMATS:
        hint = "--out predictions.csv"
        raise ConfigError(
            f"the name of the output must end in {' or '.join(FORMATS)}", where=str(request.out), hint=hint
        )
    require_output(request.out, [request.source, *trained_run.texts_of_task(config)])
    return config


def open_task(config: Config, run: Path, source: str, cache_dir: str | None = None) -> PredictingTask:
    """Open the task of ``run`` with the rows of ``source`` as ``eval``. ``cache_dir``: instead of data.cache_dir."""
    section = config.task
    if not isinstance(section, SupportsNewData):
        raise ConfigError(
            f"the task {section.name} cannot predict the rows of a file",
            where=str(run),
            hint=_without_open_new(section.name),
        )
    cache = cache_dir or config.data.cache_dir
    return section.open_new(trained_run.task_facts(run), source, Path(cache) if cache else None)


def _open(request: PredictRequest, config: Config, rank: int = 0, world_size: int = 1) -> PredictingTask:
    """Open the task for ``request``. Raises DataError if files of this rank's rows are missing."""
    task = open_task(config, request.run, request.source)
    opening.require_files(task, rank, world_size)
    return task


def _without_open_new(name: str) -> str:
    if "." in name:
        return "define Task.open_new(learned, source, cache_dir) in it; see docs/add_a_task.md#the-task"
    able = [task for task in plugins.names("task") if isinstance(plugins.find("task", task, ""), SupportsNewData)]
    return f"{' and '.join(able)} can; to continue text use harness generate"


def _rank(request: PredictRequest, world_size: int | None, launch: Launch) -> int:
    with ExitStack() as stack:
        try:
            # The main thread may be in C code while the ranks meet.
            with signals.ending_the_process("before the ranks had connected"):
                with telling_peers(launch):
                    config = _configuration(request, world_size, launch)
                runtime = stack.enter_context(connected(launch, config))
        except Exception as error:
            return failed_early(launch, error)
        stop = Stop(runtime)
        reporter = ExitReporter(runtime)
        watching = Watchdog(runtime, stop, on_blocked=reporter.blocked)
        with (
            on_signals(stop, "no predictions will be written"),
            watching as watchdog,
            _as_trained(config, runtime.device),
        ):
            try:
                return _predict(request, config, runtime, stop)
            except (Exception, SystemExit) as error:
                return reporter.failed(error, watchdog)


def in_this_process(request: PredictRequest) -> None:
    """Predict on one rank, without a launcher. Raises HarnessError, and KeyboardInterrupt after a signal."""
    launch = Launch()
    config = _configuration(request, None, launch)
    with open_runtime(launch, config.runtime.device, config.runtime.timeout_s) as runtime:
        stop = Stop(runtime)
        with on_signals(stop, "no predictions will be written"), _as_trained(config, runtime.device):
            if _predict(request, config, runtime, stop) != EXIT_DONE:
                raise KeyboardInterrupt


def _predict(request: PredictRequest, config: Config, runtime: Runtime, stop: Stop) -> int:
    start = time.perf_counter()
    task = runtime.patiently("opening the data", lambda: _open(request, config, runtime.rank, runtime.world_size))
    runtime.all_equal(task.fingerprint, "the rows to predict", "give every machine the same file")
    for note in task.notes:
        log.warning("%s", note)
    opening.copy_files(config, task, runtime, train=False)
    if runtime.rank == 0:
        trained_run.warn_if_unfinished(request.run, config)
    best = predictions.best_weights(runtime, trained_run.weights_path(request.run))
    with runtime.announced("building the model"), runtime.together("building the model"):
        model = _model(request, config, task, best, runtime.device)
    rows = laid_out(task.eval, config)
    loader = Loader(
        rows, config.data.num_workers, runtime.device, config.runtime.timeout_s, stop.ends_wait, runtime.limited
    )
    predictor = Predictor(
        config, runtime, task, model.eval(), objective=_objective(task), copied=_other_columns(config, task)
    )
    name = row_namer(task.eval, "row {}".format)
    progress = console.ProgressBar(runtime.rank)
    try:
        totals = predictions.write(predictor, loader, stop, request.out, progress)
    except predictions.TableError as error:
        raise output_error(request.out, error) from None
    except NoRowsError as error:
        if isinstance(task.eval, SupportsFault):
            error.message += f": {_unread(task.eval, range(len(task.eval)), name)}"
            error.hint = SUFFIXES
        raise
    finally:
        loader.close()
    if totals is None:
        log.info("stopped (%s); nothing was written", stop.reason or "on another rank")
        return stop.exit_code
    seconds = time.perf_counter() - start
    classes, unknown = list[str | int](), dict[str, int]()
    if isinstance(config.task, LabelledTask) and config.task.label_kind != "regression":
        separator = config.task.labels.separator or "" if isinstance(config.task, TableTask) else ""
        if classes := trained_run.task_facts(request.run).get("classes") or []:
            unknown = totals.unknown_labels(classes, separator)
    if isinstance(task.eval, TableRows):  # there is time to find the lines in a long file, in one pass
        named_labels = list(unknown)[:UNKNOWN_SHOWN]
        task.eval.table.find_lines([*totals.bad[:_NAMED], *map(totals.first.__getitem__, named_labels)])
        name = partial(task.eval.row_name, quickly=False)
    if totals.bad:
        what = "rows that could not be read: %d; they have no prediction: %s"
        log.warning(what, len(totals.bad), _unread(task.eval, totals.bad, name))
    ranks = plural(runtime.world_size, "rank")
    rate = totals.rows / seconds
    shown = _show_metrics(predictor, totals, request.source)
    if runtime.rank == 0 and totals.fit and (not shown or len(totals.squares) > 1):
        log.info("labels of %s: %s", request.source, totals.fit)
    totals.warn_of_unknown_labels(unknown, classes, name)
    totals.warn_of_one_class()
    log.info("%s: %s in %.1f s (%.0f rows/s, %s)", request.out, plural(totals.rows, "row"), seconds, rate, ranks)
    return EXIT_DONE


def _unread(dataset: Dataset, rows: Sequence[int], name: Callable[[int], str]) -> str:
    """Return the names of the first of ``rows``, of images with what is wrong, and the number of the rest."""
    faults = [dataset.fault(row) if isinstance(dataset, SupportsFault) else "" for row in rows[:_NAMED]]
    named = [f"{name(row)} ({fault})" if fault else name(row) for row, fault in zip(rows, faults, strict=False)]
    return ", ".join(named) + (f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else "")


def _other_columns(config: Config, task: PredictingTask) -> list[str]:
    """Return the columns of the table of the rows that are neither inputs nor labels; [] for an own kind of rows."""
    if not (isinstance(task.eval, TableRows) and isinstance(config.task, TableTask)):
        return []
    used = {*config.task.input_columns, *config.task.label_columns}
    return [column for column in task.eval.table.columns if column not in used]


def _objective(task: PredictingTask) -> Objective | PredictingTask | None:
    """Return what evaluates the rows with labels; None if nothing does: the targets may be no labels then."""
    kind = type(task)
    if not issubclass(kind, Supervised):
        return task
    if (kind.evaluate, kind.report) != (Supervised.evaluate, Supervised.report):
        return None
    return getattr(task, "objective", None)


def _show_metrics(predictor: Predictor, totals: Totals, source: str) -> bool:
    """Print the metrics of the rows with labels; if there are none, warn why, for nobody asked for them, and return
    False."""
    why = totals.not_evaluated
    try:
        if not why and (lines := predictions.shown_metrics(predictor, totals)):
            log.info("labels of %s:\n%s", source, "\n".join(lines))
            return True
    except Exception as error:  # of the user's own metric
        why = first_line(readable(error))
    if why:
        log.warning("the rows with labels are not evaluated: %s", why)
    return False


def _model(
    request: PredictRequest, config: Config, task: OpenedTask, best: dict[str, Tensor], device: torch.device
) -> nn.Module:
    """Build the model as in training: on the device, cast by amp at the opt level of the run."""
    model = build.build_model(config, task)
    trained_run.load_into(model, best, request.run)  # before amp, which casts the weights
    model = model.to(device)
    if config.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    determinism.set_tf32(config.precision)
    chosen = precision.choose(config.precision, device, config.needs_our_amp)
    section = config.optimizer
    optimizer = optimizer_builder.build(section, trained_parameters.groups(section, model, section.lr), section.lr)
    model, _ = chosen.initialize(model, optimizer)
    if config.model.compile:
        model.compile()
    return model


@contextmanager
def _as_trained(config: Config, device: torch.device) -> Iterator[None]:
    """Context in which a rank computes as in training, but on a CPU on one thread. The number of threads may change the
    last digits of a result, and more ranks use the cores at least as well."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with emulated_half.half_on_cpu(config.precision, device):
            yield
    finally:
        torch.set_num_threads(before)


def _start_ranks(world_size: int, environ: Mapping[str, str], words: Sequence[str]) -> int:
    """Predict with ``world_size`` processes of this machine; return their exit code."""
    words = [sys.executable, "-m", "harness", *words]
    report = follow_until_done(
        lambda: LocalRun(words, world_size, environ, _END_S, "harness predict"), "no predictions will be written"
    )
    codes = [exit.exit_code for exit in report.exits if exit.exit_code]
    if report.stopped and codes and set(codes) <= {*EXITS_BY_SIGNAL, -signal.SIGTERM}:  # some before their handlers
        return signals.ended_by(report.signal)
    return next((code for code in codes if code > 0 and code != EXIT_FAILURE), EXIT_FAILURE if codes else EXIT_DONE)
