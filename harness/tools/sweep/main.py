"""``harness sweep`` from the sweep file to the final table. The same command resumes a sweep after a stop or kill."""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.merge import typed
from harness.distributed import signals
from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, ConfigError, plural
from harness.runs import console, layout, reader
from harness.runs.locks import Lock
from harness.runs.run_dir import cannot_write
from harness.tools.report.reproduce import trial_command
from harness.tools.sweep import process, results, spec
from harness.tools.sweep.plan import Plan, make
from harness.tools.sweep.slots import Machine

if TYPE_CHECKING:
    from harness.tools.sweep.study import SweepTrial

log = logging.getLogger("harness")

_WAIT_S = 120.0  # for trials of a killed sweep to exit with a checkpoint


def main(path: str, overrides: Sequence[str], dry_run: bool, retry_failed: bool = False) -> int:
    """Run or resume the sweep of ``path``.

    Returns 0 if every trial finished, 70 if some failed, 75 if the sweep was stopped. Raises ConfigError with all
    problems before anything is started.
    """
    console.to_terminal(0)
    plan = make(spec.load(path, overrides), Machine.this(os.environ.get("CUDA_VISIBLE_DEVICES")))
    for note in plan.notes:
        log.warning("comparability: %s", note)
    if dry_run:
        print(*_commands(plan), sep="\n")
        return EXIT_DONE
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("a sweep needs Optuna, which is not installed", hint="pip install 'apex-harness[sweep]'")
    folder = plan.file.spec.folder
    if (folder / layout.CONFIG).exists():
        raise ConfigError(
            "this is the folder of a run", where=str(folder), hint="give the sweep another name: name=NAME"
        )
    with _locked(folder) as lock, signals.counted() as requests:
        return _run(plan, lock, requests, retry_failed)


def _run(plan: Plan, lock: list[int], requests: signals.Requests, retry_failed: bool) -> int:
    """Run the trials that are left, print the results, and return the exit code."""
    # Imported here because they need Optuna.
    from harness.tools.sweep.runner import Runner
    from harness.tools.sweep.study import Study, storage_must_work

    folder = plan.file.spec.folder
    with storage_must_work(folder):
        study = Study(plan, folder)
        if study.resumed:
            log.info("resuming %s: %s", folder, results.counts(study.trials(), plan.total))
        if retry_failed and (count := study.retry_failed()):
            log.info("retrying failed trials: %d", count)
        runner = Runner(plan, study, os.environ, lock, requests)
        requests.obeyed = True
        done = runner.run()
    trials = results.ranked(runner.trials, plan.direction)
    print(*results.table(trials, plan, shutil.get_terminal_size((160, 24)).columns), sep="\n")
    print(*_best(plan, trials), sep="\n")
    if failed := sum(trial.state == "failed" for trial in trials):
        print(f"{failed} of {len(trials)} trials failed; to retry them, add --retry-failed to the same command")
    print(f"sweep folder: {folder}\nnext: harness report {shlex.quote(str(folder))}")
    if not done:
        log.info("stopped; run the same command to resume")
        return EXIT_STOPPED
    return EXIT_FAILURE if failed else EXIT_DONE


def _best(plan: Plan, trials: Sequence[SweepTrial]) -> Iterator[str]:
    """Yield the means over seeds if there are several, the best trial, and the command that trains it again."""
    groups = results.over_seeds(trials, plan.direction)
    if not groups:
        return
    sweep, several = plan.file.spec, len(plan.file.spec.seeds) > 1
    for group in groups if several else ():
        spread = "" if group.deviation is None else f" ± {group.deviation:.2g} (standard deviation)"
        words = " ".join(typed(group.settings))
        yield f"over {len(group.trials)} of {len(sweep.seeds)} seeds: {plan.metric} {group.mean:.5g}{spread}  {words}"
    best = groups[0].trials[0]
    which = ""
    if several:
        mean = f"{groups[0].mean:.5g} over {plural(len(groups[0].trials), 'seed')}"
        which = f", the best seed of the settings with the best mean, {mean}"
    yield f"best: trial {results.run_name(best.number)}, {plan.metric} {best.value:.5g}{which}"
    same = [group for group in groups[1:] if (group.mean, len(group.trials)) == (groups[0].mean, len(groups[0].trials))]
    if same:
        yield f"  as good: {', '.join(results.run_name(group.trials[0].number) for group in same)}"
    yield f"  {trial_command(sweep.folder, sweep.name, results.run_folder(sweep.folder, best.number))}"
    if why := _learned_nothing(plan, [trial for trial in trials if trial.state == "finished"]):
        yield f"warning: no trial seems to have learned anything: {why}; try other values, or longer training"


def _learned_nothing(plan: Plan, finished: Sequence[SweepTrial]) -> str:
    """Return what suggests that none of the ``finished`` trials has learned anything; empty if nothing does."""
    if len(finished) < 2:
        return ""
    runs = [reader.read(results.run_folder(plan.file.spec.folder, trial.number)) for trial in finished]
    if all(map(_gives_one_class, runs)):
        return "each gives all rows the same class"
    perfect = 1 if plan.direction == "maximize" else 0
    value = finished[0].value
    same = value != perfect and all(trial.value == value for trial in finished)
    if same and all(_stays(run, plan.metric) for run in runs):
        return f"all of them have the same {plan.metric}, in all evaluations"
    return ""


def _stays(run: reader.Record, metric: str) -> bool:
    """Return True if several evaluations have the same value."""
    values = [row.get(metric) for row in run.metrics().to_pylist() if row["split"] == "eval"]
    return len(values) > 1 == len(set(values))


def _gives_one_class(run: reader.Record) -> bool:
    shares = reader.section(reader.section(run.summary, "evaluation"), "class_accuracy").values()
    known = [share for share in shares if isinstance(share, int | float)]  # of the classes with rows
    return len(known) > 1 and sum(known) == max(known) == 1


def _commands(plan: Plan) -> Iterator[str]:
    """Yield the output of a dry run: the command of every trial."""
    sweep = plan.file.spec
    best = "highest" if plan.direction == "maximize" else "lowest"
    yield (
        f"# {plural(plan.total, 'trial')} in {sweep.folder}, at most {sweep.parallel} at once, ranked by {best} "
        f"{plan.metric}"
    )
    if sweep.is_search:
        yield f"# drawn by Optuna (sampler {sweep.sampler}, pruner {sweep.pruner}); examples at the ends of the space:"
    for number, trial in enumerate(plan.trials):
        folder = results.run_folder(sweep.folder, number)
        words = process.launch_words(plan.file.base, plan.words(trial.settings), folder)
        yield shlex.join(["harness", *words])


@contextmanager
def _locked(folder: Path) -> Iterator[list[int]]:
    """Make ``folder``, lock it, and yield the lock's file descriptors.

    Trials inherit them, so the lock of a killed sweep is held until its last trial has exited. Raises ConfigError while
    another sweep runs in the folder, or if it cannot be written.
    """
    lock = Lock(folder, is_folder=True)
    try:
        try:
            (folder / layout.TRIALS).mkdir(parents=True, exist_ok=True)
            _acquire(lock, folder)
        except OSError as error:
            raise cannot_write(Path(error.filename or folder), error) from None
        yield lock.descriptors
    finally:
        lock.release()


def _acquire(lock: Lock, folder: Path) -> None:
    path, deadline, reported = folder / layout.SWEEP_LOCK, time.monotonic() + _WAIT_S, False
    while not lock.try_acquire():
        holder = path.read_text().strip() if path.exists() else ""
        if holder.isdigit() and Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
            raise ConfigError(
                "another harness sweep is running in this folder" + (f" (process {holder})" if holder else ""),
                where=str(folder),
                hint="wait for it, or give this sweep another name: name=NAME",
            )
        if not reported:
            log.info("waiting for the trials of a killed sweep to exit with a checkpoint")
        reported = True
        time.sleep(0.2)
    path.write_text(str(os.getpid()))
