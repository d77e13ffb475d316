"""Steps as CUDA graphs give the run of ordinary steps, bit for bit: on a CPU with a recorder as strict as a graph."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_check import Plan
from harness.apex import amp
from harness.apex.amp import device_scale, scaler
from harness.config import loader
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import ConfigError, TrainingError
from harness.runs import checkpoint, remote
from harness.training import build, loop, step_graph
from harness.training.cuda_recorder import CudaRecorder
from harness.training.step_graph import StepGraphs
from tests.conftest import ROOT
from tests.fixtures import make_config, write_rows
from tests.recorder import OpRecorder

HERE = "tests.training.test_step_graph"
ROWS, BATCH = 30, 4  # seven full batches and one of two rows in an epoch
CPU = torch.device("cpu")


class Net(nn.Module):
    """Layers with random numbers and statistics. ``overflow``: gradients are infinite every so many steps; ``fault``:
    what a graph cannot repeat."""

    def __init__(self, num_classes: int, overflow: int = 0, fault: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2))
        self.head = nn.Linear(144, num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.overflow, self.fault = overflow, fault

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> logits (batch, classes)."""
        logits = self.head(self.layers(images))
        if self.training:
            self.steps += 1
            if self.overflow and logits.requires_grad:
                factor = torch.where(self.steps % self.overflow == 0, torch.inf, 1.0)
                logits.register_hook(lambda gradient: gradient * factor.to(gradient.dtype))
            if self.fault == "reads":
                logits = logits * (2.0 if logits.sum().item() > 0 else 1.0)
            elif self.fault == "draws":
                logits = logits * random.random()
            elif self.fault == "replaces":
                self.steps = self.steps + 1
        return logits


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in this process; ``graphs``: the recorder, or None for ordinary steps of the same arithmetic."""
    write_rows(tmp_path, "train", ROWS)
    write_rows(tmp_path, "eval", 6)
    monkeypatch.setattr(build.determinism, "require", lambda level: None)  # it changes settings of the whole process
    for module in (scaler, device_scale):
        monkeypatch.setattr(module, "WINDOW", 5)  # so that the loss scale grows
    monkeypatch.setattr(step_graph, "WINDOW", 3)  # so that several end between two log lines

    def begin(name, graphs, *overrides, device=CPU, **args):
        model = {"name": f"{HERE}.Net", "args": args}
        words = [f"name={name}", "train.epochs=3", "optimizer.lr=0.1", "precision.max_loss_scale=4096", *overrides]
        config = make_config(tmp_path, words, model=model)
        folder = remote.run_folder(config)
        folder.claim(config)
        runtime = Runtime(device=device)
        run = build.build(config, runtime, folder, Stop(runtime))
        if graphs != "off":
            run.graphs = StepGraphs(graphs or OpRecorder(), run, device)
            run.graphs._first = 10**9 if graphs is None else run.graphs._first
        try:
            loop.train(run)
            return facts(run)
        except OSError:
            assert run.started_steps == 12
        finally:
            run.close()
            amp.reset()

    return begin


def facts(run):
    """What must not depend on graphs: the checkpoint, without times, and the log."""
    content = checkpoint.read(run.checkpoints.newest())
    content["ranks"] = [
        {key: value for key, value in flat(of_rank).items() if not key.endswith(("_s", "wait")) and "costs" not in key}
        for of_rank in content["ranks"]
    ]
    content["state"] = {key: value for key, value in content["state"].items() if not key.endswith("_s")}
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    kept = ("split", "step", "epoch", "loss", "lr", "grad_norm", "loss_scale", "skipped", "samples", "samples_skipped",
            "rows_used", "rows_updated", "steps_skipped", "accuracy")  # fmt: skip
    log = [{key: line.get(key) for key in kept} for line in lines]
    return flat({"checkpoint": {key: value for key, value in content.items() if key != "log_offset"}, "log": log})


def flat(tree, place=""):
    """A tree as {path: leaf}; tensors as their bytes."""
    if isinstance(tree, Tensor):
        return {place: (tree.dtype, tuple(tree.shape), tree.cpu().contiguous().view(-1).view(torch.uint8).tolist())}
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, part in pairs for name, leaf in flat(part, f"{place}.{key}").items()}
    return {place: repr(tree)}


CASES = {
    "O0": ["precision.opt_level=O0", "train.clip_norm=0.5"],
    "O1 with overflows": ["precision.opt_level=O1", "model.args.overflow=6", "optimizer.momentum=0.9"],
    "O2 with overflows": ["precision.opt_level=O2", "model.args.overflow=6", "schedule.name=cosine"],
    "O4 with adamw": ["precision.opt_level=O4", "optimizer.name=adamw", "optimizer.weight_decay=0.1"],
    "O1 with adam, groups and overflows": [
        "precision.opt_level=O1", "model.args.overflow=5", "optimizer.name=adam", "train.log_every=1",
        "optimizer.groups=[{match: 'head.*', lr_scale: 0.3}]", "schedule.warmup_steps=9",
    ],
    "O5 with a static scale": ["precision.opt_level=O5", "precision.loss_scale=12.0", "optimizer.momentum=0.9"],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_graphs_train_the_same(train, case):
    recorder = OpRecorder()
    plain, recorded = train("plain", None, *CASES[case]), train("recorded", recorder, *CASES[case])
    assert recorder.replays >= 12
    assert (plain[".checkpoint.state.skipped"] != "0") == ("overflows" in case)
    assert differing(plain, recorded) == []


def differing(one, other):
    return [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]


def test_resume_between_two_counts_is_exact(train, monkeypatch):
    """The run fails at its 13th step, when two more than the ten of its checkpoint were started."""
    words = [*CASES["O1 with overflows"], "checkpoint.every_steps=5", "train.log_every=50"]
    plain, start, failed = train("plain", None, *words), StepGraphs.start, []

    def start_or_fail(graphs, run, *rest):
        if run.started_steps == 12 and not failed:
            failed.append(run.state.step)
            raise OSError("planned")
        return start(graphs, run, *rest)

    monkeypatch.setattr(StepGraphs, "start", start_or_fail)
    train("recorded", OpRecorder(), *words)
    assert failed == [10]
    recorder = OpRecorder()
    assert differing(plain, train("recorded", recorder, *words)) == []
    assert recorder.replays


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "fashion_mnist", "finetune", "mnist", "multi_label", "regression", "text"])
def test_steps_of_shipped_configurations_can_be_recorded(tmp_path, monkeypatch, name):
    monkeypatch.setattr(build.determinism, "require", lambda level: None)
    path, recorder = ROOT / "configs" / f"{name}.yaml", OpRecorder()
    words = Plan("cpu", 1, 0, tmp_path).words(path, 1)
    loader.load(path, [*words, "train.cuda_graphs=true", "runtime.device=cuda"])  # no settings that graphs refuse
    config = loader.load(path, [*words, "batch.global=8", "train.max_steps=9"])
    folder = remote.run_folder(config)
    folder.claim(config)
    run = build.build(config, Runtime(), folder, Stop(Runtime()))
    run.graphs = StepGraphs(recorder, run, CPU)
    try:
        loop.train(run)
    finally:
        run.close()
        amp.reset()
    assert recorder.replays == 5  # after three updates, and one on the memory of the graph


def test_learning_rates_of_float32_give_the_run_without_graphs(train):
    words = ["precision.opt_level=O1", "model.args.overflow=6", "optimizer.lr=0.125", "optimizer.momentum=0.9",
             "schedule.name=step", "schedule.milestones=[1,2]", "schedule.gamma=0.5"]  # fmt: skip
    assert differing(train("without", "off", *words), train("recorded", OpRecorder(), *words)) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reads", "cannot be recorded as a CUDA graph: operation not permitted"),
        ("draws", "random numbers on the host"),
        ("replaces", "makes a new tensor for steps"),
    ],
)
def test_step_that_a_graph_cannot_repeat(train, fault, message):
    with pytest.raises(TrainingError, match=message) as raised:
        train("fails", OpRecorder(), f"model.args.fault={fault}")
    assert "set train.cuda_graphs=false" in raised.value.hint


def test_other_devices_and_several_processes_are_refused(tmp_path):
    config = make_config(tmp_path, ["train.cuda_graphs=true", "runtime.device=auto"])
    with pytest.raises(ConfigError, match="but this run is on cpu"):
        step_graph.require(config, 1, CPU)
    with pytest.raises(ConfigError, match="but 2 processes were started"):
        step_graph.require(config, 2)
    step_graph.require(config, 1, torch.device("cuda", 0))


def test_recorder_is_as_strict_as_a_graph():
    x, total, calls = torch.ones(2), torch.zeros(2), []
    sources = [x]

    def work():
        calls.append(1)
        total.add_(sources[0] * 2)

    replay = OpRecorder().record(work)
    assert total.tolist() == [0.0, 0.0]  # recording does nothing
    sources[0] = torch.full((2,), 100.0)  # a new tensor in place of the old one is not seen
    replay()
    x.fill_(3.0)
    replay()
    assert total.tolist() == [8.0, 8.0]
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="not permitted"):
        OpRecorder().record(lambda: print(float(x.sum())))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_cuda_graphs_train_the_same(train, case, monkeypatch):
    device = torch.device("cuda", 0)
    words = [*CASES[case], "runtime.device=auto", "precision.backend=harness"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        plain = train("plain", None, *words, device=device)
        recorded = train("recorded", CudaRecorder(device), *words, device=device)
    finally:
        torch.use_deterministic_algorithms(False)
    assert differing(plain, recorded) == []
