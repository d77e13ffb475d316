"""The share of a run's time that each cause takes, from the facts of the run: 0 where a cause does not apply."""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.tools.explain.facts import RunFacts, checkpoint_bytes

MAX_WORKERS = 16  # per rank, for data that is waited for rather than computed
_SLOW_DISK = 50e6  # bytes per second, below which a checkpoint's store is slow


def stages(facts: RunFacts) -> dict[str, float]:
    """Seconds of loading by stage."""
    known = {name: facts.load[name] for name in ("read", "decode", "transform")}
    return {**known, "collate": max(0.0, facts.load["load"] - sum(known.values()))}


def needed_workers(facts: RunFacts) -> int | None:
    """Workers that would deliver as fast as a rank trains; None if there are too few cores for them, or too many."""
    need = math.ceil(facts.load["load"] / facts.steps / facts.step_s)
    need_cores = facts.load["cpu"] / facts.steps / facts.step_s
    free = facts.cores / facts.local_ranks - facts.threads  # other programs are a cause of their own
    return need if facts.workers < need <= MAX_WORKERS and need_cores <= max(free, 0) else None


def data(stage: str) -> Callable[[RunFacts], float]:
    def share(facts: RunFacts) -> float:
        load = stages(facts)
        mine = stage == max(load, key=lambda name: load[name]) and needed_workers(facts) is None
        return waiting(facts) if mine else 0.0

    return share


def waiting(facts: RunFacts) -> float:
    """Share of the time that training waits for data, apart from what the loaders lose to a lack of cores, and from
    what only one rank waits."""
    return max(0.0, facts.spent["data"] - facts.late_data_s) / facts.total_s * (1 - starved_load(facts))


def starved_load(facts: RunFacts) -> float:
    return min(1.0, facts.load["load_starved"] / (facts.load["load"] or math.inf))


def spare_workers(facts: RunFacts) -> int:
    return max(1, facts.cores // facts.local_ranks - facts.threads)


def full(facts: RunFacts) -> bool:
    """True if the machine has no idle core."""
    return facts.own + facts.others > 0.85 * facts.cores


def without_core(facts: RunFacts) -> float:
    """Share of the time lost to a lack of cores: by the training thread, or by workers that it waits for."""
    return facts.starved + facts.share("data") * starved_load(facts)


def other_load(facts: RunFacts) -> float:
    """The part of the lost time that other programs cause."""
    heavy = facts.others > 0.25 * facts.cores and full(facts)
    return without_core(facts) * facts.others / (facts.own + facts.others) if heavy else 0.0


def too_many_threads(facts: RunFacts) -> float:
    if facts.threads * facts.local_ranks <= facts.cores:
        return 0.0
    waiting = facts.threads_starved / (facts.threads_starved + facts.own / facts.local_ranks or math.inf)
    return facts.share("forward", "backward", "optimizer") * waiting


def too_many_workers(facts: RunFacts) -> float:
    many = facts.workers * facts.local_ranks > 2 * facts.cores
    return without_core(facts) - other_load(facts) if many else 0.0


def slow_rank(facts: RunFacts) -> float:
    if facts.slow_rank is None:
        return 0.0
    lead = facts.slow_rank.share * facts.train_s / facts.total_s
    return lead * (1 - facts.starved)  # a rank is also late while it waits for a core


def exchanging(slow: bool) -> Callable[[RunFacts], float]:
    def share(facts: RunFacts) -> float:
        mine = facts.exchange_s * facts.steps / facts.total_s if facts.world > 1 else 0.0
        return mine if mine > 0.25 and slow == slow_link(facts) else 0.0  # telling them apart takes a measurement

    return share


def expected_exchange_s(facts: RunFacts) -> float:
    """Seconds per step at the speed of a good link, with a millisecond for the start of each exchange."""
    return 1e-3 + facts.exchanged_bytes / expected_bandwidth(facts)


def expected_bandwidth(facts: RunFacts) -> float:
    """Bytes per second: of this machine's memory between its processes, or of 10 Gbit/s between machines. A reduction
    through gloo reaches about a quarter of a plain stream."""
    return facts.measure("loopback") / 4 if facts.local_ranks == facts.world else 1.25e9


def slow_link(facts: RunFacts) -> bool:
    return facts.exchange_s > 8 * expected_exchange_s(facts)


def launching(facts: RunFacts) -> float:
    """Share of the time in which the host starts operations that take less time than that."""
    compute = facts.share("forward", "backward", "optimizer")
    if not facts.operations or compute < 0.4:  # the measurement below takes seconds
        return 0.0
    per_step = facts.operations * int(facts.setting("batch.accumulate", 1)) * facts.measure("launch_s")
    on_a_core = compute * facts.total_s * (1 - facts.starved)
    return compute * min(1.0, per_step * facts.steps / (on_a_core or math.inf))


def small(facts: RunFacts) -> str:
    """Why operations are small: "micro-batches", "batch" or "model"."""
    if int(facts.setting("batch.accumulate", 1)) > 1 and facts.rows_per_pass <= 16:
        return "micro-batches"
    return "batch" if facts.rows_per_pass <= 16 else "model"


def host(kind: str) -> Callable[[RunFacts], float]:
    return lambda facts: launching(facts) if small(facts) == kind else 0.0


def evaluation(slow: bool) -> Callable[[RunFacts], float]:
    def share(facts: RunFacts) -> float:
        train_row_s = facts.train_s * 1.0 / facts.rows
        return facts.share("evaluation") if slow == (facts.eval_row_s > 2 * train_row_s) else 0.0

    return share


def saving(slow: bool) -> Callable[[RunFacts], float]:
    def share(facts: RunFacts) -> float:
        speed = checkpoint_bytes(facts.path) / (save_s(facts) or math.inf)
        is_slow = save_s(facts) > 0.25 and speed < _SLOW_DISK
        return facts.share("checkpoint", "between") if slow == is_slow else 0.0

    return share


def num_saves(facts: RunFacts) -> int:
    every = facts.setting("checkpoint.every_steps")
    return facts.epochs + (facts.steps // int(every) if every else 0)


def save_s(facts: RunFacts) -> float:
    """Seconds of a checkpoint."""
    return (facts.spent["checkpoint"] + facts.spent["between"]) / num_saves(facts)
