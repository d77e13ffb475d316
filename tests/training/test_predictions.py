"""The table of predictions: each row once, in order, the same bytes at any world size, never a partial file."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from harness.config import loader
from harness.data.batch import Batch
from harness.data.loader import Loader
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import DataError, HarnessError
from harness.inference import predict
from harness.runs.console import ProgressBar
from harness.training.evaluation import final_predictions, prediction_table, predictions
from harness.training.evaluation.labels import SingleLabel
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.prediction_table import GROUP_ROWS, ROW, SAMPLE_ROWS, Block, PredictionFile
from harness.training.task import Classification
from tests.fixtures import make_config, write_rows
from tests.ranks import RankFailure, run_ranks

NUM_ROWS = 10_000
CPU = torch.device("cpu")


class Rows:
    """Rows of numbers. Rows in ``bad`` are unreadable; row ``fail_at`` raises."""

    def __init__(self, num_rows: int, bad: frozenset[int] = frozenset(), fail_at: int | None = None) -> None:
        self.num_rows, self.bad, self.fail_at = num_rows, bad, fail_at

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        assert rows.flags.writeable  # torch warns of an index that is not
        if self.fail_at in rows:
            raise DataError("this row is broken", where=f"row {self.fail_at}")
        used = np.asarray([row for row in rows.tolist() if row not in self.bad], dtype=np.int64)
        inputs = torch.sin(torch.from_numpy(used)[:, None] * torch.arange(1, 38) * 0.37)
        return Batch(
            inputs, torch.zeros(len(used), dtype=torch.int64), used, [r for r in rows.tolist() if r in self.bad]
        )


class ThreeClasses(Classification):
    """A task with three classes over ``Rows``."""

    classes = ("ä,b", "7", "c")

    def __init__(self, rows: Rows) -> None:
        self.eval = rows

    def prepare(self, inputs):
        return inputs

    def known(self, rows):
        return {"id": [f"row {row}" for row in rows.tolist()], "label": (rows % 3).tolist()}


def model() -> torch.nn.Module:
    """A model whose kernels round differently in batches of different sizes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 129), torch.nn.GELU(), torch.nn.Linear(129, 3)).eval()


def write(folder, name, rows, runtime=None, stop=None):
    runtime = runtime or Runtime()
    config = loader.load(folder / "config.yaml")
    predictor = predictions.Predictor(config, runtime, ThreeClasses(rows), model())
    return predictions.write(predictor, Loader(rows, 0, CPU), stop or Stop(runtime), folder / name, ProgressBar(1))


def on_ranks(folder, name, rows):
    with open_runtime(detect(os.environ), "cpu", 60) as runtime:
        written = write(folder, name, rows, runtime)
        return written.rows, written.bad


class Sharded(torch.nn.Module):
    """A model whose forward pass is collective, as under fsdp."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, inputs):
        dist.all_reduce(torch.zeros(1))
        return self.inner(inputs)


def on_sharded_ranks(folder, name, rows, fails=None):
    """``fails``: a method of the task that fails on rank 1."""
    with open_runtime(detect(os.environ), "cpu", 20) as runtime:
        task = ThreeClasses(rows)
        if fails and runtime.rank == 1:
            setattr(task, fails, lambda _: 1 / 0)
        predictor = predictions.Predictor(loader.load(folder / "config.yaml"), runtime, task, Sharded(), sharded=True)
        return predictions.write(predictor, Loader(rows, 0, CPU), Stop(runtime), folder / name, ProgressBar(1)).bad


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path, "train", 4)
    make_config(tmp_path, batch={"global": 192})
    return tmp_path


def test_number_of_values_of_a_task_is_checked(folder, monkeypatch):
    monkeypatch.setattr(ThreeClasses, "known", lambda task, rows: {"id": rows.tolist()[:-1]})
    with pytest.raises(HarnessError, match=r"ThreeClasses.known\(\) returned 11 values of 'id' for 12 rows"):
        write(folder, "x.csv", Rows(12))


class Deep(Objective):
    """An objective that fails on rank 1, or whose sums of there do not fit the others."""

    labels = SingleLabel(("a", "b"))

    def __init__(self, rank: int, shape: int) -> None:
        vars(self).update(rank=rank, shape=shape)

    def pairs_of_new(self, outputs, texts):
        vars(self)["shape"] += self.rank  # a sum that cannot be added to the one before
        return {"loss": (outputs.sum(0)[: self.shape], torch.ones(()))} if self.shape < 3 else 1 / 0


def on_ranks_that_evaluate(folder, name, shape):
    with open_runtime(detect(os.environ), "cpu", 60) as runtime:
        config, task = loader.load(folder / "config.yaml"), ThreeClasses(Rows(1000))
        predictor = predictions.Predictor(config, runtime, task, model(), objective=Deep(runtime.rank, shape))
        batches = Loader(task.eval, 0, CPU)
        written = predictions.write(predictor, batches, Stop(runtime), folder / name, ProgressBar(1))
        return written.rows, written.not_evaluated


@pytest.mark.parametrize(("shape", "why"), [(2, "division by zero"), (1, "broadcast shape")])
def test_predictions_are_written_if_a_rank_cannot_evaluate_them(folder, shape, why):
    first, second = run_ranks(2, on_ranks_that_evaluate, folder, "out.csv", shape, group=False)
    assert first[0] == 1000
    assert why in first[1]
    assert second == (0, "")


def test_only_what_the_task_does_not_evaluate_by_itself_is_evaluated():
    class Own(ThreeClasses):
        def evaluate(self, outputs, targets):
            return {}

    assert predict._objective(ThreeClasses(Rows(1))) is not None
    assert predict._objective(Own(Rows(1))) is None


def test_an_own_task_evaluates_the_rows_with_labels(folder):
    """By its own ``evaluate`` and ``report``, and with the metrics that it declares."""

    class Own(ThreeClasses):
        def known(self, rows):
            return {"label": [None if row % 4 == 3 else "c" for row in rows.tolist()]}

        def evaluate(self, outputs, targets):
            return {"top1": (outputs.new_tensor(float(len(outputs))), 2 * len(targets)), "loss": (outputs.sum(), 1)}

        def report(self, sums):
            return {name: sums.ratio(name) for name in sums.pairs} | {"mean_class_accuracy": 0.25}

    task, rows = Own(Rows(1000)), Rows(1000)
    predictor = predictions.Predictor(loader.load(folder / "config.yaml"), Runtime(), task, model(), objective=task)
    written = predictions.write(predictor, Loader(rows, 0, CPU), Stop(Runtime()), folder / "x.csv", ProgressBar(1))
    lines = predictions.shown_metrics(predictor, written)
    assert lines[:2] == ["rows evaluated: 750 of 1,000", "top1: 0.5000"]
    assert lines[2].startswith("loss: ")
    assert len(lines) == 4
    assert list(written.first.values()) == [0]


def test_file_that_another_process_writes_is_left_alone(folder):
    first = PredictionFile(folder / "x.csv")
    block = Block(pa.table({"id": [1] * GROUP_ROWS, "prediction": [2] * GROUP_ROWS}), [], {}, {})
    first.add(block)
    with pytest.raises(HarnessError, match="x.csv: cannot write the output: another process is writing it"):
        PredictionFile(folder / "x.csv").add(block)
    assert first.finish().rows == GROUP_ROWS
    again = PredictionFile(folder / "x.csv")
    (folder / "x.csv.tmp").write_text("left by a killed process")
    again.add(block)
    assert again.finish().rows == GROUP_ROWS


def test_long_texts_that_are_copied_do_not_wait_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction_table, "_GROUP_BYTES", 100)
    file, rows = PredictionFile(tmp_path / "x.csv"), pa.table({"id": [1], "prediction": [2]})
    for block in range(3):
        file.add(Block(rows, [], {}, {}, copied=pa.table({"page": [f"{block}" * 60]})))
    assert file._copied_bytes < 100
    file.finish()
    assert (tmp_path / "x.csv").read_text().splitlines()[1:] == [f"1,2,{block}" + f"{block}" * 59 for block in range(3)]


def test_error_of_numbers_whose_labels_are_text(tmp_path):
    file = prediction_table.PredictionFile(tmp_path / "x.csv")
    file.add(Block(pa.table({"id": [0, 1, 2], "prediction": [1.0, 2.0, 3.0], "label": ["1.5", "", "1"]}), [], {}, {}))
    assert file.finish().fit == f"root mean square error of prediction {((0.5**2 + 2**2) / 2) ** 0.5:.5g}"


@pytest.mark.parametrize(
    ("pairs", "warned"), [("aa ba", True), ("aa bb", False), ("aa aa", False), ("aa  a", False), ("", False)], ids=str
)
def test_a_model_that_predicts_one_class_is_warned_of(caplog, pairs, warned):
    found = Counter({(pair[0], pair[1]): 10 for pair in [pairs[:2], pairs[3:]] if pair})
    prediction_table.Totals(pairs=found).warn_of_one_class()
    prediction_table.Totals(pairs=Counter(found.keys())).warn_of_one_class()  # of two rows nothing is said
    assert caplog.text.count("the model predicts 'a' for every row, but the labels have 2 different values") == warned


@pytest.mark.parametrize("classes", [("same", "different"), (0, 1)])
def test_labels_that_the_model_does_not_know_are_warned_of(caplog, classes):
    totals = prediction_table.Totals(
        pairs=Counter({("0", "same"): 3, ("1", "same"): 2, ("", "same"): 1, ("0|1", "same"): 1}),
        first={"1": 0, "0": 7, "": 8, "0|1": 9},
    )
    totals.warn_of_unknown_labels(totals.unknown_labels(classes, "|"), classes, "new.csv, row {}".format)
    told = (
        "6 rows with labels that the model was not trained on, and never predicts: '1' (new.csv, row 0), "
        "'0' (new.csv, row 7), '0|1' (new.csv, row 9); it predicts 'same', 'diff"
    )
    assert (told in caplog.text) == (classes != (0, 1))


def test_rows_with_a_blank_label_are_not_counted_as_wrong():
    found = prediction_table.Totals(pairs=Counter({("a", "a"): 3, ("a", "b"): 1, ("", "a"): 2, (" ", "b"): 1}))
    assert found.fit == "3 of 4 predictions are correct (0.7500)"


def test_wrong_rows_and_pairs_for_trackers(folder):
    """Over all rows of the file; the samples have the first rows of each class, but for those that cannot be read."""
    rows = Rows(500, frozenset([3, 77]))
    written = write(folder, "x.csv", rows)
    table = pd.read_csv(folder / "x.csv")
    read = table.dropna(subset="prediction")
    wrong = read[read["prediction"] != read["label"]]

    def first_of_each(table: pd.DataFrame) -> list[int]:
        number, extra = divmod(SAMPLE_ROWS, 3)
        places = table.groupby("label").cumcount()
        more = table[places == number].index[:extra].tolist()
        return sorted([*table[places < number].index.tolist(), *more])

    assert written.wrong.table()[ROW].to_pylist() == first_of_each(wrong)
    pairs = read.groupby(["label", "prediction"]).size()
    assert written.pairs == {(str(label), prediction): count for (label, prediction), count in pairs.items()}
    right = len(read) - len(wrong)
    assert written.fit == f"{right} of {len(read)} predictions are correct ({right / len(read):.4f})"
    first, second = final_predictions.samples(rows, written)
    assert (first.name, second.name) == ("predictions", "wrong")
    assert (first.confusion.counts.sum(), second.confusion) == (498, None)
    assert [row[0] for row in first.rows] == [f"row {row}" for row in first_of_each(read)]
    assert [row[0] for row in second.rows] == [f"row {row}" for row in first_of_each(wrong)]


@pytest.mark.parametrize("order", ["by class", "mixed"])
@pytest.mark.parametrize("num_classes", [1, 2, 5, 32, 100])
def test_samples_come_from_all_classes(order, num_classes):
    """Also of a table that is sorted by class, and of one with more classes than there are samples."""
    rows = np.arange(40 * num_classes)
    labels = rows // 40 if order == "by class" else rows % num_classes
    some, table = prediction_table.SomeRows(), pa.table({ROW: rows, "label": labels})
    for start in range(0, len(rows), 64):
        some.add(table.slice(start, 64), [str(label) for label in labels[start : start + 64]])
    found = some.table()
    assert len(found) == SAMPLE_ROWS
    assert found[ROW].to_pylist() == sorted(found[ROW].to_pylist())
    counts = np.bincount(found["label"].to_numpy(), minlength=num_classes)
    assert counts.max() - counts.min() <= 1
    if num_classes == 100:
        assert np.flatnonzero(counts)[[0, -1]].tolist() == [0, 99]


@pytest.mark.parametrize("kind", ["csv", pytest.param("parquet", marks=pytest.mark.slow)])
def test_file_is_the_same_at_any_world_size(folder, kind):
    bad = frozenset([0, 77, *range(640, 704), 9_999])  # including a whole block
    written = {}
    for world in (1, 2, 3):
        rows = Rows(NUM_ROWS, bad)
        counts = run_ranks(world, on_ranks, folder, f"{world}.{kind}", rows, group=False)
        assert counts == [(NUM_ROWS, sorted(bad))] + [(0, [])] * (world - 1)
        written[world] = (folder / f"{world}.{kind}").read_bytes()
    assert written[1] == written[2] == written[3]
    table = pd.read_csv(folder / "1.csv") if kind == "csv" else pq.read_table(folder / "1.parquet").to_pandas()
    assert list(table) == ["id", "prediction", "label", "score_ä,b", "score_7", "score_c"]
    assert table["id"].tolist() == [f"row {row}" for row in range(NUM_ROWS)]
    assert table["label"].tolist() == [row % 3 for row in range(NUM_ROWS)]
    assert set(np.flatnonzero(table["prediction"].isna())) == bad
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("bad", [range(64), range(64, 128), range(300)])
def test_ranks_without_a_readable_row_do_not_leave_a_sharded_model_to_the_others(folder, bad):
    rows = Rows(500, frozenset(bad))
    write(folder, "one.csv", rows)
    assert run_ranks(2, on_sharded_ranks, folder, "two.csv", rows, group=False) == [list(bad), []]
    assert (folder / "one.csv").read_bytes() == (folder / "two.csv").read_bytes()


@pytest.mark.parametrize(
    ("fail_at", "fails", "message"),
    [(70, None, "this row is broken"), (None, "known", "division by zero"), (None, "predictions", "division by zero")],
)
def test_an_error_on_one_rank_ends_all_ranks_of_a_sharded_model(folder, fail_at, fails, message):
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, on_sharded_ranks, folder, "out.csv", Rows(1000, fail_at=fail_at), fails, group=False)


def test_scores_do_not_depend_on_later_rows(folder):
    write(folder, "all.parquet", Rows(200))
    write(folder, "some.parquet", Rows(70))
    every, some = (pq.read_table(folder / f"{name}.parquet").to_pandas() for name in ("all", "some"))
    pd.testing.assert_frame_equal(every[:70], some, check_exact=True)
    scores = every[["score_ä,b", "score_7", "score_c"]].to_numpy()
    with torch.no_grad():
        expected = model()(Rows(200).batch(np.arange(200), None).inputs).softmax(1).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert [("ä,b", "7", "c")[place] for place in scores.argmax(1)] == every["prediction"].astype(str).tolist()


def test_numbers_in_csv_round_trip_exactly(folder):
    write(folder, "a.csv", Rows(200))
    write(folder, "a.parquet", Rows(200))
    text = pd.read_csv(folder / "a.csv", dtype={"score_c": np.float32})
    assert (text["score_c"] == pq.read_table(folder / "a.parquet").to_pandas()["score_c"]).all()


def test_carriage_returns_in_text_are_no_line_ends():
    table = pa.table({"id": ["a\rb", "c"], "label": pa.array([1, None], pa.int64()), "score": [0.5, 0.25]})
    assert prediction_table._csv(table, header=True) == b'"id","label","score"\n"a\rb",1,0.5\n"c","",0.25\n'


@pytest.mark.parametrize("world", [1, 2])
def test_error_keeps_the_previous_file(folder, world):
    (folder / "out.csv").write_text("before")
    with pytest.raises(RankFailure, match="this row is broken"):
        run_ranks(world, on_ranks, folder, "out.csv", Rows(1000, fail_at=70), group=False)
    assert (folder / "out.csv").read_text() == "before"
    assert not list(folder.glob(".*.tmp"))


def test_only_an_error_of_the_file_is_one_of_writing(folder, monkeypatch):
    """The task's own code may read files, too."""

    def fails(*_, **__):
        raise FileNotFoundError(2, "No such file", "lookup.bin")

    with monkeypatch.context() as patch:
        patch.setattr(ThreeClasses, "known", fails)
        with pytest.raises(FileNotFoundError) as caught:
            write(folder, "out.csv", Rows(10))
    assert not isinstance(caught.value, predictions.TableError)
    monkeypatch.setattr(prediction_table, "_csv", fails)
    with pytest.raises(predictions.TableError, match="No such file") as written:
        write(folder, "out.csv", Rows(10))
    assert written.value.filename == str(folder / "out.csv")
    assert not [path for path in folder.iterdir() if path.name.startswith("out.csv")]


def test_a_file_that_cannot_be_opened_leaves_no_lock(folder):
    block = Block(pa.table({"id": [1] * GROUP_ROWS, "prediction": [2] * GROUP_ROWS}), [], {}, {})
    table = PredictionFile(folder / "x.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(PermissionError))
        with pytest.raises(PermissionError):
            table.add(block)
    table.discard()
    again = PredictionFile(folder / "x.csv")
    again.add(block)
    assert again.finish().rows == GROUP_ROWS


def test_stop_writes_nothing(folder):
    stop = Stop(Runtime())
    stop.request("SIGTERM")
    assert write(folder, "out.csv", Rows(1000), stop=stop) is None
    assert not (folder / "out.csv").exists()


def test_unreadable_rows_only_is_an_error(folder):
    with pytest.raises(DataError, match="none of the rows could be read .tried: 100"):
        write(folder, "out.csv", Rows(100, frozenset(range(100))))
    assert not (folder / "out.csv").exists()


def test_input_shape_that_does_not_fit_the_model(folder):
    predictor = predictions.Predictor(make_config(folder), Runtime(), ThreeClasses(Rows(5)), torch.nn.Linear(36, 3))
    with pytest.raises(DataError, match=r"cannot process inputs of shape \(37,\)"):
        predictions.write(predictor, Loader(Rows(5), 0, CPU), Stop(Runtime()), folder / "out.csv", ProgressBar(1))


def test_out_of_memory_suggests_a_batch_size(folder):
    class Greedy(torch.nn.Module):
        def forward(self, inputs):
            raise torch.OutOfMemoryError("CUDA out of memory")

    config = make_config(folder, batch={"global": 192})
    predictor = predictions.Predictor(config, Runtime(), ThreeClasses(Rows(5)), Greedy())
    with pytest.raises(HarnessError, match=r"batch\.eval_per_rank=16"):
        predictions.write(predictor, Loader(Rows(5), 0, CPU), Stop(Runtime()), folder / "out.csv", ProgressBar(1))


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"global": 256}, 64),
        ({"global": 48, "accumulate": 2}, 24),
        ({"global": None, "per_rank": 12}, 12),
        ({"global": 8, "eval_per_rank": 500}, 500),
    ],
)
def test_block_size_depends_on_the_configuration_only(folder, batch, rows):
    assert predictions.block_rows(make_config(folder, batch=batch)) == rows
