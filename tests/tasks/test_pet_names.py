"""The task pet_names: two kinds of rows with comparable metrics that do not depend on batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.config.schema import ModelSection
from harness.data.names import ALPHABET, STOP
from harness.errors import ConfigError, DataError
from harness.tasks.pet_names.coded import encode
from harness.tasks.pet_names.config import Task
from harness.tasks.pet_names.task import context
from harness.training.evaluation.sums import Sums
from tests.datasets import NAMES, write_names

SIZE = len(ALPHABET)


@pytest.fixture
def path(tmp_path):
    return str(write_names(tmp_path / "names.txt"))


def opened(path, **options):
    return Task(name="pet_names", names=path, **options).open(0, None)


class Bigram(torch.nn.Module):
    """Logits that depend on the last character only, so both kinds of rows must give the same metrics."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        table = torch.randn(num_characters, num_characters, generator=torch.Generator().manual_seed(1))
        self.table = torch.nn.Parameter(table)

    def forward(self, codes):
        return self.table[codes]


class Counting(Bigram):
    """With a BatchNorm over the positions of a window."""

    def __init__(self, num_characters: int) -> None:
        super().__init__(num_characters)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, codes):
        return self.norm(super().forward(codes))


class Stateful(Bigram):
    def forward(self, codes):
        return super().forward(codes), codes


class Short(Bigram):
    def forward(self, codes):
        return super().forward(codes)[..., :5]


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [("Stateful", "an object of type tuple", "a tensor alone"), ("Short", r"\(2, 8, 5\)", "num_characters")],
)
def test_a_model_that_returns_no_logits_for_each_position(path, name, found, hint):
    task = opened(path)
    with pytest.raises(ConfigError, match=rf"(?s){name} returns {found} for 2 rows, not outputs of shape .* {hint}"):
        task.model(ModelSection(name=f"tests.tasks.test_pet_names.{name}"))


def test_a_new_model_has_seen_no_batch(path):
    model = opened(path).model(ModelSection(name="tests.tasks.test_pet_names.Counting"))
    assert (model.training, model.norm.num_batches_tracked.item()) == (True, 0)


def evaluated(task, num_parts: int = 1, model=None) -> dict[str, float]:
    model = model or task.model(ModelSection(name="tests.tasks.test_pet_names.Bigram"))
    sums = Sums()
    with torch.no_grad():
        for rows in np.array_split(np.arange(len(task.eval)), num_parts):
            batch = task.eval.batch(rows, None)
            sums.add(task.evaluate(model(task.prepare(batch.inputs)), batch.targets))
    return task.report(sums)


def test_names_are_split_without_overlap(path):
    task = opened(path)
    assert sorted([*task.train_names, *task.eval_names]) == sorted(NAMES)
    assert not set(task.train_names) & set(task.eval_names)
    assert len(task.train) == sum(len(name) + 1 for name in task.train_names)
    assert len(opened(path, rows="names").train) == len(task.train_names)
    assert opened(path).fingerprint == task.fingerprint


def test_rows_of_both_kinds(path):
    task = opened(path, window=3)
    name = task.train_names[0]
    batch = task.train.batch(np.array([0, 2]), 0)
    assert batch.inputs.tolist() == [[0, 0, 0], encode(f"*{name[:2]}").tolist()]
    assert batch.targets.tolist() == [encode(f"**{name[0]}").tolist(), encode(name[:3]).tolist()]
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.uint8, torch.int64)
    task = opened(path, rows="names")
    batch = task.train.batch(np.array([0]), 0)
    assert batch.inputs[0].tolist() == encode("*" + name).tolist()
    assert batch.targets[0].tolist() == encode(name + STOP).tolist()


def test_char_loss_counts_each_character_once(path):
    of_windows, of_names = (evaluated(opened(path, rows=rows)) for rows in ("windows", "names"))
    model = Bigram(SIZE)
    nats = []
    for name in opened(path).eval_names:
        log = model(torch.from_numpy(encode("*" + name)).long()).log_softmax(1)
        nats += [-log[place, code].item() for place, code in enumerate(encode(name + STOP))]
    for report in (of_windows, of_names):
        assert report["char_loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert of_windows["char_accuracy"] == of_names["char_accuracy"]


def test_window_loss_counts_all_positions_of_all_windows(path):
    """With whole names, padding counts as a loss of zero."""
    window = 5
    task = opened(path, window=window)
    model = Bigram(SIZE)
    total = blanks = count = 0.0
    for name in task.eval_names:
        line = "*" * window + name + STOP
        for first in range(len(name) + 1):
            codes = torch.from_numpy(encode(line[first : first + window + 1])).long()
            log = model(codes[:-1]).log_softmax(1)
            for place, code in enumerate(codes[1:].tolist()):
                count += 1
                total -= log[place, code].item()
                blanks -= log[place, code].item() * (code == 0)
    assert evaluated(task)["window_loss"] == pytest.approx(total / count, rel=1e-5)
    assert evaluated(opened(path, window=window, rows="names"))["window_loss"] == pytest.approx(
        (total - blanks) / count, rel=1e-5
    )


@pytest.mark.parametrize("rows", ["windows", "names"])
def test_metrics_do_not_depend_on_batches(path, rows):
    task = opened(path, rows=rows)
    assert len(task.eval_names) >= 3
    whole = evaluated(task)
    for num_parts in (2, 3):
        assert evaluated(task, num_parts) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("rows", ["windows", "names"])
def test_loss_is_a_mean_over_rows(path, rows):
    """The weighted losses of any split of the rows add up to the loss of the whole."""
    task = opened(path, rows=rows)
    model = Bigram(SIZE)

    def loss(rows):
        batch = task.train.batch(rows, 0)
        return task.loss(model(task.prepare(batch.inputs)), batch.targets)

    numbers = np.arange(len(task.train))
    parts = np.split(numbers, [3, 20])
    whole = loss(numbers)
    torch.testing.assert_close(sum(loss(part) * len(part) for part in parts) / len(numbers), whole)
    if rows == "names":  # over all rows: nats per character
        num_real = sum(len(name) + 1 for name in task.train_names)
        batch = task.train.batch(numbers, 0)
        log = model(task.prepare(batch.inputs)).log_softmax(2).gather(2, batch.targets[..., None])[..., 0]
        torch.testing.assert_close(whole, -(log * (batch.targets != 0)).sum() / num_real)


def test_uniform_model_has_the_loss_of_the_alphabet_size(path):
    zero = Bigram(SIZE)
    torch.nn.init.zeros_(zero.table)
    for rows in ("windows", "names"):
        assert evaluated(opened(path, rows=rows), model=zero)["char_loss"] == pytest.approx(math.log(SIZE))


def test_context_for_generation_matches_training_rows(path):
    prefixes = torch.from_numpy(encode("abc")).long()[None]
    assert context(opened(path, window=5).options, prefixes).tolist() == [encode("**abc").tolist()]
    assert context(opened(path, window=2).options, prefixes).tolist() == [encode("bc").tolist()]
    assert context(opened(path, rows="names").options, prefixes).tolist() == [encode("*abc").tolist()]
    nothing = torch.zeros(3, 0, dtype=torch.int64)
    assert context(opened(path, window=2).options, nothing).tolist() == [[0, 0]] * 3
    assert context(opened(path, rows="names").options, nothing).tolist() == [[0]] * 3


def test_notes_and_unusable_files(path, tmp_path):
    with open(path, "a") as file:
        file.write("r2d2\n\n")
    assert opened(path).notes == [f"{path}: skipped 2 lines with characters other than a-z, space, - and ."]
    assert opened(path).label_counts(0, 3) is None
    assert opened(path).signature["classes"] == list(ALPHABET)
    with pytest.raises(DataError, match="type: harness data pet_names"):
        opened(str(tmp_path / "none.txt"))
    (tmp_path / "few.txt").write_text("lucy\nbella\n")
    with pytest.raises(DataError, match="too few distinct names for a training and a validation set: 2"):
        opened(str(tmp_path / "few.txt"))


def test_models_for_other_data_are_rejected(path):
    for name, message in (("small_cnn", "cannot build model"), ("torch.nn.Identity", "returns")):
        with pytest.raises(ConfigError, match=message):
            opened(path).model(ModelSection(name=name))


def test_real_names_are_in_one_set_each(shared_data, tmp_path):
    """The tutorial splits rows instead: lucy, which occurs 468 times, is then in both sets."""
    from harness.tools.data import published

    published.pet_names(tmp_path, str(shared_data / "pet_names"))
    task = opened(str(tmp_path / "names.txt"))
    assert not set(task.train_names) & set(task.eval_names)
    assert (len(task.train_names), len(task.eval_names)) == (12538, 1454)
    lines = (tmp_path / "names.txt").read_text().splitlines()
    assert lines.count("lucy") == 468
    train_rows = np.random.default_rng(0).permutation(lines)[len(lines) // 10 :]
    leaked = np.isin(np.random.default_rng(0).permutation(lines)[: len(lines) // 10], train_rows).mean()
    assert leaked > 0.8  # of the validation rows of such a split
    assert task.train.rows.stream.nbytes + task.train.rows.starts.nbytes < 2_000_000
