"""Each cause of slowness is named where it is the largest, with settings that exist and a gain that follows from it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Config
from harness.tools.explain.causes import CAUSES, explain
from harness.tools.explain.facts import RunFacts, SlowRank

LAUNCH_S, LOOPBACK = 20e-6, 4e9
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}


def facts(load: dict[str, float] | None = None, spent: dict[str, float] | None = None, **changes: Any) -> RunFacts:
    """A run of 100 s, of which 90 are the model's, with changes. What ``spent`` adds is taken from the model."""
    seconds = {"data": 2.0, "forward": 30.0, "backward": 55.0, "reduce": 0.0, "optimizer": 5.0, "host": 1.0,
               "checkpoint": 1.0, "log": 1.0, "evaluation": 4.0, "between": 1.0}  # fmt: skip
    rest = 100 - sum((spent or {}).values())
    seconds = {name: value * rest / 100 for name, value in seconds.items()} | (spent or {})
    loading = {"read": 5.0, "decode": 20.0, "transform": 10.0, "load": 36.0, "cpu": 30.0, "load_starved": 0.0}
    settings = {"data.num_workers": 1, "batch.global": 64, "batch.accumulate": 1, "task.name": "image_csv"}
    base = RunFacts(
        path=Path("runs/x"), total_s=100.0, train_s=100.0 - seconds["evaluation"] - seconds["between"], steps=1000,
        epochs=2, evaluations=2, eval_data_s=0.0, eval_row_s=0.5e-3, rows=64_000, spent=seconds,
        load=loading | (load or {}), slow_rank=None, waited_s=0.0, late_data_s=0.0,
        own=1.5, others=0.1, starved=0.02, threads_starved=0.02,
        tracker_s=0.0, world=1, local_ranks=1, cores=4, threads=1, layers=50, gradient_bytes=4_000_000,
        settings=settings | changes.pop("settings", {}),
        measure={"launch_s": LAUNCH_S, "loopback": LOOPBACK}.__getitem__,
    )  # fmt: skip
    return replace(base, **changes)


RANKS = {"world": 2, "local_ranks": 2}
READS = {"read": 180.0, "load": 200.0, "cpu": 10.0}
PLANTED = {
    "other load": facts(others=3.5, own=0.5, starved=0.5),
    "too many workers": facts(own=4.0, others=0.0, starved=0.4, settings={"data.num_workers": 32}),
    "too many threads": facts(own=3.9, threads=16, threads_starved=8.0),
    "trackers": facts(tracker_s=60.0, settings={"trackers": ["own.tracker"]}),
    "too few workers": facts(READS, {"data": 60.0}),
    "reading": facts({"read": 2000.0, "load": 2010.0, "cpu": 10.0}, {"data": 60.0}),
    "decoding": facts({"decode": 150.0, "load": 180.0, "cpu": 170.0}, {"data": 60.0}, cores=2),
    "augmentation": facts({"transform": 150.0, "load": 180.0, "cpu": 170.0}, {"data": 60.0}, cores=2),
    "dataset code": facts({"load": 180.0, "cpu": 170.0}, {"data": 60.0}, cores=2),
    "slow rank": facts({}, {"reduce": 40.0}, slow_rank=SlowRank(1, 0.6, 500, 0.0), waited_s=35.0, **RANKS),
    "slow link": facts({}, {"reduce": 40.0}, gradient_bytes=400_000, **RANKS),
    "gradient volume": facts({}, {"reduce": 40.0}, gradient_bytes=100_000_000, **RANKS),
    "tiny batches": facts(rows=2000, layers=4000),
    "micro-batches": facts(layers=150, settings={"batch.accumulate": 32}),
    "small layers": facts(layers=4000),
    "frequent evaluation": facts({}, {"evaluation": 60.0}, evaluations=40, epochs=40),
    "slow evaluation": facts({}, {"evaluation": 60.0}, eval_row_s=0.02, eval_data_s=50.0),
    "frequent checkpoints": facts({}, {"checkpoint": 60.0}, settings={"checkpoint.every": 1}),
    "slow checkpoints": facts({}, {"checkpoint": 60.0}, settings={"checkpoint.every": 100}),
    "log lines": facts({}, {"log": 60.0}, settings={"train.log_every": 1}),
    "optimizer": facts({}, {"optimizer": 60.0}, settings={"optimizer.args.foreach": False}),
    "loop": facts({}, {"host": 60.0}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_largest_cause_is_named_with_settings_that_exist(name):
    found = explain(PLANTED[name])
    assert found.cause == name, found.text
    assert 1.0 < found.gain <= 100.0
    assert found.gain <= 1 / (1 - min(found.share, 0.99)) + 1e-9
    assert f"({found.share:.0%} of the run's time)" in found.text
    for key, value in found.settings.items():
        section, _, field = key.partition(".")
        assert section in SECTIONS
        if field:
            names = {info.alias or name for name, info in SECTIONS[section].model_fields.items()}
            assert field in names
        if isinstance(value, int | list):
            assert str(value).replace("True", "true") in found.text
        assert key in found.text


OWN = {"task.name": "mine"}
IMAGES = {"task.name": "image_csv", "task.root": "photos", "task.decode": "full", "task.image_size": None,
          "task.transforms.train": [], "task.transforms.eval": []}  # fmt: skip
CONFIGURATIONS = {
    "own": OWN,
    "mnist": {"task.name": "mnist", "task.root": "data/mnist", "task.transforms.train": []},
    "texts": {"task.name": "text_csv", "task.text_column": "text"},
    "images": IMAGES,
    "scaled images": IMAGES | {"task.image_size": [64, 64]},
    "augmented images": IMAGES | {"task.transforms.train": ["RandomHorizontalFlip"]},
    "cropped images": IMAGES | {"task.transforms.train": [{"RandomResizedCrop": 64}], "task.decode": "full"},
    "all set": IMAGES | {"task.image_size": [64, 64], "task.decode": "reduced", "model.compile": True, "trackers": [],
                         "data.shard": "global", "checkpoint.async_save": True},
}  # fmt: skip


@pytest.mark.parametrize("has", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("name", [*PLANTED, "late data"])
def test_nothing_is_proposed_that_the_configuration_does_not_have(name, has):
    """Or that it has already: a setting of another task, a transform of an empty list, true for what is true."""
    late = replace(PLANTED["slow rank"], slow_rank=SlowRank(0, 0.6, None, 0.9))
    run = PLANTED.get(name, late)
    run = replace(run, settings={key: value for key, value in run.settings.items() if key[:5] != "task."} | has)
    found = explain(run)
    for each in (found, *found.then):
        assert {key for key in re.findall(r"task(?:\.[a-z_]+)+", each.text)} <= run.settings.keys()
        assert "task.transforms.train" not in each.text or has["task.transforms.train"]
        assert "task.decode" not in each.text or has.get("task.image_size") or "RandomResizedCrop" in str(has)
        for key, value in each.settings.items():
            assert run.settings.get(key) != value, each.text
    assert name in ("trackers", "late data") or found.cause == name


def test_every_cause_is_tested():
    assert set(PLANTED) == {cause.name for cause in CAUSES}


@pytest.mark.parametrize("sound", [facts(), facts(**RANKS), facts({}, {"data": 10.0}), facts({}, {"evaluation": 12.0})])
def test_a_sound_run_is_not_slow(sound):
    found = explain(sound)
    assert (found.cause, found.settings, found.gain) == (None, {}, 1.0)
    assert found.text.startswith("runs/x is not slow: ")
    assert found.as_json()["shares"]["forward"] == sound.share("forward")


def test_answers_follow_from_the_numbers():
    """60 % of the time is spent waiting; a step of 40 ms needs 200 ms of loading, so 5 processes hide it."""
    found = explain(PLANTED["too few workers"])
    assert found.settings == {"data.num_workers": 6}  # the evaluation is not part of the 40 s
    assert found.gain == pytest.approx(2.5)
    assert "1 loader process per rank" in found.text
    found = explain(PLANTED["slow rank"])
    assert "waits for rank 1, which computes more slowly, since step 500" in found.text
    by_data = replace(PLANTED["slow rank"], slow_rank=SlowRank(0, 0.6, None, 0.9))
    assert "waits for rank 0, which waits for its data, from the start" in explain(by_data).text


@pytest.mark.parametrize("workers", [1, 15, 16, 40])
def test_an_evaluation_that_waits_never_gets_fewer_workers(workers):
    slow = PLANTED["slow evaluation"]
    found = explain(replace(slow, settings=slow.settings | {"data.num_workers": workers}))
    assert found.cause == "slow evaluation"
    assert found.settings.get("data.num_workers", workers + 1) > workers
    assert ("data.num_workers" in found.settings) == (workers < 16)


def test_a_lack_of_cores_is_not_blamed_on_the_data():
    """Loaders that wait for a core most of the time are slow because of other programs, not of the images."""
    busy = facts({"decode": 150.0, "load": 180.0, "cpu": 20.0, "load_starved": 140.0}, {"data": 60.0}, cores=2,
                 others=1.7, own=0.3, starved=0.2)  # fmt: skip
    assert explain(busy).cause == "other load"
    assert explain(replace(busy, others=0.1, load={**busy.load, "load_starved": 5.0, "cpu": 170.0})).cause == "decoding"


def test_a_configuration_of_an_older_version_lacks_settings():
    assert explain(replace(facts(), settings={})).cause is None


def test_the_causes_after_the_main_one():
    both = facts({}, {"checkpoint": 30.0, "evaluation": 40.0}, settings={"checkpoint.every": 1})
    found = explain(both)
    assert (found.cause, [other.cause for other in found.then]) == ("frequent evaluation", ["frequent checkpoints"])
    (then,) = found.as_json()["then"]
    assert then["set"] == found.then[0].settings != {}
