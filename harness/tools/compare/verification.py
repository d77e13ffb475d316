"""``harness verify-resume``: compare an uninterrupted run with the same run killed several times, and find the cause if
they differ."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config import loader
from harness.config.schema import Config
from harness.errors import ConfigError, plural
from harness.runs import layout
from harness.runs.files import is_url
from harness.runs.probe_plan import Kill, ProbePlan
from harness.tools.compare import diagnosis, kill_plan, starts
from harness.tools.compare.exactness import Difference, differences
from harness.tools.compare.first_difference import FirstDifference
from harness.tools.compare.kill_plan import Progress
from harness.tools.compare.starts import Starts

UNINTERRUPTED, KILLED, AGAIN = "uninterrupted", "killed", "uninterrupted-again"


@dataclass(frozen=True)
class VerifyRequest:
    """The arguments of the command."""

    path: str
    overrides: list[str]
    kills: int
    steps: int | None = None
    full: bool = False
    seed: int = 0
    folder: Path | None = None
    nproc: Sequence[int] = ()
    """Ranks per machine; of several numbers, each start takes the next."""


def verify(request: VerifyRequest) -> bool:
    """Run and compare; print what happens. True if the killed run resumed from a checkpoint in the middle, and equals
    the uninterrupted one bit for bit.

    Raises HarnessError if the configuration is wrong, or if a run fails without a kill.
    """
    config = loader.load(request.path, request.overrides)
    sizes = list(request.nproc) or [config.launch.nproc]
    if len({*sizes}) > 1 and (config.parallel.logical_ranks or 0) < config.launch.nnodes * max(sizes):
        raise ConfigError(
            f"a run can resume exactly on another number of ranks only if parallel.logical_ranks is at least "
            f"{config.launch.nnodes * max(sizes)}",
            where="--nproc",
            hint=f"add parallel.logical_ranks={config.launch.nnodes * max(sizes)}, or give one number",
        )
    folder = _folder(request.folder)
    same = False
    try:
        same = _verify(request, config, sizes, folder)
    finally:
        if same and request.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _print(f"the runs are in {folder / 'runs'}, their output in {folder / 'output.txt'}")
    return same


def _folder(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="verify-resume-"))
    if wanted.exists() and any(wanted.iterdir()):
        raise ConfigError("the folder is not empty", where=str(wanted), hint="choose a new one with --folder")
    wanted.mkdir(parents=True, exist_ok=True)
    return wanted.resolve()


def _verify(request: VerifyRequest, config: Config, sizes: Sequence[int], folder: Path) -> bool:
    """``sizes``: ranks per machine, of the uninterrupted run and then of the others in turn."""
    nnodes = config.launch.nnodes
    ranks = plural(nnodes * sizes[0], "rank")
    if len(sizes) > 1:
        ranks = f"{', '.join(str(nnodes * size) for size in sizes)} ranks in turn"
    _print(f"{request.path} on {ranks}, engine {config.launch.engine}: one uninterrupted run, then the same run killed "
         f"{plural(request.kills, 'time')} (seed {request.seed})")  # fmt: skip
    length = starts.examine(request.path, request.overrides, nnodes * sizes[0])
    changes = {} if request.full else starts.shortened(config, request.overrides, length, request.steps)
    for key, (was, now) in changes.items():
        _print(f"  changed for the test: {key} {was} -> {now}")
    if not request.full and "train.max_steps" in changes and int(changes["train.max_steps"][1]) < length.per_epoch:
        _print(
            f"  an epoch has {length.per_epoch} steps, so the run does not reach the end of an epoch; --steps N "
            "trains longer"
        )
    words = [*request.overrides, *(f"{key}={now}" for key, (_, now) in changes.items())]
    runs = Starts(request.path, words, folder, config)
    first = runs.finish(UNINTERRUPTED)
    done = Progress(runs.folder_of(UNINTERRUPTED))
    runs.limit(first.wall_s)
    _print(f"uninterrupted: {done}, in {first.wall_s:.1f} s")
    startup_s = max(0.0, first.wall_s - done.wall_s)  # including the exit
    _print(f"about {_minutes((request.kills + 1) * startup_s + 1.5 * done.wall_s)} remaining")
    chance = random.Random(request.seed)
    kills = kill_plan.choose(done, request.kills, nnodes * max(sizes), startup_s, is_url(config.output), chance)
    num_kills, resumed = _killed(runs, kills, [nnodes * size for size in sizes], nnodes)
    found = differences(runs.folder_of(UNINTERRUPTED), runs.folder_of(KILLED))
    if not found:
        if why := _why_not_tested(num_kills, resumed, done):
            _print(f"not tested: {why}")
            return False
        compared = (
            f"{plural(len(done.checkpoints), 'checkpoint')}, {plural(done.lines, 'log line')}, summary, best weights"
        )
        compared += ", predictions" if done.predicts else ""
        times = f"{plural(num_kills, 'time')}"
        if len(sizes) > 1:
            times += f" and continued on other numbers of ranks ({', '.join(map(str, sizes))})"
        _print(f"exact: killed {times}, the run equals the uninterrupted one bit for bit ({compared})")
        return True
    _report(runs, found, done)
    return False


def _killed(runs: Starts, kills: list[Kill], world_sizes: Sequence[int], nnodes: int) -> tuple[int, set[int]]:
    """Kill the run at each moment, then let it finish; return (the number of kills that happened, the steps at which
    it resumed). ``world_sizes``: of the uninterrupted run, and then of the starts in turn."""
    happened, following = 0, itertools.cycle([*world_sizes[1:], world_sizes[0]])
    for number, kill in enumerate(kills, 1):
        world_size = next(following)
        kill = replace(kill, rank=kill.rank % world_size)
        mark = runs.folder / f"mark-{number}.json"
        ended = runs.start(KILLED, ProbePlan(str(mark), kill), f"launch.nproc={world_size // nnodes}")
        if not mark.exists():
            if ended.code:
                raise starts.failed(KILLED, ended, runs.log)
            _print(f"kill {number} of {len(kills)}: the run ended before it (planned: {kill_plan.planned(kill)})")
            return happened, _resumes(runs)
        happened += 1
        content = json.loads(mark.read_text(encoding="utf-8"))
        newest = _newest(runs.folder_of(KILLED))
        on = f" (on {plural(world_size, 'rank')})" if len(world_sizes) > 1 else ""
        _print(f"kill {number} of {len(kills)}: {kill_plan.described(kill, content, world_size)}{on}; {newest}")
    last = runs.finish(KILLED, None, f"launch.nproc={next(following) // nnodes}")
    _print(f"finished after {plural(happened, 'kill')}, in {last.wall_s:.1f} s")
    return happened, _resumes(runs)


def resumes(starts: object) -> set[int]:
    """Return the steps of the checkpoints that a run resumed from, according to ``starts``, its provenance."""
    lengths = [start.get("length") for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    return {length["step"] for length in lengths if length and length["step"]}


def _resumes(runs: Starts) -> set[int]:
    try:
        return resumes(json.loads((runs.folder_of(KILLED) / layout.PROVENANCE).read_text(encoding="utf-8")))
    except OSError:
        return set()


def _why_not_tested(num_kills: int, resumed: set[int], done: Progress) -> str:
    """Return why equal runs prove nothing: no start restored a checkpoint and trained on from it. Empty if one did."""
    if not num_kills:
        return "the run ended before the first kill; train longer with --steps N"
    if any(step < done.last for step in resumed):
        return ""
    if done.checkpoints[:1] == [done.last]:
        return "the run has no checkpoint before its last step; set checkpoint.every to fewer steps"
    return "no start resumed from a checkpoint before the last step; add kills with --kills N, or try another --seed"


def _newest(folder: Path) -> str:
    try:
        name = (folder / layout.CHECKPOINTS / layout.LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return "no checkpoint yet"
    return f"newest checkpoint: {name}"


def _report(runs: Starts, found: list[Difference], done: Progress) -> None:
    """Print where the runs first differ, and look for the cause."""
    first = FirstDifference(found, done.checkpoints)
    _print("not exact: the killed run differs from the uninterrupted one")
    for line in first.lines():
        _print(f"  {line}")
    _print("training a second uninterrupted run, to find out whether runs also differ without a kill")
    runs.finish(AGAIN)
    again = differences(runs.folder_of(UNINTERRUPTED), runs.folder_of(AGAIN))
    if again:
        _print("two uninterrupted runs differ, so the training is not deterministic; the resume is not the cause")
        first = FirstDifference(again, done.checkpoints)
        for line in first.lines():
            _print(f"  {line}")
        causes = diagnosis.of_chance(runs, first)
    else:
        _print("two uninterrupted runs are equal, so a kill loses state that no checkpoint holds")
        causes = diagnosis.of_loss(runs, first, done)
    if not causes:
        _print("no cause was found in your code")
    for cause in causes:
        _print(f"  {cause}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _print(text: str) -> None:
    print(text, flush=True)
