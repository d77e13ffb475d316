"""Mistakes that tutorials of distributed training make: what each does, and that it cannot happen here.

ELSEWHERE lists the mistakes that other tests already cover.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler, Subset

from harness.config import loader
from harness.data.loader import EvalData, Loader, TrainData
from harness.data.shards import RULES, shard
from harness.training import build
from harness.training.models.small_cnn import Model as SmallCNN
from tests.conftest import ROOT
from tests.end_to_end.experiment import NUM_TRAIN, of_split, train, write_config
from tests.end_to_end.processes import shell
from tests.fixtures import CountingTable, make_config, write_rows
from tests.ranks import run_ranks

ELSEWHERE = {
    "rows lost or repeated between ranks": "tests/data/test_shards.py",
    "evaluation on rank 0 only, and padding counted": "tests/data/test_loader.py",
    "results that depend on the number of ranks": "tests/end_to_end/test_parity.py",
    "every rank downloads the data": "tests/runs/test_fetch.py",
    "checkpoints that run code when loaded": "tests/runs/test_checkpoint.py",
    "the same name in training and validation": "tests/tasks/test_pet_names.py",
    "generation that never ends": "tests/inference/test_generate.py",
}
NUM_ROWS = 10_000


def test_files_named_here_exist():
    for mistake, path in ELSEWHERE.items():
        assert (ROOT / path).exists(), mistake


# Rows


@pytest.mark.parametrize(("world_size", "expected"), [(4, 0.684), (8, 0.656), (16, 0.644)])
def test_unseeded_permutation_under_distributed_sampler_loses_rows(world_size, expected):
    """With an unseeded split, each rank has a different order, and DistributedSampler takes each rank's share of its
    own. An epoch covers 64 to 70 % of the rows, some of them several times.
    """
    seen = set()
    for rank in range(world_size):
        order = torch.randperm(
            NUM_ROWS, generator=torch.Generator().manual_seed(1000 + rank)
        )  # stands for an unseeded one
        mine = Subset(range(NUM_ROWS), order.tolist())
        seen |= {mine[index] for index in DistributedSampler(mine, world_size, rank)}
    assert len(seen) / NUM_ROWS == pytest.approx(expected, abs=0.015)

    for rule in RULES:
        rows = np.concatenate([shard(rule, NUM_ROWS, rank, world_size, 0, 0) for rank in range(world_size)])
        assert sorted(rows.tolist()) == list(range(NUM_ROWS))


def _first_order(seed: int, epochs: int) -> list[list[int]]:
    torch.manual_seed(torch.seed())  # the order must not depend on the rank's own random stream
    data = TrainData(Loader(CountingTable(40), 0, torch.device("cpu")), "global", _rank(), 2, 10, 1, seed)
    return [
        [row for group in data.groups(epoch, []) for micro in group for row in micro.batch.rows.tolist()]
        for epoch in range(epochs)
    ]


def _rank() -> int:
    return torch.distributed.get_rank()


def test_order_changes_per_epoch_without_set_epoch():
    """DistributedSampler repeats its order unless set_epoch is called. Here the order depends on (seed, epoch) alone,
    so ranks agree on it even if their own random streams differ."""
    sampler = DistributedSampler(range(40), 2, 0)
    assert list(sampler) == list(sampler)

    ranks = run_ranks(2, _first_order, 5, 3)
    for epochs in ranks:
        assert len({tuple(rows) for rows in epochs}) == 3
    for one, other in zip(*ranks, strict=True):
        assert sorted(one + other) == list(range(40))


# Evaluation


def test_evaluation_pads_no_rows():
    """DistributedSampler pads the last round with repeated rows: 23 rows on 4 ranks count as 24."""
    padded = list(chain(*(DistributedSampler(range(23), 4, rank, shuffle=False) for rank in range(4))))
    assert len(padded) == 24
    loader = Loader(CountingTable(23), 0, torch.device("cpu"))
    ours = [row for rank in range(4) for batch in EvalData(loader, rank, 4, 5).batches() for row in batch.rows.tolist()]
    assert len(ours) == len(set(ours)) == 23


# One run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data) -> Path:
    """The run folder of a finished run on two ranks."""
    settings = {"train": {"epochs": 2, "log_every": 3}, "data": {"shard": "global"}}
    return train(tmp_path_factory.mktemp("tutorial"), data, 2, **settings)


def test_logged_loss_is_the_mean_over_all_ranks_and_rows(tmp_path, data, finished):
    """Tutorials print the loss of one rank's last batch, which is noise. Our log has the mean over all rows of all
    ranks since the previous line, so that lines weighted by their rows give the mean of the epoch."""
    one = train(tmp_path, data, train={"epochs": 2, "log_every": 1000}, data={"shard": "global"})
    lines, (first, *_) = of_split(finished, "train"), of_split(one, "train")
    rows = np.diff([0, *(line["samples"] for line in lines if line["epoch"] == 0)])
    losses = [line["loss"] for line in lines if line["epoch"] == 0]
    assert rows.sum() == first["samples"] == NUM_TRAIN
    assert np.average(losses, weights=rows) == pytest.approx(first["loss"], abs=1e-4)


def test_saved_files_contain_no_code(finished):
    """Loading a pickle can run code. Weights are safetensors, and checkpoints load with weights_only=True."""
    weights = finished / "weights.safetensors"
    assert weights.read_bytes()[:1] != pickle.dumps(0)[:1]
    assert not zipfile.is_zipfile(weights)
    assert load_file(weights)
    found = [path for path in (finished / "checkpoints").rglob("*") if path.suffix in (".pt", ".pth")]
    assert found
    for path in found:
        torch.load(path, weights_only=True)


def test_saved_names_have_no_module_prefix(finished):
    """The state_dict() of a wrapped model has names that the plain model does not have."""
    plain = SmallCNN(3, width=4)
    wrapped = torch.nn.DataParallel(plain)
    assert all(name.startswith("module.") for name in wrapped.state_dict())

    plain.load_state_dict(load_file(finished / "weights.safetensors"))


@pytest.mark.slow
def test_two_launches_at_once_do_not_share_a_port(tmp_path, data):
    """With the hard-coded port of a tutorial, the second run on a machine fails. Here no port is hard-coded, and two
    runs launched at once both finish."""
    for path in [*(ROOT / "harness").rglob("*.py"), ROOT / "driver.py", *(ROOT / "configs").glob("*.yaml")]:
        if "apex" not in path.parts:
            assert not re.search(r"\b(29500|12355|MASTER_PORT\W+\d\d)", path.read_text()), path
    configs = [write_config(tmp_path / name, data, train={"epochs": 1}) for name in ("one", "two")]
    words = [["launch/single_node.sh", "2", str(config)] for config in configs]
    places = [config.with_name("terminal") for config in configs], [config.parent for config in configs]
    with ThreadPoolExecutor() as launch:
        assert list(launch.map(shell, words, *places)) == [0, 0]


def test_batch_is_stated_as_global_or_per_rank(tmp_path):
    """A batch size per rank changes the global batch, and so the training, with the number of ranks. Here the batch is
    stated either way, both numbers are printed, and steps and learning rate follow from it."""
    write_rows(tmp_path, "train", 64)
    write_rows(tmp_path, "eval", 4)
    sizes = {
        key: [build.sizes(make_config(tmp_path, batch=batch), 64, world) for world in (1, 2, 4)]
        for key, batch in {"global": {"global": 16}, "per_rank": {"global": None, "per_rank": 16}}.items()
    }
    assert [(size.global_batch, size.per_rank) for size in sizes["global"]] == [(16, 16), (16, 8), (16, 4)]
    assert len({(size.steps_per_epoch, size.lr) for size in sizes["global"]}) == 1
    assert [size.global_batch for size in sizes["per_rank"]] == [16, 32, 64]
    with pytest.raises(loader.ConfigError, match="exactly one of"):
        make_config(tmp_path, batch={"global": None})
    config = make_config(tmp_path, batch={"global": 16})
    facts = build.describe(
        config, build.open_task(config, build.Runtime()), sizes["global"][1], 2, torch.device("cpu"), "harness"
    )
    assert facts["batch"] == "8 per rank, 16 in total"
