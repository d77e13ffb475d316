"""Sources of randomness and unsaved attributes are found where they are, and proper ones are not reported."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness.runs.probe_plan import PROBE, ProbePlan
from harness.training.probe import observations
from harness.training.probe.attributes import digest
from tests.end_to_end import planted
from tests.end_to_end.planted import line_of, write_planted
from tests.end_to_end.processes import driver
from tests.ranks import wait_for


def observed(folder: Path, plant: str, steps: tuple[int, ...] = (), **settings) -> Path:
    """Train with ``plant`` in the task; return the folder of observations."""
    config = write_planted(folder, plant, **settings)
    plan = ProbePlan(observe=str(folder / "observed"), steps=steps).write(folder / "plan.json")
    ranks = [driver(["-c", str(config)], {PROBE: str(plan)}, folder / "terminal.txt")]
    assert wait_for(ranks, 90) == [0], (folder / "terminal.txt").read_text()
    return folder / "observed"


def entries(folder: Path, kind: str) -> list[dict]:
    return [json.loads(line) for path in folder.glob(f"{kind}-*.jsonl") for line in path.read_text().splitlines()]


def test_draws_in_a_loader_process(tmp_path):
    folder = observed(tmp_path, "random-numpy-torch-shuffle-gamma-geometric-separate-counter-managed")
    found = {entry["line"]: entry for entry in entries(folder, "draws") if entry["kind"] == "worker"}
    assert found.keys() == {line_of(plant) for plant in ("random", "numpy", "torch", "shuffle", "gamma", "geometric")}
    assert {entry["file"] for entry in found.values()} == {planted.__file__}
    assert found[line_of("random")]["function"] == "random.random"
    assert found[line_of("shuffle")]["function"] == "random.shuffle"
    assert found[line_of("numpy")]["function"] == "numpy.random.rand"
    assert found[line_of("geometric")]["function"] == "torch geometric_"
    assert not [entry for entry in entries(folder, "draws") if entry["kind"] == "entropy"]
    changes = entries(folder, "changes")
    assert {entry["name"] for entry in changes} == {"dataset.calls (tests.end_to_end.planted.Rows)"}
    was, now = map(int, changes[0]["values"])
    assert now == was + 1


@pytest.mark.slow
def test_new_random_bits_and_clocks(tmp_path):
    folder = observed(tmp_path, "entropy-unseeded-clock", data={"num_workers": 0})
    found = {(entry["kind"], entry["line"]) for entry in entries(folder, "draws")}
    assert found == {("entropy", line_of("entropy")), ("entropy", line_of("unseeded")), ("clock", line_of("clock"))}


@pytest.mark.slow
def test_streams_that_a_checkpoint_holds_are_not_reported(tmp_path):
    """Without loader processes, the global random numbers belong to the rank, whose checkpoints hold them."""
    folder = observed(tmp_path, "random-numpy-torch-shuffle-managed", data={"num_workers": 0})
    assert entries(folder, "draws") == []


@pytest.mark.slow
def test_attributes_after_a_step(tmp_path):
    model = {"name": f"{planted.__name__}.Counting", "args": {}}
    folder = observed(tmp_path, "", (2, 3), model=model)
    found = [json.loads((folder / f"attributes-0-{step}.json").read_text()) for step in (2, 3)]
    (name,) = [name for name in found[0] if found[0][name] != found[1][name]]
    assert name == "model.calls (tests.end_to_end.planted.Counting)"
    assert [content[name] for content in found] == ["2", "3"]


class Everything(nn.Module):
    """One attribute of each kind that can change."""

    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("dropped", torch.zeros(2), persistent=False)
        self.plain, self.nested, self.counter = torch.zeros(2), {"a": [1, {"b": 2}]}, itertools.count()
        self.chance, self.stream, self.torch_stream = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.itself = self
        self.positions = (index for index in range(9))


CHANGES = {
    "kept": lambda model: model.kept.add_(1),
    "weights": lambda model: model.layer.weight.data.add_(1),
    "statistics": lambda model: model.norm(torch.ones(3, 2)),
    "dropped": lambda model: model.dropped.add_(1),
    "plain": lambda model: model.plain.add_(1),
    "nested": lambda model: model.nested["a"][1].update(b=3),
    "counter": lambda model: next(model.counter),
    "chance": lambda model: model.chance.random(),
    "stream": lambda model: model.stream.random(),
    "torch_stream": lambda model: torch.rand(1, generator=model.torch_stream),
    "shared": lambda model: setattr(Everything, "shared", Everything.shared + 1),
    "layer.extra": lambda model: setattr(model.layer, "extra", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_digest_shows_what_no_state_dict_holds(name):
    model = Everything()
    before = digest({"model": model})
    CHANGES[name](model)
    after = digest({"model": model})
    found = {key.partition(" ")[0] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    saved = name in ("kept", "weights", "statistics")
    expected = {"nested": "model.nested['a'][1]['b']", "shared": "Everything.shared"}.get(name, f"model.{name}")
    assert found == (set() if saved else {expected})


def test_operations_without_a_deterministic_implementation(tmp_path):
    observer = observations._Observer(str(tmp_path), 0, ())
    text = "scatter_add_cuda_kernel does not have a deterministic implementation, but you set ..."
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: observer.warned(message)
        warnings.warn(text)
        warnings.warn("something else")
    (entry,) = entries(tmp_path, "draws")
    assert (entry["kind"], entry["function"], entry["file"]) == ("op", "scatter_add_cuda_kernel", __file__)
