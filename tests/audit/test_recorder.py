"""The recorder inside a script: it changes no result, and its records hold what the script did."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness.audit.plan import AuditPlan, PlannedKill

HOOK = Path(__file__).parents[2] / "harness" / "audit" / "hook"
TIME_LIMIT_S = 240
BEGIN = """
import copy, hashlib, os, random, sys
import numpy as np
import torch
from torch import nn
torch.manual_seed(3); np.random.seed(3); random.seed(3); torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
x, y = torch.randn(64, 6), torch.randint(3, (64,))
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
def train(model, optimizer=optimizer, epochs=2):
    for epoch in range(epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        model.eval(); model(x); model.train()
"""
END = """
digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in net.state_dict().values()))
digest.update(torch.get_rng_state().numpy().tobytes())
with open(os.environ["RESULT"] + os.environ.get("RANK", ""), "w") as file:
    print(digest.hexdigest(), np.random.random(), random.random(), file=file)
"""
BODIES = {
    "plain": "train(net)",
    "ema": "ema = copy.deepcopy(net)\ntrain(net)\nema.eval()(x); copy.deepcopy(net); torch.save(net, 'whole.pt')",
    "closure": """
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
""",
    "scaler": """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, backoff_factor=2.0**-14)
for inputs, labels in loader:
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(net(inputs).float(), labels)
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "compiled": "train(torch.compile(net, backend='aot_eager'))",
    "compiled in place": "net.compile(backend='aot_eager')\ntrain(net)",
    "compiled step": """
@torch.compile(backend="eager")
def step(inputs, labels):
    loss = nn.functional.cross_entropy(net(inputs), labels)
    loss.backward()
    return loss
for inputs, labels in loader:
    optimizer.zero_grad(); step(inputs, labels); optimizer.step()
""",
    "ddp": """
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(net)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=torch.utils.data.DistributedSampler(data))
train(model)
net.eval()(x)
torch.distributed.destroy_process_group()
__import__("time").sleep(0.5)  # torch aborts if Python ends while a thread of gloo releases its last tensor
""",
    "masters": """
masters = [each.detach().clone().requires_grad_() for each in net.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.01)
for inputs, labels in loader:
    nn.functional.cross_entropy(net(inputs), labels).backward()
    for master, each in zip(masters, net.parameters()):
        master.grad, each.grad = each.grad, None
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_([*net.parameters()], masters)
net.eval()(x)
""",
    "accelerate": """
accelerate = __import__("accelerate").Accelerator(cpu=True)
model, optimizer, loader = accelerate.prepare(net, optimizer, loader)
for inputs, labels in loader:
    with accelerate.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad(); accelerate.backward(loss); optimizer.step()
accelerate.save_state("state")
""",
    "lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False).fit(Module(), loader)
""",
    "transformers": """
import transformers
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, row): return {"inputs": x[row], "labels": y[row]}
arguments = transformers.TrainingArguments("out", num_train_epochs=2, save_steps=4, use_cpu=True, report_to="none")
transformers.Trainer(Model(), arguments, train_dataset=Rows()).train()
""",
}
STEPS = {"closure": 3, "scaler": 4, "accelerate": 4, "compiled step": 4, "masters": 4, "transformers": 16}
EVALUATIONS = {"plain": 2, "ddp": 3, "masters": 1}
LIBRARIES = {"accelerate", "lightning", "transformers"}


class Run:
    """A script in a folder of its own, with or without the recorder."""

    def __init__(self, folder: Path, script: str, plan: dict | None, ranks: int = 1) -> None:
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        (folder / "train.py").write_text(script)
        environ = {**os.environ, "RESULT": str(folder / "result"), "OMP_NUM_THREADS": "1"}
        if plan is not None:
            plan = {**asdict(AuditPlan(str(self.records), roots=(str(folder),))), **plan}
            (folder / "plan.json").write_text(json.dumps(plan))
            environ["RESUME_AUDIT"] = str(folder / "plan.json")
            environ["PYTHONPATH"] = os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")])
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "train.py"], cwd=folder, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self) -> str:
        output = self.process.communicate(timeout=TIME_LIMIT_S)[0]
        assert self.process.returncode == 0, output
        return output

    def lines(self, event: str, rank: int = 0) -> list[dict]:
        files = sorted(self.records.glob(f"rank{rank}-*.jsonl"), key=lambda path: path.stat().st_size)
        lines = [json.loads(line) for line in files[-1].read_text().splitlines()]
        assert not [line for line in lines if line["event"] == "fault"]
        return [line for line in lines if line["event"] == event]


def results(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("result*")}


@pytest.mark.parametrize("name", BODIES)
def test_recorder_changes_no_result(tmp_path, name):
    if name in LIBRARIES and importlib.util.find_spec(name) is None:  # imported only by the script: they set variables
        pytest.skip(f"{name} is not installed")
    ranks = 2 if name == "ddp" else 1
    script = BEGIN + BODIES[name] + END
    Run(tmp_path / "without", script, None, ranks).finish()
    run = Run(tmp_path / "with", script, {}, ranks)
    run.finish()
    expected = results(tmp_path / "without")
    assert len(expected) == ranks
    assert results(tmp_path / "with") == expected
    for rank in range(ranks):
        steps = run.lines("step", rank)
        assert len(steps) == STEPS.get(name, 8)
        assert [step["skipped"] for step in steps] == [name == "scaler" and step["number"] == 1 for step in steps]
        weights = {json.dumps(step["weights"]) for step in steps if not step["skipped"]}
        assert len(weights) == len(steps) - (name == "scaler")
        if name != "compiled step":
            seen = steps[name == "masters" :]  # whose model is known only once the optimizer has copies of its weights
            assert all(step["calls"] and step["calls"][0]["rows"] and step["calls"][0]["out"] for step in seen)
        if name in EVALUATIONS:
            assert run.lines("end", rank)[-1]["evaluations"] == EVALUATIONS[name]


def test_records_tell_what_happened(tmp_path):
    saves = """
torch.save({"net": net.state_dict(), "epoch": 2}, "ck.tmp")
os.replace("ck.tmp", "ck.pt")
torch.load("ck.pt")
"""
    body = BODIES["plain"] + saves
    run = Run(tmp_path, BEGIN + body + END, {})
    run.finish()
    assert [line["after"] for line in run.lines("epoch")] == [0, 4]
    steps = run.lines("step")
    assert [step["number"] for step in steps] == list(range(1, 9))
    assert set(steps[0]["weights"]) == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert set(steps[0]["buffers"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert steps[0]["state"] == {}
    assert set(steps[1]["state"]) >= {"0.weight.exp_avg", "0.weight.step"}
    assert [step["evaluations"] > 0 for step in steps] == [False] * 4 + [True] * 4
    assert [bool(step["samples"]) for step in steps] == [True] + [False] * 7  # again after a checkpoint
    assert [step["others"] is not None for step in steps] == [True] + [False] * 7
    (written,) = run.lines("written")
    assert written["after"] == 8
    assert written["content"]["epoch"] == 2
    assert "net.0.weight" in written["content"]
    (renamed,) = run.lines("renamed")
    assert (renamed["source"], renamed["target"]) == (str(tmp_path / "ck.tmp"), str(tmp_path / "ck.pt"))
    assert [line["path"] for line in run.lines("loaded")] == [str(tmp_path / "ck.pt")]
    (end,) = run.lines("end")
    assert end["weights"] not in [step["weights"] for step in steps]


def test_the_rows_of_a_step_are_those_its_loader_gave(tmp_path):
    """Also if worker processes are ahead, a pass over the data is broken off, or the dataset has no indices."""
    recorded = {}
    for workers in (0, 2):
        body = f"""
loader = torch.utils.data.DataLoader(
    data, batch_size=16, sampler=range(63, -1, -1), num_workers={workers}, persistent_workers={workers > 0}
)
for last in (2, 4):
    for number, (inputs, labels) in enumerate(loader, 1):
        optimizer.zero_grad(); net(inputs).sum().backward(); optimizer.step()
        if number == last: break
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(x)
for inputs in torch.utils.data.DataLoader(Stream(), batch_size=64):
    optimizer.zero_grad(); net(inputs).sum().backward(); optimizer.step()
"""
        run = Run(tmp_path / str(workers), BEGIN + body + END, {})
        run.finish()
        recorded[workers] = [step["rows"] for step in run.lines("step")]
    assert [len(rows) for rows in recorded[0]] == [1] * 6 + [0]
    assert recorded[0][:2] == recorded[0][2:4]
    assert len({rows[0] for rows in recorded[0][2:6]}) == 4
    assert recorded[2] == recorded[0]


def test_the_first_call_is_recorded_as_the_others(tmp_path):
    """Before hooks of the model, such as amp's at O2, which casts the inputs: each resumed start has a first call."""
    body = """
net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
for _ in range(2):
    loss = net(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    run = Run(tmp_path, BEGIN + body + END, {})
    run.finish()
    first, second = (step["calls"][0]["in"] for step in run.lines("step"))
    assert first == second


def test_checkpoints_of_every_kind_are_seen(tmp_path):
    saves = """
import io, pickle
import safetensors.torch
import torch.distributed.checkpoint
state = net.state_dict()
with open("plain.pkl", "wb") as file:
    pickle.dump([1, 2], file)  # no checkpoint
with open("state.pkl", "wb") as file:
    pickle.dump({"net": state, "epoch": 1}, file)
safetensors.torch.save_file(state, "state.safetensors")
torch.distributed.checkpoint.save({"net": state}, checkpoint_id="sharded")
buffer = io.BytesIO()
torch.save({"net": state, "epoch": 1}, buffer)
with open("memory.tmp", "wb") as file:
    file.write(buffer.getvalue())
os.replace("memory.tmp", "memory.pt")
train(net, epochs=1)
safetensors.torch.load_file("state.safetensors")
"""
    run = Run(tmp_path, BEGIN + "train(net, epochs=1)\n" + saves + END, {})
    run.finish()
    seen = {Path(line["path"]).name: line for line in run.lines("written")}
    assert list(seen) == ["state.pkl", "state.safetensors", "sharded", "memory.pt"]
    assert {line["after"] for line in seen.values()} == {4}
    digests = {name: line["content"] for name, line in seen.items()}
    assert digests["state.pkl"] == digests["memory.pt"]
    assert digests["state.pkl"]["epoch"] == 1
    weight = digests["state.safetensors"]["0.weight"]
    assert digests["state.pkl"]["net.0.weight"] == digests["sharded"]["net.0.weight"] == weight
    assert [Path(line["path"]).name for line in run.lines("loaded")] == ["state.safetensors"]


@pytest.mark.parametrize(("place", "number", "steps"), [("step", 6, 5), ("checkpoint", 2, 8), ("write", 2, 8)])
def test_stops_itself_at_the_planned_place(tmp_path, place, number, steps):
    body = "for name in ('a.pt', 'b.pt'):\n    train(net, epochs=1)\n    torch.save(net.state_dict(), name)\n"
    run = Run(tmp_path, BEGIN + body + END, {"kill": asdict(PlannedKill(place, number))})
    deadline = time.monotonic() + TIME_LIMIT_S
    mark = run.records / "mark.json"
    while not mark.exists() and time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.05)
    content = json.loads(mark.read_text())
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate(timeout=TIME_LIMIT_S)
    assert (content["place"], content["number"], content["step"]) == (place, number, steps)
    assert len(run.lines("step")) == steps
    assert not (tmp_path / "result").exists()
    if place == "write":
        whole, torn = (tmp_path / "a.pt").stat().st_size, (tmp_path / "b.pt").stat().st_size
        assert 0 < torn < whole
        assert len(run.lines("written")) == 1


def test_ends_after_the_planned_step(tmp_path):
    run = Run(tmp_path / "5", BEGIN + BODIES["plain"] + END, {"steps": 5})
    run.finish()
    assert len(run.lines("step")) == 5
    assert run.lines("stopped") == [{"event": "stopped", "number": 5}]
    until = run.lines("step")[3]["weights"]
    run = Run(tmp_path / "until", BEGIN + BODIES["plain"] + END, {"until": until})
    run.finish()
    assert len(run.lines("step")) == 4


def test_names_the_lines_that_draw_random_numbers(tmp_path):
    own = "random.Random(0).random(), torch.rand(2, generator=torch.Generator())"
    body = "noise = np.random.rand()\n" + BODIES["plain"] + f"\nrandom.shuffle([1, 2])\n{own}\n"
    run = Run(tmp_path, BEGIN + body + END, {"draws": True})
    run.finish()
    draws = [json.loads(line) for path in run.records.glob("draws-*") for line in path.read_text().splitlines()]
    source = (tmp_path / "train.py").read_text().splitlines()
    lines = [(draw["stream"], source[draw["line"] - 1]) for draw in draws]
    assert ("numpy", "noise = np.random.rand()") in lines
    assert ("random", "random.shuffle([1, 2])") in lines
    assert "torch" in dict(lines)
    assert own not in dict(map(reversed, lines))  # a generator of its own, no global stream


def test_a_digest_shows_every_bit_on_any_device():
    sys.path.insert(0, str(HOOK))
    try:
        import resume_digest as digest
    finally:
        sys.path.remove(str(HOOK))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64):
        value = torch.arange(37).remainder(2).to(dtype)
        flipped = value.clone()
        flipped.view(torch.uint8)[-1] ^= 1
        swapped = value.clone()
        swapped[[0, 1]] = value[[1, 0]]
        assert digest.tensor(value) == digest.tensor(value.clone()) != digest.tensor(flipped)
        on_device = [int(digest._on_device(each)) for each in (value, value.clone(), flipped, swapped, value[:-1])]
        assert on_device[0] == on_device[1]
        assert len(set(on_device)) == 4
    with mock.patch.object(torch.Tensor, "device", torch.device("cuda")):  # as harness.apex --device cpu tells a script
        told = digest.tensor(torch.arange(37))
    assert told == digest.tensor(torch.arange(37))
    signs = torch.ones(8)
    signs[[1, 3]] = -1
    assert int(digest._on_device(signs)) != int(digest._on_device(torch.ones(8)))
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert digest.tensor(strided) == digest.tensor(strided.contiguous())
    assert isinstance(digest.resolve([digest.tensor(torch.empty(2, device="meta"))])[0], str)
    sets = [digest.content({"rows": rows})["rows"] for rows in ({1, 9}, {9, 1}, {1, 8})]
    assert sets[0] == sets[1] != sets[2]


EVALUATES = """
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model.train()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 2))
    open(f"out/{step}", "w").close()
"""


@pytest.mark.parametrize(
    ("place", "left"), [("evaluation", ["0", "1"]), ("operation", ["0", "1"]), ("step", ["0", "1"])]
)
def test_a_rank_that_is_killed_alone(tmp_path, place, left):
    """At its third evaluation, file and step."""
    for name in ("records", "out"):
        (tmp_path / name).mkdir()
    kill = PlannedKill(place, 3, target="rank")
    path = AuditPlan(str(tmp_path / "records"), kill, roots=(str(tmp_path / "out"),)).write(tmp_path / "plan.json")
    environ = {**os.environ, "PYTHONPATH": str(HOOK), "RESUME_AUDIT": str(path)}
    done = subprocess.run([sys.executable, "-c", EVALUATES], cwd=tmp_path, env=environ, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == left
    mark = json.loads((tmp_path / "records" / "mark.json").read_text())
    assert (mark["place"], mark["number"], mark["target"]) == (place, 3, "rank")
