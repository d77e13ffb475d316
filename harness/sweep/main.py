"""``harness sweep``: from the sweep file to the final table, and on again after whatever ended it."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.distributed import signals
from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, ConfigError
from harness.report.reproduce import trial_again
from harness.runs import layout
from harness.runs.run_dir import cannot_write
from harness.sweep import file as sweep_file
from harness.sweep import results, table
from harness.sweep.board import Board
from harness.sweep.plan import Plan, make
from harness.sweep.process import command
from harness.sweep.progress import Progress, Reader
from harness.sweep.slots import Machine
from harness.sweep.space import typed
from harness.training import console

if TYPE_CHECKING:
    from harness.sweep.runner import Runner
    from harness.sweep.study import Trial

log = logging.getLogger("harness")

_LEFTOVERS_S = 120.0  # for trials of a sweep that was killed, to end with a checkpoint


def main(
    path: str,
    overrides: Sequence[str],
    engine: str | None,
    parallel: int | None,
    dry_run: bool,
    retry_failed: bool = False,
) -> int:
    """Run the sweep of ``path``, or go on with it; returns 0 if every trial ended by itself, 70 if some failed, 75 if
    it was stopped. Raises ConfigError for all that is wrong before anything is started."""
    console.to_terminal(0)
    file = sweep_file.load(path, overrides)
    plan = make(file, engine, parallel, Machine.this(os.environ.get("CUDA_VISIBLE_DEVICES")))
    for note in plan.notes:
        log.warning("not quite comparable: %s\n  -> %s", note.message, note.hint)
    if dry_run:
        print(*_rendered(plan), sep="\n")
        return EXIT_DONE
    _require_optuna()
    folder = file.sweep.folder
    try:
        (folder / layout.TRIALS).mkdir(parents=True, exist_ok=True)
        with _alone(folder) as lock, signals.counted() as stops:
            return _run(plan, lock, stops, retry_failed)
    except OSError as error:
        raise cannot_write(Path(error.filename or folder), error) from None


def _run(plan: Plan, lock: int, stops: Callable[[], int], retry_failed: bool) -> int:
    from harness.sweep.runner import Runner
    from harness.sweep.study import Study, storage_must_work

    folder = plan.file.sweep.folder
    with storage_must_work(folder):
        study = Study(plan, folder)
        if study.begun:
            log.info("going on with %s: %s", folder, table.counts(study.trials(), plan.total))
        if others := study.others():
            log.info("%d earlier trials are not of this space: they are left as they are, and out of the table", others)
        if retry_failed and (again := study.retry_failed()):
            log.info("%d failed trials are tried again", again)
        runner = Runner(plan, study, Board(plan), os.environ, lock, stops)
        done = runner.run()
    _conclude(plan, runner)
    if not done:
        log.info("stopped; the same command goes on where it was")
        return EXIT_STOPPED
    return EXIT_FAILURE if any(trial.state == "failed" for trial in runner.trials) else EXIT_DONE


def _conclude(plan: Plan, runner: Runner) -> None:
    """The final table, the best trial, and how to have it again."""
    trials = results.ranked(runner.trials, plan.direction)
    width = shutil.get_terminal_size((160, 24)).columns
    print(*table.lines(trials, plan, _how_far(plan, trials), width), sep="\n")
    print(*_best(plan, trials), sep="\n")
    failed = [trial for trial in trials if trial.state == "failed"]
    if failed:
        print(f"{len(failed)} of {len(trials)} trials failed; to try them again: the same command with --retry-failed")
    print(f"sweep folder: {plan.file.sweep.folder}")


def _best(plan: Plan, trials: Sequence[Trial]) -> Iterator[str]:
    """Which settings are the best, and what to type to train with them; over seeds, where there are several."""
    groups = results.over_seeds(trials, plan.direction)
    if not groups:
        return
    several = len(plan.file.sweep.seeds) > 1
    for group in groups if several else ():
        spread = "" if group.deviation is None else f" ± {group.deviation:.2g}"
        words = " ".join(typed(group.settings))
        yield f"over {len(group.trials)} seeds: {plan.metric} {group.mean:.5g}{spread}  {words}"
    best = groups[0].trials[0]
    whole = f", of those with the best mean {groups[0].mean:.5g}" if several else ""
    yield f"best: trial {results.run_name(best.number)}, {plan.metric} {best.value:.5g}{whole}"
    sweep = plan.file.sweep
    yield f"  {trial_again(sweep.folder, sweep.name, results.run_folder(sweep.folder, best.number))}"


def _how_far(plan: Plan, trials: Sequence[Trial]) -> dict[int, Progress]:
    found = {}
    for trial in trials:
        reader = Reader(results.run_folder(plan.file.sweep.folder, trial.number), plan.metric)
        reader.read()
        found[trial.number] = reader.progress
    return found


def _rendered(plan: Plan) -> Iterator[str]:
    """What a dry run prints: every trial's command."""
    sweep = plan.file.sweep
    judged = f"{plan.metric} ({'highest' if plan.direction == 'maximize' else 'lowest'} is best)"
    yield f"# {plan.total} trials into {sweep.folder}, at most {plan.parallel} at once, judged by {judged}"
    if sweep.is_search:
        yield f"# drawn by Optuna ({sweep.sampler}, pruner {sweep.pruner}); the ends of the space are, for example:"
    for number, trial in enumerate(plan.trials):
        settings, output = plan.words(trial.settings), sweep.folder / layout.TRIALS
        words = command(plan.file.base, settings, results.run_name(number), output)
        yield shlex.join(["harness", *words[3:]])


def _require_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a sweep keeps its state with Optuna, which is not installed", hint="pip install 'apex-harness[sweep]'"
        ) from None


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """The file descriptor of a lock on ``folder``, which trials hold as well, so that it outlives a killed sweep until
    the last of its trials has ended. Raises ConfigError while another sweep runs here."""
    path = folder / "lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        deadline, told = time.monotonic() + _LEFTOVERS_S, False
        while not _locked(descriptor):
            holder = path.read_text().strip()
            if holder.isdigit() and Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
                raise ConfigError(
                    f"another harness sweep works in it (process {holder})" if holder else "another sweep works in it",
                    where=str(folder),
                    hint="wait for it, or name this one anew: name=NAME",
                )
            if not told:
                log.info("waiting for the trials of a sweep that was killed to end with a checkpoint")
            told = True
            time.sleep(0.2)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
