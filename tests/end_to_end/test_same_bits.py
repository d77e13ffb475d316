"""parallel.logical_ranks: the same bits on any number of processes, after any kill and with another number after it."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import EXIT_FAILURE, EXIT_USAGE
from harness.runs import checkpoints
from harness.tools.compare.exactness import differences
from tests.end_to_end.experiment import (
    Kill,
    last_checkpoint,
    newest_checkpoint,
    run,
    run_folder,
    train,
    write_config,
    write_images,
)
from tests.end_to_end.processes import drive_in_terminal
from tests.ranks import free_port, launch_environment, start, wait_for

OWN = {"name": "tests.end_to_end.models.OfItsRank", "args": {}}
FOUR = {
    "parallel": {"logical_ranks": 4},
    "model": OWN,
    "batch": {"global": 16, "accumulate": 2},  # 61 rows: some ranks have one row less, and the last step few
    "precision": {"opt_level": "O1"},
    "train": {"epochs": 3, "log_every": 3, "mixup": 0.4, "clip_norm": 1.0, "ema_decay": 0.9},
    "checkpoint": {"every": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("bits") / "data")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """The run of one process that nothing disturbs."""
    return train(tmp_path_factory.mktemp("alone"), data, 1, **FOUR)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_run_of_several_processes_repeats_that_of_one(tmp_path, data, alone, num_processes):
    assert differences(alone, train(tmp_path, data, num_processes, **FOUR)) == []


def test_killed_runs_go_on_with_another_number_of_processes(tmp_path, data, alone):
    config = write_config(tmp_path, data, **FOUR)
    for num_processes, rank, step in ((4, 3, 2), (2, 0, 5), (1, 0, 7), (3, 2, 10)):
        assert -signal.SIGKILL in run(config, num_processes, kill=Kill(rank, step))
    assert run(config, 2) == [0, 0]
    assert differences(alone, run_folder(config)) == []


def test_without_logical_ranks_the_bits_depend_on_the_number_of_processes(tmp_path, data, alone):
    """Otherwise the tests above would show nothing."""
    plain = {**FOUR, "parallel": {}, "batch": {"global": 16}, "data": {"shard": "global"}}
    one, two = (last_checkpoint(train(tmp_path / str(world), data, world, **plain))["model"] for world in (1, 2))
    assert any(not np.array_equal(one[name], two[name]) for name in one)


def test_more_processes_than_logical_ranks(tmp_path, data):
    config = write_config(tmp_path, data, **{**FOUR, "parallel": {"logical_ranks": 2}})
    assert run(config, 3) == [EXIT_USAGE] * 3
    assert "parallel.logical_ranks" in (tmp_path / "terminal-0.txt").read_text()


def test_another_kind_of_machine_is_refused(tmp_path, data):
    """The capability of the processor is part of what the bits depend on."""
    config = write_config(tmp_path, data, **{**FOUR, "train": {**FOUR["train"], "max_steps": 2}})
    assert run(config) == [0]
    longer = (config, 1, "train.max_steps=4", "launch.threads=2")
    assert run(*longer) == [EXIT_FAILURE]
    assert "threads: 2 now, 1 then" in (tmp_path / "terminal-0.txt").read_text()
    assert checkpoints.read(newest_checkpoint(run_folder(config)))["state"]["step"] == 2


def test_ranks_on_machines_of_two_kinds_are_refused(tmp_path, data):
    config, port = write_config(tmp_path, data, **FOUR), free_port()
    kinds = ("SSE41", "AVX2")
    ranks = [
        start(train_all, ([str(config)], rank, 2, [port]), {"ONEDNN_MAX_CPU_ISA": kind})
        for rank, kind in enumerate(kinds)
    ]
    assert wait_for(ranks, 90) == [0, 0]  # whatever the training has ended with
    text = "".join(Path(f"{config}.{rank}.txt").read_text() for rank in range(2))  # the first to notice says it
    assert all(kind in text for kind in kinds), text
    assert "remove parallel.logical_ranks" in text
    assert not (run_folder(config) / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # each process compiles, on a busy machine
def test_compiled_models(tmp_path, data):
    model = {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}, "compile": True}
    settings = {**FOUR, "model": model, "runtime": {"device": "cpu", "timeout_s": 600}}
    one, two = (train(tmp_path / str(world), data, world, limit_s=850, **settings) for world in (1, 2))
    assert differences(one, two) == []


# The table: every pair of a level, an optimizer and features.

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "adamw": {"name": "adamw", "lr": 0.01, "momentum": None},
    "fused_lamb": {"name": "fused_lamb", "lr": 0.01, "momentum": None},
    "larc": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "larc": {}},
}
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
FEATURES: dict[str, dict[str, Any]] = {  # dropout, batch norm, augmentation and an uneven last batch are in all
    "mixup": {"train": {"mixup": 0.4}},
    "clipping": {"train": {"clip_norm": 0.5}},
    "accumulation": {"batch": {"accumulate": 2}},
    "ema": {"train": {"ema_decay": 0.9}},
    "plateau": {"schedule": {"name": "plateau", "warmup": None, "args": {"patience": 0}}},
    "overflow": {"model": {"args": {"overflows": True}}},
    "channels_last": {"model": {"channels_last": True}},
    "strided": {"data": {"shard": "strided"}},
    "global": {"data": {"shard": "global"}},
}


def table() -> list[tuple[str, str, tuple[str, ...]]]:
    """(level, optimizer, features): each level with each optimizer, and the features that add most of the pairs that
    are still missing."""
    impossible = {("strided", "global"), ("O3", "overflow")}  # O3 has no loss scale that could fall
    missing = {*itertools.combinations([*LEVELS, *OPTIMIZERS, *FEATURES], 2)} - impossible
    choices = [
        tuple(name for name, chosen in zip(FEATURES, bits, strict=True) if chosen)
        for bits in itertools.product([True, False], repeat=len(FEATURES))
    ]
    rows = []
    for level, optimizer in itertools.product(LEVELS, OPTIMIZERS):
        pairs = {features: {*itertools.combinations([level, optimizer, *features], 2)} for features in choices}
        possible = [features for features in choices if not pairs[features] & impossible]
        features = max(possible, key=lambda features: len(pairs[features] & missing))
        missing -= pairs[features]
        rows.append((level, optimizer, features))
    assert all({*pair} <= {*LEVELS} or {*pair} <= {*OPTIMIZERS} for pair in missing)
    return rows


def settings_of(row: tuple[str, str, tuple[str, ...]], num: int) -> dict[str, Any]:
    level, optimizer, features = row
    found: dict[str, Any] = {
        "parallel": {"logical_ranks": num},
        "model": OWN,
        "batch": {"global": 4 * num},
        "precision": {"opt_level": level},
        "optimizer": OPTIMIZERS[optimizer],
        "train": {"epochs": 2, "log_every": 2},
    }
    for name in features:
        for section, values in FEATURES[name].items():
            found[section] = {**found.get(section, {}), **values}
    return found


def train_all(configs: list[str], rank: int, world_size: int, ports: list[int]) -> None:
    """Train each of ``configs`` in turn, as one of several ranks, in this process."""
    for config, port in zip(configs, ports, strict=True):
        os.environ.update(launch_environment(rank, world_size, port) if world_size > 1 else {})
        with suppress(SystemExit):
            drive_in_terminal(["-c", config], f"{config}.{rank}.txt")


@pytest.mark.slow
@pytest.mark.timeout(3000)  # on a busy machine; 2 to 4 minutes on two quiet cores
@pytest.mark.parametrize(("num", "processes"), [(8, (1, 2, 3, 4, 8)), (6, (1, 2, 3))])
def test_every_level_and_optimizer(tmp_path, data, num, processes):
    rows = table()
    folders: dict[int, list[Path]] = {}
    for world_size in processes:
        configs = [
            write_config(tmp_path / f"{world_size}-{place}", data, **settings_of(row, num))
            for place, row in enumerate(rows)
        ]
        ports = [free_port() for _ in rows]
        arguments = [([*map(str, configs)], rank, world_size, ports) for rank in range(world_size)]
        codes = wait_for([start(train_all, given) for given in arguments], 1200)
        assert codes == [0] * world_size
        folders[world_size] = [*map(run_folder, configs)]
    different = {
        (row, world_size): found
        for world_size in processes[1:]
        for row, one, other in zip(rows, folders[1], folders[world_size], strict=True)
        if (found := differences(one, other))
    }
    assert different == {}
