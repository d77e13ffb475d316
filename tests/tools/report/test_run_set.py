"""Runs side by side: the deciding metric, varied settings, labels, groups of seeds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import curves, page, run_set, tables

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")


def build(*folders):
    return run_set.build(reader.find(folders))


def write_failed_start(folder: Path, message: str, hint: str = "") -> Path:
    """What is left of a start that found an error before its first step."""
    write_run(folder, Fake(name=folder.name, lr=9.0))
    for name in ("provenance.json", "summary.json"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").write_text("")
    (folder / "failure.json").write_text(json.dumps({"step": 0, "message": message, "hint": hint}))
    return folder


def test_starts_that_failed_before_the_first_step_are_one_line(tmp_path, monkeypatch):
    """They neither change the labels of the runs nor have a row, a line or a problem of their own."""
    monkeypatch.chdir(tmp_path)
    folders = [write_run(Path(name), Fake(name=name, state=name)) for name in ("finished", "failed")]
    starts = [write_failed_start(Path(f"start{n}"), "model.name: unknown", "resnet50") for n in range(6)]
    starts.append(write_failed_start(Path("other"), f"no such file: {tmp_path}/a.csv"))
    found = build(*folders, *starts)
    assert [run.label for run in found.runs] == ["finished", "failed"]
    assert tables.states(found.runs) == "1 finished, 1 failed"
    line, reasons = tables.failed_starts(found)
    assert line == "7 starts failed before the first step"
    assert reasons == [
        ("model.name: unknown", "start0, start1, start2, start3, start4, start5"), ("no such file: a.csv", "other"),
    ]  # fmt: skip
    text = page.render(found)
    assert text.count(f"<summary>{line}</summary>") == 1
    assert text.count("start5") == 1
    assert "from 9 run folders" in text


def test_a_failed_start_alone_says_what_to_do(tmp_path):
    (run,) = build(write_failed_start(tmp_path / "start", "model.name: unknown", "it takes: resnet50")).runs
    assert tables.problems(run)[1:] == ["-> it takes: resnet50"]
    assert " at its start): model.name: unknown" in tables.problems(run)[0]


@pytest.mark.parametrize("change", ["logged", "step", "alone", "trial"])
def test_failed_runs_that_are_shown_in_full(tmp_path, change):
    """Those that have trained, trials of a sweep, and failed starts where there is nothing else."""
    if change == "trial":
        folder = write_sweep(tmp_path / "runs", [Fake(), Fake(state="failed")])
        write_failed_start(folder / "trials" / "other", "no").rename(folder / "trials" / "tmp")
        for name in ("metrics.jsonl", "failure.json"):
            (folder / "trials" / "tmp" / name).rename(folder / "trials" / "0001" / name)
        (folder / "trials" / "0001" / "summary.json").unlink()
    else:
        folder = tmp_path / "runs"
        failed = write_failed_start(folder / "failed", "no")
        if change == "logged":
            (failed / "metrics.jsonl").write_text('{"split": "train", "step": 1}\n')
        if change == "step":
            (failed / "failure.json").write_text('{"step": 3, "message": "no"}')
        if change != "alone":
            write_run(folder / "finished", Fake())
    found = build(folder)
    assert [run.record.state for run in found.ranked][-1] == "failed"
    assert not found.failed_starts
    assert "failed before the first step" not in page.render(found)


def test_best_run_first_and_runs_without_evaluation_last(tmp_path):
    folders = [write_run(tmp_path / str(final), Fake(name=f"r{final}", final=final)) for final in (0.7, 0.9, 0.8)]
    folders.append(write_run(tmp_path / "none", Fake(name="none", epochs=1, state="unfinished")))
    found = build(*folders)
    assert [run.record.name for run in found.ranked] == ["r0.9", "r0.8", "r0.7", "none"]
    assert found.best.record.name == "r0.9"
    assert (found.metric, found.direction) == ("top1", "max")


def test_runs_that_are_evaluated_on_different_rows_are_told_of(tmp_path):
    one, other, third = (
        write_run(tmp_path / name, Fake(name=name, settings={"task.eval_csv": csv}))
        for name, csv in (("one", "a.csv"), ("other", "a.csv"), ("third", "b.csv"))
    )
    told = "But the runs differ in task.eval_csv: values from other rows do not compare."
    assert told not in page.render(build(one, other))
    assert told in page.render(build(one, third))


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


def test_runs_outside_a_sweep_are_labeled_by_name(tmp_path):
    folders = [write_run(tmp_path / name, Fake(name=name, lr=lr)) for name, lr in (("near", 0.1), ("far", 0.2))]
    assert [run.label for run in build(*folders).runs] == ["near", "far"]


def test_long_settings_are_shortened(tmp_path):
    fakes = [
        Fake(lr=lr, settings={"task.transforms.train": [{"RandomResizedCrop": {"size": size, "scale": [0.5, 1.0]}}]})
        for lr, size in ((0.1, 64), (0.2, 96), (0.3, 96))
    ]
    found = build(write_sweep(tmp_path / "sweep", fakes))
    assert max(len(run.label) for run in found.runs) <= 60
    assert len({run.label for run in found.runs}) == 3
    assert max(len(cell.text) for row in tables.all_runs(found).rows for cell in row[3:5]) <= 24


def test_shortened_settings_stay_apart(tmp_path):
    names = [f"data/photos/{folder}/train_v1_clean.csv" for folder in "ab"]
    fakes = [
        Fake(
            name="x",
            lr=0.001234,
            seed=seed,
            settings={"task.train_csv": name, "task.notes": ["a" * 30, seed, "b" * 30]},
        )
        for seed, name in enumerate([*names, names[1]])
    ]
    found = build(*(write_run(tmp_path / str(place), fake) for place, fake in enumerate(fakes)))
    by_name = {run.settings["task.train_csv"]: run for run in found.runs}
    assert all(name in found.describe(run) for name, run in by_name.items())
    assert len({found.describe(run) for run in found.runs}) == 3
    told = run_set.describe({"a": 1, "b": "x" * 50, "c": 2}, "abc")
    assert told == "a 1 · …"


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


def test_recipes_are_in_the_order_of_their_means_not_of_their_luckiest_seed(tmp_path):
    finals = {0.1: (0.5, 0.99), 0.2: (0.9, 0.91)}
    fakes = [Fake(lr=lr, seed=seed, final=final) for lr in finals for seed, final in enumerate(finals[lr])]
    found = build(write_sweep(tmp_path / "sweep", fakes))
    assert found.best.settings["optimizer.lr"] == 0.1
    assert [row[0].text for row in tables.seeds(found).rows] == ["lr 0.2", "lr 0.1"]


def test_repeats_of_a_seed_are_not_further_seeds(tmp_path):
    """They count once, with their mean; alone they have no spread."""
    finals = {"a": (0, 0.9), "b": (0, 0.92), "c": (1, 0.97)}
    a, b, c = (
        write_run(tmp_path / name, Fake(name=name, seed=seed, final=final)) for name, (seed, final) in finals.items()
    )
    (group,) = build(a, b).seed_groups
    assert (group.size, group.spread) == ("2 repeats", None)
    assert [line.label.rpartition(" · ")[2] for line in curves.choose(build(a, b))] == ["mean of 2 repeats"]
    assert tables.seeds(build(a, b)).rows == []
    (group,) = build(a, b, c).seed_groups
    bests = {run.record.name: run.best for run in group.runs}
    assert group.size == "2 seeds, 3 runs"
    assert group.values == pytest.approx([(bests["a"] + bests["b"]) / 2, bests["c"]])
    assert [row[2].text for row in tables.seeds(build(a, b, c)).rows] == ["0, 1"]


def test_mean_over_seeds_is_of_finished_runs(tmp_path):
    """A run that failed early, or is still training, would spoil the mean and cut the curves short."""
    states = ("finished", "finished", "failed", "unfinished", "stopped")
    fakes = [Fake(name=f"{seed}", seed=seed, final=0.9 + seed / 100, state=state) for seed, state in enumerate(states)]
    found = build(*(write_run(tmp_path / fake.name, fake) for fake in fakes))
    (group,) = found.seed_groups
    assert set(group.by_seed) == {"0", "1"}
    assert group.size == "2 seeds"
    assert f"± {group.spread:.2g}"[:6] in page.render(found)
    assert "over 2 seeds" in page.render(found)
    (line,) = curves.choose(found)
    assert line.label.endswith("mean of 2 seeds")
    assert curves.points(line)["validation"]["at"]["epoch"][-1] == 10.0
    training = build(*(write_run(tmp_path / f"t{fake.name}", fake) for fake in fakes[2:]))
    assert training.seed_groups[0].mean is None
    assert curves.choose(training)[0].label.endswith("mean of 3 seeds")


def test_run_without_a_finite_metric_has_epochs_and_spoils_no_mean(tmp_path):
    diverged, good = (write_run(tmp_path / f"{seed}", Fake(name=f"{seed}", seed=seed)) for seed in (0, 1))
    log = [json.loads(line) for line in (diverged / "metrics.jsonl").read_text().splitlines()]
    nothing = {"loss": None, "top1": None}
    log = [entry | nothing if entry["split"] == "eval" else entry for entry in log]
    (diverged / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    table = tables.all_runs(build(diverged, good))
    assert [row[table.header.index("epochs done")].text for row in table.rows] == ["10", "10"]
    (line,) = curves.choose(build(diverged, good))
    assert list(curves.points(line)["validation"]["values"]) == ["loss", "top1"]
    assert "Validation curves: no run has" in page.render(build(diverged))


def test_run_that_resumed_on_other_ranks_shows_all_and_has_no_speed_up(tmp_path):
    worlds = {"changed": [1, 1, 2], "one": [1], "two": [2, 2]}
    folders = []
    for name, starts in worlds.items():
        folders.append(write_run(tmp_path / name, Fake(name=name, world=starts[-1])))
        path = folders[-1] / "provenance.json"
        (start,) = json.loads(path.read_text())
        path.write_text(json.dumps([start | {"world_size": world} for world in starts]))
    found = build(*folders)
    assert [run.ranks for run in found.runs] == ["1, then 2 ranks", "1 rank", "2 ranks"]
    assert len(found.seed_groups) == 3
    rows = [[cell.text for cell in row] for row in tables.speed_up(found).rows]
    assert [(row[1], Path(row[-1]).name) for row in rows] == [("1", "one"), ("2", "two")]
    table = tables.all_runs(found)
    shown = {row[-1].text: row[table.header.index("ranks")].text for row in table.rows}
    assert shown[found.runs[0].path] == "1, then 2"
    text = page.render(build(folders[0]))
    assert "on 1, then 2 ranks; total time" in text
    assert "(3 starts), on 1, then 2 ranks; these commands use the last number" in text


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "a"], "a (2 runs)"), (["a", "b", "a"], "a, b (3 runs)"),
        (["a", "b", "c", "d", "d"], "a, b, c and 2 more runs"), (["a", "b", "c", "d"], "a, b, c and 1 more run"),
    ],
)  # fmt: skip
def test_title_counts_runs(tmp_path, names, title):
    """Runs in different folders may have equal names."""
    assert build(*(write_run(tmp_path / f"{n}" / name, Fake(name=name)) for n, name in enumerate(names))).title == title


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
