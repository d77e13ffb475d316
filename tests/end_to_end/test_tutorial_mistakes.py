"""The mistakes that tutorials of distributed training make, each with what it does and why it cannot happen here.

Where another test holds the harness to it already, ELSEWHERE names that one.
"""

from __future__ import annotations

import pickle
import re
import sys
import zipfile
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler, Subset

from harness.config import loader as configfile
from harness.data.loader import EvalData, Loader, TrainData
from harness.data.shards import RULES, shard
from harness.training import build
from harness.training.models import SmallCNN
from tests.conftest import ROOT
from tests.end_to_end.experiment import NUM_EVAL, NUM_TRAIN, record, run, write_config, write_images
from tests.end_to_end.processes import started
from tests.fixtures import CountingTable, make_config, write_rows
from tests.ranks import run_ranks

ELSEWHERE = {
    "tests/data/test_shards.py": ["test_every_row_once"],
    "tests/data/test_loader.py": ["test_evaluation_counts_each_row_once"],
    "tests/end_to_end/test_parity.py": [
        "test_one_two_and_four_ranks_agree",  # losses are those of the whole
        "test_evaluation_does_not_depend_on_world_size",
    ],
    "tests/data/test_download.py": ["test_processes_that_start_at_once_download_once"],
    "tests/runs/test_checkpoint.py": ["test_a_file_that_would_run_code_is_refused_by_name"],
    "tests/tasks/test_pet_names.py": ["test_no_real_name_is_on_both_sides"],  # a split of rows leaks
    "tests/inference/test_generate.py": ["test_never_an_endless_one_nor_a_blank_in_it"],
}
NUM_ROWS = 10_000


def test_the_other_tests_are_there():
    for path, names in ELSEWHERE.items():
        for name in names:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path}::{name}"


# Rows


@pytest.mark.parametrize(("world_size", "expected"), [(4, 0.684), (8, 0.656), (16, 0.644)])
def test_unseeded_permutation_under_a_distributed_sampler(world_size, expected):
    """The split is drawn with a generator that nobody seeded, so each rank has an order of its own; DistributedSampler
    then takes each rank's share of another order. An epoch covers 64 to 70 % of the rows, and some of them many times.
    """
    seen = set()
    for rank in range(world_size):
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1000 + rank))  # as if not seeded
        mine = Subset(range(NUM_ROWS), order.tolist())
        seen |= {mine[index] for index in DistributedSampler(mine, world_size, rank)}
    assert len(seen) / NUM_ROWS == pytest.approx(expected, abs=0.015)

    for rule in RULES:
        rows = np.concatenate([shard(rule, NUM_ROWS, rank, world_size, 0, 0) for rank in range(world_size)])
        assert sorted(rows.tolist()) == list(range(NUM_ROWS))


def _first_order(seed: int, epochs: int) -> list[list[int]]:
    torch.manual_seed(torch.seed())  # whatever this rank's stream is at, the order must not hang on it
    data = TrainData(Loader(CountingTable(40), 0, torch.device("cpu")), "global", _rank(), 2, 10, 1, seed)
    return [
        [row for group in data.groups(epoch, []) for micro in group for row in micro.batch.rows.tolist()]
        for epoch in range(epochs)
    ]


def _rank() -> int:
    return torch.distributed.get_rank()


def test_set_epoch_is_never_called():
    """DistributedSampler deals every epoch alike until it is told the epoch. Here the epoch is part of the question;
    and ranks whose own random streams differ still agree, for the order is of (seed, epoch)."""
    sampler = DistributedSampler(range(40), 2, 0)
    assert list(sampler) == list(sampler)

    ranks = run_ranks(2, _first_order, 5, 3)
    for epochs in ranks:
        assert len({tuple(rows) for rows in epochs}) == 3
    for one, other in zip(*ranks, strict=True):
        assert sorted(one + other) == list(range(40))


# Evaluation


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_on_the_first_rank_while_others_wait(world_size):
    """Rank 0 evaluates all rows and the others wait for it, up to the time limit of their next collective. Here every
    rank has its share, and asks equally often whether to stop."""
    loader = Loader(CountingTable(23), 0, torch.device("cpu"))
    ranks = [EvalData(loader, rank, world_size, 4) for rank in range(world_size)]
    shares = [[row for batch in data.batches() for row in batch.rows.tolist()] for data in ranks]
    assert sorted(chain(*shares)) == list(range(23))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len({data.num_batches() for data in ranks}) == 1


def test_rows_that_are_counted_twice():
    """DistributedSampler fills the last round up with rows it has dealt before: 23 rows on 4 ranks count as 24."""
    padded = list(chain(*(DistributedSampler(range(23), 4, rank, shuffle=False) for rank in range(4))))
    assert len(padded) == 24
    loader = Loader(CountingTable(23), 0, torch.device("cpu"))
    ours = [row for rank in range(4) for batch in EvalData(loader, rank, 4, 5).batches() for row in batch.rows.tolist()]
    assert len(ours) == len(set(ours)) == 23


# One run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run on two ranks."""
    folder = tmp_path_factory.mktemp("tutorial")
    data = write_images(folder / "data")
    config = write_config(folder / "two", data, train={"epochs": 2, "log_every": 3}, data={"shard": "global"})
    assert run(config, 2) == [0, 0]
    return config.parent / "runs" / "run"


def test_loss_of_one_rank_s_last_batch_is_reported(finished):
    """What tutorials print is the last batch's loss on the rank that prints: noise. The record has the mean over all
    rows of all ranks since the last line, so that lines weighted by their rows make the epoch's mean."""
    one = write_config(
        finished.parents[1] / "one", finished.parents[2] / "data",
        train={"epochs": 2, "log_every": 1000}, data={"shard": "global"},
    )  # fmt: skip
    assert run(one) == [0]
    lines = [line for line in record(finished) if line["split"] == "train"]
    (first, *_) = [line for line in record(one.parent / "runs" / "run") if line["split"] == "train"]
    rows = np.diff([0, *(line["samples"] for line in lines if line["epoch"] == 0)])
    losses = [line["loss"] for line in lines if line["epoch"] == 0]
    assert rows.sum() == first["samples"] == NUM_TRAIN
    assert np.average(losses, weights=rows) == pytest.approx(first["loss"], abs=1e-4)


def test_every_row_is_used_and_counted(finished):
    lines = [line for line in record(finished) if "rows_used" in line]
    assert {(line["split"], line["rows_used"]) for line in lines} == {("epoch", NUM_TRAIN), ("eval", NUM_EVAL)}


def test_pickled_state_dict(finished):
    """A pickle runs what it holds when it is loaded. The weights are safetensors; checkpoints load as plain data."""
    weights = finished / "weights.safetensors"
    assert weights.read_bytes()[:1] != pickle.dumps(0)[:1]
    assert not zipfile.is_zipfile(weights)
    assert load_file(weights)
    found = [path for path in (finished / "checkpoints").rglob("*") if path.suffix in (".pt", ".pth")]
    assert found
    for path in found:
        torch.load(path, weights_only=True)


def test_module_prefix_that_has_to_be_worked_around(finished):
    """A wrapped model's state_dict() has names that the bare model does not know."""
    bare = SmallCNN(3, width=4)
    wrapped = torch.nn.DataParallel(bare)
    assert all(name.startswith("module.") for name in wrapped.state_dict())

    bare.load_state_dict(load_file(finished / "weights.safetensors"))


@pytest.mark.slow
def test_hard_coded_port(tmp_path):
    """Two runs on one machine meet at the port that a tutorial wrote into its script, and the second one fails. Here
    nobody writes one down, and two that are launched at once both come to their end."""
    for path in [*(ROOT / "harness").rglob("*.py"), ROOT / "driver.py", *(ROOT / "configs").glob("*.yaml")]:
        if "apex" not in path.parts:
            assert not re.search(r"\b(29500|12355|MASTER_PORT\W+\d\d)", path.read_text()), path
    data = write_images(tmp_path / "data")
    configs = [write_config(tmp_path / name, data, train={"epochs": 1}) for name in ("one", "two")]
    with ExitStack() as running:
        launched = [
            running.enter_context(
                started([ROOT / "launch" / "single_node.sh", "2", config], config.with_name("terminal"),
                        PYTHON=sys.executable)
            )
            for config in configs
        ]  # fmt: skip
        assert [process.wait(240) for process in launched] == [0, 0]


def test_batch_that_grows_with_the_number_of_ranks(tmp_path):
    """A batch size said a rank makes the batch of a step, and with it the training, another one on more ranks. Here it
    is said as batch.global or as batch.per_rank, and both numbers are printed; steps and learning rate follow."""
    write_rows(tmp_path, "train", 64)
    write_rows(tmp_path, "eval", 4)
    sizes = {
        key: [build.sizes(make_config(tmp_path, batch=batch), 64, world) for world in (1, 2, 4)]
        for key, batch in {"global": {"global": 16}, "per_rank": {"global": None, "per_rank": 16}}.items()
    }
    assert [(size.global_batch, size.per_rank) for size in sizes["global"]] == [(16, 16), (16, 8), (16, 4)]
    assert len({(size.steps_per_epoch, size.lr) for size in sizes["global"]}) == 1
    assert [size.global_batch for size in sizes["per_rank"]] == [16, 32, 64]
    with pytest.raises(configfile.ConfigError, match="must be said once"):
        make_config(tmp_path, batch={"global": None})
    config = make_config(tmp_path, batch={"global": 16})
    facts = build.describe(
        config, build.open_task(config, build.Runtime()), sizes["global"][1], 2, torch.device("cpu"), "harness"
    )
    assert facts["batch"] == "8 a rank, 16 in all"
