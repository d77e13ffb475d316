"""The causes that make a run slow, as one table, and the explanation of a run: its main cause, and those after it.

A cause has the share of the run's time that it takes, from which share on it counts, and the setting to change. The
largest one is named. The shares of waiting for data leave out what the loaders lose to a lack of cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.errors import plural
from harness.tools.explain.facts import RunFacts, SlowRank, checkpoint_bytes

MIB = 2**20
_KEPT = 0.1  # share of the time that evaluations and checkpoints may take
MAX_WORKERS = 16  # per rank, for data that is waited for rather than computed
_SLOW_DISK = 50e6  # bytes per second, below which a checkpoint's store is slow


@dataclass(frozen=True)
class Change:
    """The settings to change."""

    advice: str
    settings: dict[str, Any] = field(default_factory=dict)
    """{key: value} where a value is known."""
    left: float = 0.0
    """The share of the cause that remains after it."""


@dataclass(frozen=True)
class SlowCause:
    """A reason why runs are slow: how to measure it, to word it and to mend it."""

    name: str
    limit: float
    """The share from which on it counts."""
    share: Callable[[RunFacts], float]
    """Returns the share of the run's time that it takes; 0 where it does not apply."""
    what: Callable[[RunFacts], str]
    change: Callable[[RunFacts], Change]


# The share of a run's time that each cause takes: 0 where it does not apply


def seconds_by_stage(facts: RunFacts) -> dict[str, float]:
    """Return the seconds of loading by stage."""
    measured = {name: facts.load[name] for name in ("read", "decode", "transform")}
    return {**measured, "collate": max(0.0, facts.load["load"] - sum(measured.values()))}


def needed_workers(facts: RunFacts) -> int | None:
    """Return how many workers would deliver as fast as a rank trains; None if they are too many, or lack cores."""
    need = math.ceil(facts.load["load"] / facts.steps / facts.step_s)
    need_cores = facts.load["cpu"] / facts.steps / facts.step_s
    free = facts.cores / facts.local_ranks - facts.threads  # other programs are a cause of their own
    return need if facts.workers < need <= MAX_WORKERS and need_cores <= max(free, 0) else None


def share_of_stage(facts: RunFacts, stage: str) -> float:
    """Return ``share_of_waiting`` if ``stage`` is the longest of loading and more workers would not help; else 0."""
    load = seconds_by_stage(facts)
    is_longest = stage == max(load, key=lambda name: load[name])
    return share_of_waiting(facts) if is_longest and needed_workers(facts) is None else 0.0


def share_of_waiting(facts: RunFacts) -> float:
    """Return the share of the run's time that training waits for data, apart from what the loaders lose to a lack of
    cores, and from what only one rank waits."""
    return max(0.0, facts.spent["data"] - facts.late_data_s) / facts.total_s * (1 - starved_share_of_loading(facts))


def starved_share_of_loading(facts: RunFacts) -> float:
    """Return the share of the seconds of loading in which the loaders waited for a core."""
    return min(1.0, facts.load["load_starved"] / (facts.load["load"] or math.inf))


def share_without_core(facts: RunFacts) -> float:
    """Return the share of the run's time lost to a lack of cores, by the training thread or by workers that it waits
    for."""
    return facts.starved + facts.share("data") * starved_share_of_loading(facts)


def share_of_other_load(facts: RunFacts) -> float:
    """Return the share of the run's time lost to a lack of cores that other programs cause."""
    busy = facts.own + facts.others
    heavy = facts.others > 0.25 * facts.cores and busy > 0.85 * facts.cores
    return share_without_core(facts) * facts.others / busy if heavy else 0.0


def share_of_too_many_threads(facts: RunFacts) -> float:
    """Return the share of the run's time in which the model's threads, if more than the cores, wait for a core."""
    if facts.threads * facts.local_ranks <= facts.cores:
        return 0.0
    waiting = facts.threads_starved / (facts.threads_starved + facts.own / facts.local_ranks or math.inf)
    return facts.share("forward", "backward", "optimizer") * waiting


def share_of_too_many_workers(facts: RunFacts) -> float:
    """Return the share of the run's time lost to a lack of cores if the workers, not other programs, are too many."""
    many = facts.workers * facts.local_ranks > 2 * facts.cores
    return share_without_core(facts) - share_of_other_load(facts) if many else 0.0


def share_of_slow_rank(facts: RunFacts) -> float:
    """Return the share of the run's time in which the others wait for the slowest rank."""
    lead = slowest(facts).share * facts.train_s / facts.total_s
    return lead * (1 - facts.starved)  # a rank is also late while it waits for a core


def slowest(facts: RunFacts) -> SlowRank:
    """Return the rank that the others wait for; if there are none, one that costs nothing."""
    return facts.slow_rank or SlowRank(0, 0.0, None, 0.0)


def share_of_exchange(facts: RunFacts, slow: bool) -> float:
    """Return the share of the run's time spent exchanging gradients, if the link is, or is not, ``slow``; else 0."""
    share = facts.exchange_s * facts.steps / facts.total_s if facts.world > 1 else 0.0
    return share if share > 0.25 and slow == slow_link(facts) else 0.0  # telling them apart takes a measurement


def expected_exchange_s(facts: RunFacts) -> float:
    """Return the seconds per step at the speed of a good link, with a millisecond for the start of each exchange."""
    return 1e-3 + facts.exchanged_bytes / expected_bandwidth(facts)


def expected_bandwidth(facts: RunFacts) -> float:
    """Return bytes per second: of this machine's memory between its processes, or of 10 Gbit/s between machines. A
    reduction through gloo reaches about a quarter of a plain stream."""
    return facts.measure("loopback") / 4 if facts.local_ranks == facts.world else 1.25e9


def slow_link(facts: RunFacts) -> bool:
    return facts.exchange_s > 8 * expected_exchange_s(facts)


def share_of_launching(facts: RunFacts) -> float:
    """Return the share of the run's time in which the host starts the work of layers that take less time than that. It
    is at least so large: functions that are no modules are not counted."""
    compute = facts.share("forward", "backward", "optimizer")
    if not facts.layers or compute < 0.4:  # the measurement below takes seconds
        return 0.0
    per_step = facts.layers * int(facts.setting("batch.accumulate", 1)) * facts.measure("launch_s")
    on_a_core = compute * facts.total_s * (1 - facts.starved)
    return compute * min(1.0, per_step * facts.steps / (on_a_core or math.inf))


def why_layers_are_small(facts: RunFacts) -> str:
    """Return why layers take little time: "micro-batches", "batch" or "model"."""
    if int(facts.setting("batch.accumulate", 1)) > 1 and facts.rows_per_pass <= 16:
        return "micro-batches"
    return "batch" if facts.rows_per_pass <= 16 else "model"


def share_of_launching_for(facts: RunFacts, kind: str) -> float:
    """Return ``share_of_launching`` if the layers are small because of ``kind``; else 0."""
    return share_of_launching(facts) if why_layers_are_small(facts) == kind else 0.0


def share_of_evaluation(facts: RunFacts, slow: bool) -> float:
    """Return the share of the run's time spent evaluating, if the rows are, or are not, ``slow``; else 0."""
    is_slow = facts.eval_row_s > 2 * facts.train_s / facts.rows
    return facts.share("evaluation") if slow == is_slow else 0.0


def share_of_saving(facts: RunFacts, slow: bool) -> float:
    """Return the share of the run's time spent on checkpoints, if the disk is, or is not, ``slow``; else 0."""
    speed = checkpoint_bytes(facts.path) / (save_s(facts) or math.inf)
    is_slow = save_s(facts) > 0.25 and speed < _SLOW_DISK
    return facts.share("checkpoint", "between") if slow == is_slow else 0.0


def num_saves(facts: RunFacts) -> int:
    every = facts.setting("checkpoint.every") and facts.steps_of("checkpoint.every", None, "steps")
    return facts.epochs + (facts.steps // every if every else 0)


def save_s(facts: RunFacts) -> float:
    """Return the seconds of a checkpoint, on average."""
    return (facts.spent["checkpoint"] + facts.spent["between"]) / num_saves(facts)


# What to change, and the wording


def stage_text(facts: RunFacts, stage: str) -> str:
    """Return what ``stage`` takes, as its share of the seconds of loading and in milliseconds per row."""
    part = seconds_by_stage(facts)[stage] / (facts.load["load"] or math.inf)
    per_row = 1e3 * seconds_by_stage(facts)[stage] * facts.world / facts.rows
    return f"takes {part:.0%} of the loading time, {per_row:.1f} ms per row"


def rows_of_a_pass(facts: RunFacts) -> str:
    """Return the number of rows of one pass through the model."""
    return plural(round(facts.rows_per_pass), "row")


def set_workers(facts: RunFacts, workers: int | None, left: float = 0.0) -> Change:
    return Change(f"Set data.num_workers={workers} (now {facts.workers})", {"data.num_workers": workers}, left)


def files_of(facts: RunFacts) -> str:
    """Return the setting that says where the files of the rows are; empty if the task has none."""
    return " (task.root)" if "task.root" in facts.settings else ""


def decoding_change(facts: RunFacts) -> Change:
    first = next(iter(facts.setting("task.transforms.train", [])), "")
    names = {first} if isinstance(first, str) else {*first}
    scales = facts.setting("task.image_size") or names & {"Resize", "RandomResizedCrop"}
    reduced = ", or set task.decode=reduced" if facts.setting("task.decode") == "full" and scales else ""
    return Change(f"Store smaller images, about twice the size that the model sees{files_of(facts)}{reduced}")


def augmentation_change(facts: RunFacts) -> Change:
    if facts.setting("task.transforms.train"):
        return Change("Remove the most expensive transform of task.transforms.train, or crop before it")
    if facts.setting("task.image_size"):
        return Change("Store the images in the size of task.image_size, to which each is scaled")
    return Change(f"Profile what the dataset of the task does with a row ({facts.setting('task.name')})")


def small_layers_change(facts: RunFacts) -> Change:
    if facts.setting("model.compile"):
        return Change("Use a model with fewer and larger layers", {}, 0.5)
    return Change("Set model.compile=true, which fuses operations", {"model.compile": True}, 0.5)


def optimizer_change(facts: RunFacts) -> Change:
    if facts.setting("optimizer.args.foreach") is not None:
        return Change("Remove foreach from optimizer.args, so that one kernel updates the weights", {}, 0.5)
    return Change("Update less often, with larger batches (batch.global)", {}, 0.5)


def slow_rank_text(facts: RunFacts) -> str:
    slow = slowest(facts)
    since = "from the start" if slow.step is None else f"since step {slow.step}"
    reason = "which waits for its data" if slow.by_data > 0.5 else "which computes more slowly"
    return f"waits for rank {slow.rank}, {reason}, {since}"


def slow_rank_change(facts: RunFacts) -> Change:
    slow = slowest(facts)
    if slow.by_data > 0.5 and facts.setting("data.shard") == "global":
        return Change(f"Check the disk of rank {slow.rank}")
    if slow.by_data > 0.5:
        return Change(f"Check the disk of rank {slow.rank}, or set data.shard=global if its rows are larger",
                      {"data.shard": "global"})  # fmt: skip
    return Change(f"Check what else runs on the machine of rank {slow.rank} (run harness doctor there), or replace it")


def bandwidths(facts: RunFacts) -> str:
    bandwidth = facts.exchanged_bytes / (facts.exchange_s or math.inf)
    return f"{bandwidth / 1e6:.0f} MB/s, expected {expected_bandwidth(facts) / 1e6:.0f} MB/s"


def larger_batch(facts: RunFacts, factor: int) -> tuple[str, Any]:
    key = "batch.global" if facts.setting("batch.global") else "batch.per_rank"
    return key, factor * int(facts.setting(key, 1))


def volume_change(facts: RunFacts) -> Change:
    key, value = larger_batch(facts, 4)
    return Change(f"Set {key}={value} with batch.accumulate={4 * int(facts.setting('batch.accumulate', 1))}, which "
                  "exchanges gradients a quarter as often per row",
                  {key: value, "batch.accumulate": 4 * int(facts.setting("batch.accumulate", 1))}, 0.25)  # fmt: skip


def batch_change(facts: RunFacts) -> Change:
    key, value = larger_batch(facts, 8)
    return Change(f"Set {key}={value}, with optimizer.lr to match", {key: value}, 1 / 8)


def accumulate_change(facts: RunFacts) -> Change:
    now = int(facts.setting("batch.accumulate", 1))
    best = max(1, round(now * facts.rows_per_pass / 64))
    best = next(value for value in range(best, 0, -1) if now % value == 0)
    return Change(f"Set batch.accumulate={best} (now {now})", {"batch.accumulate": best}, best / now)


def evaluate_change(facts: RunFacts) -> Change:
    evaluation_s, epoch_s = facts.spent["evaluation"] / max(1, facts.evaluations), facts.train_s / facts.epochs
    every = max(2, math.ceil(evaluation_s / (_KEPT * epoch_s)))
    now = facts.setting("train.evaluate_every", 1)
    gain = facts.steps_of("train.evaluate_every", 1, "epochs") * facts.epochs / facts.steps / every
    return Change(f"Set train.evaluate_every={every} (now {now})", {"train.evaluate_every": every}, gain)


def slow_evaluation_change(facts: RunFacts) -> Change:
    more = min(MAX_WORKERS, max(4, 2 * facts.workers))
    if facts.eval_data_s > 0.5 * facts.spent["evaluation"] and more > facts.workers:
        return Change(f"Evaluation waits for its data: set data.num_workers={more} (now {facts.workers}), or make the "
                      "validation rows smaller", {"data.num_workers": more}, facts.workers / more)  # fmt: skip
    now = int(facts.setting("batch.eval_per_rank", round(facts.rows_per_pass)))
    return Change(f"Set batch.eval_per_rank={4 * now} (now {now})", {"batch.eval_per_rank": 4 * now}, 0.25)


def saving_change(facts: RunFacts) -> Change:
    if not facts.setting("checkpoint.every"):
        return async_change(facts)
    every = facts.steps_of("checkpoint.every", None, "steps")
    best = max(2 * every, math.ceil(save_s(facts) / (_KEPT * facts.step_s)))
    return Change(f"Set checkpoint.every={best} (now {every})", {"checkpoint.every": best}, every / best)


def async_change(facts: RunFacts) -> Change:
    if facts.setting("checkpoint.async_save"):
        return Change("Write to a faster disk (output)")
    return Change("Set checkpoint.async_save=true, which writes while training continues",
                  {"checkpoint.async_save": True}, 0.1)  # fmt: skip


def log_text(facts: RunFacts) -> str:
    every = facts.steps_of("train.log_every", 10, "steps")
    return "writes a log line every " + ("step" if every == 1 else f"{every} steps")


def log_change(facts: RunFacts) -> Change:
    now = facts.steps_of("train.log_every", 10, "steps")
    best = max(10 * now, 50)
    return Change(f"Set train.log_every={best} (now {now})", {"train.log_every": best}, now / best)


CAUSES = (
    SlowCause(
        "other load", 0.2, share_of_other_load,
        lambda f: f"competes with other programs, which keep {f.others:.1f} of {plural(f.cores, 'core')} busy",
        lambda f: Change("Stop them, or train on another machine"),
    ),
    SlowCause(
        "too many workers", 0.2, share_of_too_many_workers,
        lambda f: f"has more loader processes than cores: {f.workers * f.local_ranks} on {f.cores}",
        lambda f: set_workers(f, max(1, f.cores // f.local_ranks - f.threads), 0.5),
    ),
    SlowCause(
        "too many threads", 0.2, share_of_too_many_threads,
        lambda f: f"has more threads than cores: {f.threads * f.local_ranks} on {f.cores}",
        lambda f: Change(f"Set launch.threads={max(1, f.cores // f.local_ranks)}, or OMP_NUM_THREADS (now {f.threads})",
                         {"launch.threads": max(1, f.cores // f.local_ranks)}),
    ),
    SlowCause(
        "trackers", 0.25, lambda f: f.tracker_s / f.total_s if f.setting("trackers") else 0.0,
        lambda f: f"competes with its trackers ({', '.join(f.setting('trackers', []))}) for the Python interpreter",
        lambda f: Change(f"Set trackers=[] or train.log_every={10 * f.steps_of('train.log_every', 10, 'steps')}",
                         {"trackers": []}, 0.5),
    ),
    SlowCause(
        "too few workers", 0.15, lambda f: share_of_waiting(f) if needed_workers(f) else 0.0,
        lambda f: f"waits for data: {plural(f.workers, 'loader process')} per rank",
        lambda f: set_workers(f, needed_workers(f)),
    ),
    SlowCause(
        "reading", 0.15, lambda f: share_of_stage(f, "read"),
        lambda f: f"waits for data: reading files {stage_text(f, 'read')}",
        lambda f: Change(f"Copy the files to a local disk{files_of(f)}"
                         + (", or pack them into tar archives (docs/data.md)" if files_of(f) else "")),
    ),
    SlowCause(
        "decoding", 0.15, lambda f: share_of_stage(f, "decode"),
        lambda f: f"waits for data: decoding images {stage_text(f, 'decode')}",
        decoding_change,
    ),
    SlowCause(
        "augmentation", 0.15, lambda f: share_of_stage(f, "transform"),
        lambda f: f"waits for data: transforming images {stage_text(f, 'transform')}",
        augmentation_change,
    ),
    SlowCause(
        "dataset code", 0.15, lambda f: share_of_stage(f, "collate"),
        lambda f: f"waits for data: the dataset's batch(), apart from images, {stage_text(f, 'collate')}",
        lambda f: Change(f"Profile batch() of the task's dataset ({f.setting('task.name')})"),
    ),
    SlowCause("slow rank", 0.15, share_of_slow_rank, slow_rank_text, slow_rank_change),
    SlowCause(
        "slow link", 0.25, lambda f: share_of_exchange(f, slow=True),
        lambda f: f"waits for a slow link between the ranks: {bandwidths(f)}",
        lambda f: Change("Set launch.interface to the machines' fastest network interface (see harness doctor)",
                         {}, expected_exchange_s(f) / f.exchange_s),
    ),
    SlowCause(
        "gradient volume", 0.25, lambda f: share_of_exchange(f, slow=False),
        lambda f: f"exchanges {f.gradient_bytes / MIB:.1f} MiB of gradients in each step: {bandwidths(f)}",
        volume_change,
    ),
    SlowCause(
        "tiny batches", 0.25, lambda f: share_of_launching_for(f, "batch"),
        lambda f: f"starts {plural(f.layers, 'layer')} per pass of {rows_of_a_pass(f)}, so the host is the bottleneck",
        batch_change,
    ),
    SlowCause(
        "micro-batches", 0.25, lambda f: share_of_launching_for(f, "micro-batches"),
        lambda f: f"splits its steps into micro-batches of {rows_of_a_pass(f)}, so the host is the bottleneck",
        accumulate_change,
    ),
    SlowCause(
        "small layers", 0.25, lambda f: share_of_launching_for(f, "model"),
        lambda f: f"runs {plural(f.layers, 'small layer')} per pass, so the host is the bottleneck",
        small_layers_change,
    ),
    SlowCause(
        "frequent evaluation", 0.25, lambda f: share_of_evaluation(f, slow=False),
        lambda f: f"evaluates {plural(f.evaluations, 'time')} in {plural(f.epochs, 'epoch')}", evaluate_change,
    ),
    SlowCause(
        "slow evaluation", 0.25, lambda f: share_of_evaluation(f, slow=True),
        lambda f: f"needs {1e3 * f.eval_row_s:.1f} ms per validation row, but only {1e3 * f.train_s / f.rows:.1f} "
                  "ms per training row",
        slow_evaluation_change,
    ),
    SlowCause(
        "frequent checkpoints", 0.15, lambda f: share_of_saving(f, slow=False),
        lambda f: f"writes {plural(num_saves(f), 'checkpoint')} in {plural(f.steps, 'step')}",
        saving_change,
    ),
    SlowCause(
        "slow checkpoints", 0.15, lambda f: share_of_saving(f, slow=True),
        lambda f: f"waits {save_s(f):.1f} s for each checkpoint of {checkpoint_bytes(f.path) / MIB:.1f} MiB",
        async_change,
    ),
    SlowCause(
        "log lines", 0.15, lambda f: f.share("log"),
        log_text, log_change,
    ),
    SlowCause(
        "optimizer", 0.4, lambda f: f.share("optimizer"),
        lambda f: f"updates {f.gradient_bytes / MIB:.0f} MiB of weights in each step",
        optimizer_change,
    ),
    SlowCause(
        "loop", 0.3, lambda f: f.share("host"), lambda f: "spends its time between the steps, in Python",
        lambda f: Change("Make the steps larger (batch.global)", {}, 0.5),
    ),
)  # fmt: skip


# The explanation of a run


@dataclass(frozen=True)
class Explanation:
    """The main cause of a slow run, and what to change."""

    cause: str | None
    """The name of one of CAUSES; None if the run is not slow."""
    share: float
    gain: float
    """How many times as fast the run can be."""
    text: str
    settings: dict[str, Any]
    facts: RunFacts = field(repr=False)
    then: tuple[Explanation, ...] = ()
    """The other causes that count, the largest first."""

    def as_json(self) -> dict[str, Any]:
        run_facts = {name: value for name, value in asdict(self.facts).items() if name not in ("settings", "measure")}
        shares = {name: self.facts.share(name) for name in self.facts.spent}
        return {"run": str(self.facts.path), **self._answer(), "then": [each._answer() for each in self.then],
                "shares": shares, "facts": {**run_facts, "path": str(self.facts.path)}}  # fmt: skip

    def _answer(self) -> dict[str, Any]:
        return {"cause": self.cause, "share": self.share, "gain": self.gain, "text": self.text, "set": self.settings}


def explain(facts: RunFacts) -> Explanation:
    """Return the explanation of a run by its main cause, with the others that count."""
    shares = [(min(cause.share(facts), 1.0), cause) for cause in CAUSES]
    shares = sorted(((share, cause) for share, cause in shares if share >= cause.limit), key=lambda pair: -pair[0])
    if not shares:
        return Explanation(None, 0.0, 1.0, _not_slow(facts), {}, facts)
    first, *rest = (_explained(cause, share, facts) for share, cause in shares)
    return Explanation(first.cause, first.share, first.gain, first.text, first.settings, facts, tuple(rest))


def _explained(cause: SlowCause, share: float, facts: RunFacts) -> Explanation:
    change = cause.change(facts)
    gain = 1 / max(1 - share * (1 - change.left), 0.01)
    faster = f"about {gain:.1f} times as fast" if gain < 10 else "more than 10 times as fast"
    text = f"{facts.path} {cause.what(facts)} ({share:.0%} of the run's time). {change.advice}. Expected: {faster}."
    return Explanation(cause.name, share, gain, text, change.settings, facts)


def _not_slow(facts: RunFacts) -> str:
    shares = {name: facts.share(name) for name in ("forward", "backward", "optimizer")}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"{facts.path} is not slow: the model takes {sum(shares.values()):.0%} of its time ({parts})."
