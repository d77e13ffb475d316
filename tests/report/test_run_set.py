"""Runs side by side: the deciding metric, varied settings, labels, groups of seeds."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.report import run_set
from harness.runs import reader


def build(*folders):
    return run_set.build(reader.find(folders))


def test_best_run_first_and_runs_without_evaluation_last(tmp_path):
    folders = [write_run(tmp_path / str(final), Fake(name=f"r{final}", final=final)) for final in (0.7, 0.9, 0.8)]
    folders.append(write_run(tmp_path / "none", Fake(name="none", epochs=1, state="unfinished")))
    found = build(*folders)
    assert [run.record.name for run in found.ranked] == ["r0.9", "r0.8", "r0.7", "none"]
    assert found.best.record.name == "r0.9"
    assert (found.metric, found.direction) == ("top1", "max")


def test_of_equal_results_the_sooner_one_is_the_best(tmp_path):
    """Equal in the digits that the report shows: what differs beyond them means nothing."""
    slow = write_run(tmp_path / "slow", Fake(name="slow", world=2, efficiency=0.3, final=0.9500001))
    fast = write_run(tmp_path / "fast", Fake(name="fast", final=0.95))
    for folders in ((slow, fast), (fast, slow)):
        assert [run.record.name for run in build(*folders).ranked] == ["fast", "slow"]


@pytest.mark.parametrize(
    ("summary", "metric", "direction"),
    [
        ({"best": {"char_loss": 2.0, "step": 1}, "history": []}, "char_loss", "min"),
        ({"best": {"accuracy": 0.5, "step": 1}, "history": []}, "accuracy", "max"),
        ({"best": {"score": 2.0}, "history": [{"score": 2.0}, {"score": 3.0}]}, "score", "min"),
        ({"best": {"loss": 3.0}, "history": [{"loss": 2.0}, {"loss": 3.0}]}, "loss", "max"),
        ({"best": {"val_mse": 2.0}}, "val_mse", "min"),
        ({"best": [], "history": 3}, None, "max"),
    ],
)
def test_deciding_metric_and_direction(tmp_path, summary, metric, direction):
    run = write_run(tmp_path / "run", Fake())
    (run / "summary.json").write_text(json.dumps(summary))
    found = build(run)
    assert (found.metric, found.direction) == (metric, direction)


def test_sweep_names_its_metric_and_direction(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [Fake(final=0.8), Fake(final=0.9, lr=0.2)])
    content = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(content | {"metric": "loss", "direction": "minimize"}))
    found = build(sweep)
    assert (found.metric, found.direction) == ("loss", "min")
    assert found.best.settings["optimizer.lr"] == 0.2
    assert found.title == "sweep"


def test_labels_are_the_varied_settings(tmp_path):
    fakes = [Fake(lr=lr, world=world) for lr in (0.1, 0.001) for world in (1, 2)]
    found = build(write_sweep(tmp_path / "sweep", fakes))
    assert [run.label for run in found.runs] == ["lr 0.1 · 1 rank", "lr 0.1 · 2 ranks", "lr 0.001 · 1 rank",
                                                 "lr 0.001 · 2 ranks"]  # fmt: skip
    assert found.varied == ["optimizer.lr"]


def test_runs_with_equal_name_and_recipe_have_different_labels(tmp_path):
    found = build(*(write_run(tmp_path / place / "digits", Fake(name="digits")) for place in ("a", "b")))
    labels = [run.label for run in found.runs]
    assert len(set(labels)) == 2
    assert all("digits" in label for label in labels)
    assert len({run.path for run in found.runs}) == 2


def test_runs_with_many_varied_settings_are_labeled_by_name(tmp_path):
    many = {f"task.option{number}": number for number in range(6)}
    one = write_run(tmp_path / "one", Fake(name="one"))
    two = write_run(tmp_path / "two", Fake(name="two", settings={key: value + 1 for key, value in many.items()}))
    three = write_run(tmp_path / "three", Fake(name="three", settings=many))
    assert [run.label for run in build(one, two, three).runs] == ["one", "two", "three"]


def test_seeds_have_a_mean_and_a_spread(tmp_path):
    finals = (0.9, 0.92, 0.97)
    fakes = [Fake(seed=seed, final=final) for seed, final in enumerate(finals)]
    found = build(write_sweep(tmp_path / "sweep", [*fakes, Fake(lr=0.5)]))
    by_size = {len(group.runs): group for group in found.seed_groups}
    bests = [run.best for run in by_size[3].runs]
    assert by_size[3].mean == pytest.approx(statistics.fmean(bests))
    assert by_size[3].spread == pytest.approx(statistics.stdev(bests))
    assert by_size[1].spread is None


def test_unreadable_runs_are_reported_with_their_state(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [Fake(), Fake(lr=0.2, state="unfinished"), Fake(lr=0.3, state="failed")])
    content = json.loads((sweep / "sweep.json").read_text())
    content["trials"].append({"number": 3, "run": "trials/0003", "params": {"optimizer.lr": 0.4}, "state": "waiting"})
    (sweep / "sweep.json").write_text(json.dumps(content))
    (sweep / "trials" / "0001" / "config.yaml").write_text("{")
    found = build(sweep)
    assert [run.record.state for run in found.runs] == ["finished", "unfinished", "failed", "waiting"]
    assert found.runs[3].settings == {"optimizer.lr": 0.4}
    assert len({run.label for run in found.runs}) == 4
