"""The change to suggest for each cause, and the wording of the findings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from harness.errors import plural
from harness.tools.explain import shares
from harness.tools.explain.facts import RunFacts

_KEPT = 0.1  # share of the time that evaluations and checkpoints may take


@dataclass(frozen=True)
class Change:
    """The settings to change, in words, and as {key: value} where a value is known. ``left``: share of the cause that
    remains after it."""

    advice: str
    settings: dict[str, Any] = field(default_factory=dict)
    left: float = 0.0


def loading(facts: RunFacts, stage: str) -> str:
    part = shares.stages(facts)[stage] / (facts.load["load"] or math.inf)
    per_row = 1e3 * shares.stages(facts)[stage] * facts.world / facts.rows
    return f"takes {part:.0%} of the loading time, {per_row:.1f} ms per row"


def rows(facts: RunFacts) -> str:
    return plural(round(facts.rows_per_pass), "row")


def workers_change(facts: RunFacts) -> Change:
    need = shares.needed_workers(facts)
    return Change(f"Set data.num_workers={need} (now {facts.workers})", {"data.num_workers": need})


def optimizer_change(facts: RunFacts) -> Change:
    if facts.setting("optimizer.args.foreach") is not None:
        return Change("Remove foreach from optimizer.args, so that one kernel updates the weights", {}, 0.5)
    return Change("Update less often, with larger batches (batch.global)", {}, 0.5)


def slow_rank_text(facts: RunFacts) -> str:
    slow = facts.slow_rank
    assert slow is not None
    since = "from the start" if slow.step is None else f"since step {slow.step}"
    why = "which waits for its data" if slow.by_data > 0.5 else "which computes more slowly"
    return f"waits for rank {slow.rank}, {why}, {since}"


def slow_rank_change(facts: RunFacts) -> Change:
    slow = facts.slow_rank
    assert slow is not None
    if slow.by_data > 0.5:
        return Change(f"Check the disk of rank {slow.rank}, or set data.shard=global if its rows are larger",
                      {"data.shard": "global"})  # fmt: skip
    return Change(f"Check what else runs on the machine of rank {slow.rank} (run harness doctor there), or replace it")


def bandwidths(facts: RunFacts) -> str:
    found = facts.exchanged_bytes / (facts.exchange_s or math.inf)
    return f"{found / 1e6:.0f} MB/s, expected {shares.expected_bandwidth(facts) / 1e6:.0f} MB/s"


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
    each, epoch_s = facts.spent["evaluation"] / max(1, facts.evaluations), facts.train_s / facts.epochs
    every = max(2, math.ceil(each / (_KEPT * epoch_s)))
    now = int(facts.setting("train.evaluate_every", 1))
    return Change(f"Set train.evaluate_every={every} (now {now})", {"train.evaluate_every": every}, now / every)


def slow_evaluation_change(facts: RunFacts) -> Change:
    if facts.eval_data_s > 0.5 * facts.spent["evaluation"]:
        more = min(shares.MAX_WORKERS, max(4, 2 * facts.workers))
        return Change(f"Evaluation waits for its data: set data.num_workers={more} (now {facts.workers}), or make the "
                      "validation files smaller", {"data.num_workers": more}, facts.workers / more)  # fmt: skip
    now = int(facts.setting("batch.eval_per_rank", round(facts.rows_per_pass)))
    return Change(f"Set batch.eval_per_rank={4 * now} (now {now})", {"batch.eval_per_rank": 4 * now}, 0.25)


def saving_change(facts: RunFacts) -> Change:
    every = facts.setting("checkpoint.every_steps")
    if not every or facts.setting("checkpoint.async_save"):
        return async_change(facts)
    best = max(2 * int(every), math.ceil(shares.save_s(facts) / (_KEPT * facts.step_s)))
    return Change(f"Set checkpoint.every_steps={best} (now {every})", {"checkpoint.every_steps": best}, every / best)


def async_change(facts: RunFacts) -> Change:
    return Change("Set checkpoint.async_save=true, which writes while training continues",
                  {"checkpoint.async_save": True}, 0.1)  # fmt: skip


def log_text(facts: RunFacts) -> str:
    every = int(facts.setting("train.log_every", 10))
    return "writes a log line every " + ("step" if every == 1 else f"{every} steps")


def log_change(facts: RunFacts) -> Change:
    now = int(facts.setting("train.log_every", 10))
    best = max(10 * now, 50)
    return Change(f"Set train.log_every={best} (now {now})", {"train.log_every": best}, now / best)
