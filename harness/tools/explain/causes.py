"""The causes that make a run slow, as one table.

A cause has the share of the run's time that it takes, from which share on it counts, and the setting to change. The
largest one is named. The shares of waiting for data leave out what the loaders lose to a lack of cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.errors import plural
from harness.tools.explain import changes, shares
from harness.tools.explain.changes import Change
from harness.tools.explain.facts import RunFacts, checkpoint_bytes

MIB = 2**20


@dataclass(frozen=True)
class SlowCause:
    """``share``: of the run's time, 0 where the cause does not apply. ``limit``: the share from which on it counts."""

    name: str
    limit: float
    share: Callable[[RunFacts], float]
    what: Callable[[RunFacts], str]
    change: Callable[[RunFacts], Change]


CAUSES = (
    SlowCause(
        "other load", 0.2, shares.other_load,
        lambda f: f"competes with other programs, which keep {f.others:.1f} of {plural(f.cores, 'core')} busy",
        lambda f: Change("Stop them, or train on another machine"),
    ),
    SlowCause(
        "too many workers", 0.2, shares.too_many_workers,
        lambda f: f"has more loader processes than cores: {f.workers * f.local_ranks} on {f.cores}",
        lambda f: Change(f"Set data.num_workers={shares.spare_workers(f)} (now {f.workers})",
                         {"data.num_workers": shares.spare_workers(f)}, 0.5),
    ),
    SlowCause(
        "too many threads", 0.2, shares.too_many_threads,
        lambda f: f"has more threads than cores: {f.threads * f.local_ranks} on {f.cores}",
        lambda f: Change(f"Set launch.threads={max(1, f.cores // f.local_ranks)}, or OMP_NUM_THREADS (now {f.threads})",
                         {"launch.threads": max(1, f.cores // f.local_ranks)}),
    ),
    SlowCause(
        "trackers", 0.25, lambda f: f.tracker_s / f.total_s,
        lambda f: f"competes with its trackers ({', '.join(f.setting('trackers', []))}) for the Python interpreter",
        lambda f: Change(f"Set trackers=[] or train.log_every={10 * int(f.setting('train.log_every', 10))}",
                         {"trackers": []}, 0.5),
    ),
    SlowCause(
        "too few workers", 0.15, lambda f: shares.waiting(f) if shares.needed_workers(f) else 0.0,
        lambda f: f"waits for data: {plural(f.workers, 'loader process')} per rank",
        changes.workers_change,
    ),
    SlowCause(
        "reading", 0.15, shares.data("read"),
        lambda f: f"waits for data: reading files {changes.loading(f, 'read')}",
        lambda f: Change("Copy the files to a local disk (task.root), or pack them with harness data tar"),
    ),
    SlowCause(
        "decoding", 0.15, shares.data("decode"),
        lambda f: f"waits for data: decoding images {changes.loading(f, 'decode')}",
        lambda f: Change("Store smaller images, about twice the size that the model sees (task.root)"
                         + (", or set task.decode=reduced" if f.setting("task.decode") == "full" else "")),
    ),
    SlowCause(
        "augmentation", 0.15, shares.data("transform"),
        lambda f: f"waits for data: transforming images {changes.loading(f, 'transform')}",
        lambda f: Change("Remove the most expensive transform of task.transforms.train, or crop before it"),
    ),
    SlowCause(
        "dataset code", 0.15, shares.data("collate"),
        lambda f: f"waits for data: the dataset's batch(), apart from images, {changes.loading(f, 'collate')}",
        lambda f: Change(f"Profile batch() of the task's dataset ({f.setting('task.name')})"),
    ),
    SlowCause("slow rank", 0.15, shares.slow_rank, changes.slow_rank_text, changes.slow_rank_change),
    SlowCause(
        "slow link", 0.25, shares.exchanging(slow=True),
        lambda f: f"waits for a slow link between the ranks: {changes.bandwidths(f)}",
        lambda f: Change("Set launch.interface to the machines' fastest network interface (see harness doctor)",
                         {}, shares.expected_exchange_s(f) / f.exchange_s),
    ),
    SlowCause(
        "gradient volume", 0.25, shares.exchanging(slow=False),
        lambda f: f"exchanges {f.gradient_bytes / MIB:.1f} MiB of gradients in each step: {changes.bandwidths(f)}",
        changes.volume_change,
    ),
    SlowCause(
        "tiny batches", 0.4, shares.host("batch"),
        lambda f: f"starts {f.operations} operations per pass of {changes.rows(f)}, so the host is the bottleneck",
        changes.batch_change,
    ),
    SlowCause(
        "micro-batches", 0.4, shares.host("micro-batches"),
        lambda f: f"splits its steps into micro-batches of {changes.rows(f)}, so the host is the bottleneck",
        changes.accumulate_change,
    ),
    SlowCause(
        "small operations", 0.4, shares.host("model"),
        lambda f: f"runs {f.operations} small operations per pass, so the host is the bottleneck",
        lambda f: Change("Set model.compile=true, which fuses operations", {"model.compile": True}, 0.5),
    ),
    SlowCause(
        "frequent evaluation", 0.25, shares.evaluation(False),
        lambda f: f"evaluates {plural(f.evaluations, 'time')} in {plural(f.epochs, 'epoch')}", changes.evaluate_change,
    ),
    SlowCause(
        "slow evaluation", 0.25, shares.evaluation(True),
        lambda f: f"needs {1e3 * f.eval_row_s:.1f} ms per validation row, but only {1e3 * f.train_s / f.rows:.1f} "
                  "ms per "
        "training row",
        changes.slow_evaluation_change,
    ),
    SlowCause(
        "frequent checkpoints", 0.15, shares.saving(False),
        lambda f: f"writes {plural(shares.num_saves(f), 'checkpoint')} in {plural(f.steps, 'step')}",
        changes.saving_change,
    ),
    SlowCause(
        "slow checkpoints", 0.15, shares.saving(True),
        lambda f: f"waits {shares.save_s(f):.1f} s for each checkpoint of {checkpoint_bytes(f.path) / MIB:.1f} MiB",
        changes.async_change,
    ),
    SlowCause(
        "log lines", 0.15, lambda f: f.share("log"),
        changes.log_text, changes.log_change,
    ),
    SlowCause(
        "optimizer", 0.4, lambda f: f.share("optimizer"),
        lambda f: f"updates {f.gradient_bytes / MIB:.0f} MiB of weights in each step",
        changes.optimizer_change,
    ),
    SlowCause(
        "loop", 0.3, lambda f: f.share("host"), lambda f: "spends its time between the steps, in Python",
        lambda f: Change("Make the steps larger (batch.global)", {}, 0.5),
    ),
)  # fmt: skip
