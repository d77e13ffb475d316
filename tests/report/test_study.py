"""Runs side by side: the metric that decides, what sets runs apart, their names, what repeats what."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.report import study
from harness.runs import reader


def build(*folders):
    return study.build(reader.find(folders))


def test_the_best_first_and_what_was_never_evaluated_last(tmp_path):
    folders = [write_run(tmp_path / str(final), Fake(name=f"r{final}", final=final)) for final in (0.7, 0.9, 0.8)]
    folders.append(write_run(tmp_path / "none", Fake(name="none", epochs=1, state="unfinished")))
    found = build(*folders)
    assert [run.record.name for run in found.ranked] == ["r0.9", "r0.8", "r0.7", "none"]
    assert found.best.record.name == "r0.9"
    assert (found.metric, found.direction) == ("top1", "max")


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
def test_the_metric_and_which_way_is_better(tmp_path, summary, metric, direction):
    run = write_run(tmp_path / "run", Fake())
    (run / "summary.json").write_text(json.dumps(summary))
    found = build(run)
    assert (found.metric, found.direction) == (metric, direction)


def test_a_sweep_says_itself(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [Fake(final=0.8), Fake(final=0.9, lr=0.2)])
    told = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(told | {"metric": "loss", "direction": "minimize"}))
    found = build(sweep)
    assert (found.metric, found.direction) == ("loss", "min")
    assert found.best.settings["optimizer.lr"] == 0.2
    assert found.title == "sweep"


def test_labels_are_what_sets_runs_apart(tmp_path):
    fakes = [Fake(lr=lr, world=world) for lr in (0.1, 0.001) for world in (1, 2)]
    found = build(write_sweep(tmp_path / "sweep", fakes))
    assert [run.label for run in found.runs] == ["lr 0.1 · 1 rank", "lr 0.1 · 2 ranks", "lr 0.001 · 1 rank",
                                                 "lr 0.001 · 2 ranks"]  # fmt: skip
    assert found.apart == ["optimizer.lr"]


def test_two_runs_of_one_name_and_recipe_are_told_apart(tmp_path):
    found = build(*(write_run(tmp_path / place / "digits", Fake(name="digits")) for place in ("a", "b")))
    labels = [run.label for run in found.runs]
    assert len(set(labels)) == 2
    assert all("digits" in label for label in labels)
    assert len({run.path for run in found.runs}) == 2


def test_runs_that_differ_in_much_are_named_by_themselves(tmp_path):
    many = {f"task.option{number}": number for number in range(6)}
    one = write_run(tmp_path / "one", Fake(name="one"))
    two = write_run(tmp_path / "two", Fake(name="two", settings={key: value + 1 for key, value in many.items()}))
    three = write_run(tmp_path / "three", Fake(name="three", settings=many))
    assert [run.label for run in build(one, two, three).runs] == ["one", "two", "three"]


def test_seeds_make_a_mean_and_a_spread(tmp_path):
    finals = (0.9, 0.92, 0.97)
    fakes = [Fake(seed=seed, final=final) for seed, final in enumerate(finals)]
    found = build(write_sweep(tmp_path / "sweep", [*fakes, Fake(lr=0.5)]))
    by_size = {len(repeats.runs): repeats for repeats in found.repeats}
    bests = [run.best for run in by_size[3].runs]
    assert by_size[3].mean == pytest.approx(statistics.fmean(bests))
    assert by_size[3].spread == pytest.approx(statistics.stdev(bests))
    assert by_size[1].spread is None


def test_what_cannot_be_read_is_in_the_report_as_what_it_is(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [Fake(), Fake(lr=0.2, state="unfinished"), Fake(lr=0.3, state="failed")])
    told = json.loads((sweep / "sweep.json").read_text())
    told["trials"].append({"number": 3, "run": "trials/0003", "params": {"optimizer.lr": 0.4}, "state": "waiting"})
    (sweep / "sweep.json").write_text(json.dumps(told))
    (sweep / "trials" / "0001" / "config.yaml").write_text("{")
    found = build(sweep)
    assert [run.record.state for run in found.runs] == ["finished", "unfinished", "failed", "waiting"]
    assert found.runs[3].settings == {"optimizer.lr": 0.4}
    assert len({run.label for run in found.runs}) == 4
