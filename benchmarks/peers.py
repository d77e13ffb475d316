"""Measures training steps of the harness and of harness.apex against hand-written loops and other libraries.

    make bench-peers      or      python -m benchmarks.peers [--rounds 18] [--only TEXT ...]

Each contender trains in processes of its own, one thread per rank, on batches in memory. They take turns in short
rounds of equal length, so that a busy machine slows all of them alike. They are restarted STARTS times, because the
speed of a process also depends on where its memory lies. The reference runs twice: a ratio is the median over the
rounds of a contender's time to the mean of the two in the same round, with the quartiles. How far the two differ is the
noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from harness.distributed import devices

Steps = Callable[[int], float]  # takes that many steps; returns the seconds they took
Batches = list[tuple[Tensor, Tensor]]
LIMIT_S = 300.0  # for a round of any contender
AGAIN = "again"  # the reference in a second process: the noise
STARTS = 3
WARM_UP = 60  # steps: with the harness's first log line, at which it counts the model's arithmetic
RATES: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


@dataclass(frozen=True)
class Case:
    """``contenders`` {name: makes its steps, in a process of its own}; the first is the reference of the others."""

    name: str
    contenders: dict[str, Callable[[], Steps]]
    goals: dict[str, tuple[str, Callable[[Result], bool]]]  # {contender: (in words, whether it is reached)}
    num_steps: int  # per round
    world: int = 1


@dataclass(frozen=True)
class Result:
    """``times``: {contender: microseconds per step of the slowest rank, by round}."""

    case: Case
    times: dict[str, list[float]]

    @property
    def reference(self) -> list[float]:
        pairs = zip(self.times[next(iter(self.times))], self.times[AGAIN], strict=True)
        return [statistics.mean(pair) for pair in pairs]

    def ratios(self, name: str) -> list[float]:
        return [mine / other for mine, other in zip(self.times[name], self.reference, strict=True)]

    def ratio(self, name: str) -> float:
        return statistics.median(self.ratios(name))

    def overhead(self, name: str) -> float:
        """Microseconds per step more than the reference."""
        return statistics.median(mine - other for mine, other in zip(self.times[name], self.reference, strict=True))

    def rows(self) -> Iterator[list[str]]:
        for name, times in self.times.items():
            goal, reached = self.case.goals.get(name, ("", lambda _: True))
            low, _, high = statistics.quantiles(self.ratios(name), n=4)
            yield [
                self.case.name, name, f"{statistics.median(times):.0f}", f"{self.overhead(name):+.0f}",
                f"{self.ratio(name):.3f}", f"{low:.3f} to {high:.3f}", goal,
                ("yes" if reached(self) else "no") if goal else "",
            ]  # fmt: skip


def measure(case: Case, rounds: int, starts: int = STARTS) -> Result:
    """Let the contenders of ``case`` take turns, in another order each round. Nothing is left running."""
    first = next(iter(case.contenders))
    makers = {first: case.contenders[first], AGAIN: case.contenders[first], **case.contenders}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(starts):
        teams = {name: Team(make, case.world) for name, make in makers.items()}
        try:
            for team in teams.values():
                team.steps(max(case.num_steps, WARM_UP))
            order = list(teams)
            for index in range(-(-rounds // starts)):
                start = index % len(order)
                for name in order[start:] + order[:start]:
                    times[name].append(teams[name].steps(case.num_steps) / case.num_steps * 1e6)
        finally:
            for team in teams.values():
                team.stop()
    return Result(case, times)


class Team:
    """The ranks of one contender, each a process that waits for the next number of steps."""

    def __init__(self, make: Callable[[], Steps], world: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.members = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_member, args=(make, rank, world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, mine))

    def steps(self, count: int) -> float:
        """Take ``count`` steps; return the seconds of the slowest rank."""
        for _, pipe in self.members:
            pipe.send(count)
        seconds = []
        for _, pipe in self.members:
            if not pipe.poll(LIMIT_S):
                raise TimeoutError(f"a contender took more than {LIMIT_S:.0f} s for {count} steps")
            seconds.append(pipe.recv())
        return max(seconds)

    def stop(self) -> None:
        for process, _ in self.members:
            process.kill()
            process.join()


def _member(make: Callable[[], Steps], rank: int, world: int, port: int, pipe: Any) -> None:
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = make()
    while True:
        pipe.send(steps(pipe.recv()))


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def timed(step: Callable[[Tensor, Tensor], None], batches: Batches) -> Steps:
    """Steps over ``batches``, again and again."""

    def steps(count: int) -> float:
        start = time.perf_counter()
        for inputs, targets in itertools.islice(itertools.cycle(batches), count):
            step(inputs, targets)
        return time.perf_counter() - start

    return steps


# The training loop


class Transformer(nn.Module):
    """Three layers over the 16 patches of an image of 8x8 pixels; (batch, 1, 8, 8) -> (batch, num_classes)."""

    def __init__(self, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, 64, 2, stride=2)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


@dataclass(frozen=True)
class Recipe:
    """``network``: mlp, cnn or transformer. ``bf16``: mixed precision. ``tuned``: by hand with what the harness does by
    itself, the fused optimizer and memory that is kept for the next step."""

    network: str
    bf16: bool = False
    tuned: bool = False
    compiled: bool = False

    def model(self) -> nn.Module:
        from harness.training.models import mlp, small_cnn

        torch.manual_seed(0)
        model: nn.Module = mlp.Model(10, 1)
        if self.network != "mlp":
            model = small_cnn.Model(10, batch_norm=True) if self.network == "cnn" else Transformer(10)
        model(torch.zeros(2, 1, 8, 8))  # for the sizes of lazy layers
        return model

    def batches(self) -> Batches:
        shape, generator = (64 // _world(), 1, 8, 8), torch.Generator().manual_seed(1)
        return [
            (torch.rand(shape, generator=generator), torch.randint(10, shape[:1], generator=generator))
            for _ in range(16)
        ]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), fused=self.tuned or None, **RATES)


def by_hand(recipe: Recipe) -> Steps:
    if recipe.tuned:
        devices.keep_freed_memory(torch.device("cpu"))
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    if _world() > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if recipe.compiled:
        model.compile()

    def step(inputs: Tensor, targets: Tensor) -> None:
        if recipe.bf16:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), targets)
        else:
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, recipe.batches())


def fabric(recipe: Recipe) -> Steps:
    from lightning.fabric import Fabric

    own = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if recipe.bf16 else "32-true")
    built = recipe.model()
    model, optimizer = own.setup(built, recipe.optimizer(built))

    def step(inputs: Tensor, targets: Tensor) -> None:
        with own.autocast():
            loss = F.cross_entropy(model(inputs), targets)
        own.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, recipe.batches())


def accelerate(recipe: Recipe) -> Steps:
    from accelerate import Accelerator

    own = Accelerator(cpu=True, mixed_precision="bf16" if recipe.bf16 else "no")
    built = recipe.model()
    model, optimizer = own.prepare(built, recipe.optimizer(built))

    def step(inputs: Tensor, targets: Tensor) -> None:
        with own.autocast():
            loss = F.cross_entropy(model(inputs), targets)
        own.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, recipe.batches())


@dataclass(frozen=True)
class Repeated:
    """Lightning takes a list for several data loaders."""

    batches: Batches
    count: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.islice(itertools.cycle(self.batches), self.count)

    def __len__(self) -> int:
        return self.count


def lightning(recipe: Recipe) -> Steps:
    """The Trainer with ``barebones``: without logging and checkpoints. The start of ``fit`` is not measured."""
    import logging
    import warnings

    from lightning import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.started = recipe.model(), 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.started = self.started or time.perf_counter()
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return recipe.optimizer(self.model)

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.started

    module, batches = Module(), recipe.batches()

    def steps(count: int) -> float:
        module.started = 0.0
        precision = "bf16-mixed" if recipe.bf16 else "32-true"
        trainer = Trainer(accelerator="cpu", devices=1, barebones=True, precision=precision, max_epochs=1)
        trainer.fit(module, Repeated(batches, count))
        return module.seconds

    return steps


@dataclass(frozen=True)
class InMemory:
    """Replaces ``TrainData``: the groups of an endless epoch, created once."""

    data: Any
    made: list[Any]
    num_steps: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def steps_left(self, segments: Any) -> int:
        return self.num_steps + 1  # one more than exist, so that the epoch never ends and its end is not measured

    def groups(self, epoch: int, segments: Any) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.made), self.num_steps)


def harness(recipe: Recipe, *overrides: str) -> Steps:
    """Our loop with all that it does for a user: it sets the learning rate in each step, adds up the loss and the times
    of the phases, counts rows, writes a log line every 50 steps and checks for stops."""
    from harness.config import loader
    from harness.data import digits
    from harness.distributed.launch_env import detect
    from harness.distributed.runtime import open_runtime
    from harness.distributed.stop import Stop
    from harness.runs.run_dir import RunFolder
    from harness.training import build, loop

    multiprocessing.set_start_method("fork", force=True)
    folder = Path(tempfile.mkdtemp())
    data = Path(tempfile.gettempdir()) / "apex-harness-digits"
    digits.write(data)
    optimizer = [f"optimizer.{key}={value}" for key, value in RATES.items()]
    name = {"cnn": "small_cnn", "transformer": "benchmarks.peers.Transformer"}.get(recipe.network, recipe.network)
    args = "model.args={batch_norm: true}" if recipe.network == "cnn" else "model.args=null"
    config = loader.load(
        "configs/digits.yaml",
        [f"output={folder}", f"task.train_csv={data}/train.csv", f"task.eval_csv={data}/eval.csv", f"task.root={data}",
         f"model.name={name}", args, "optimizer.name=sgd", *optimizer,
         f"precision.opt_level={'O4' if recipe.bf16 else 'O0'}", "schedule.warmup_epochs=0", "train.epochs=100000",
         "train.log_every=50", "checkpoint.every_steps=null", "data.num_workers=0", "batch.global=64",
         f"model.compile={str(recipe.compiled).lower()}", *overrides],
    )  # fmt: skip
    run_folder = RunFolder(folder / "run")
    run_folder.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    runtime = stack.enter_context(open_runtime(detect(os.environ)))
    run = build.build(config, runtime, run_folder, Stop(runtime))
    made = list(run.train_data.groups(0, []))[:16]
    groups = [
        [dataclasses.replace(group[0], batch=dataclasses.replace(group[0].batch, inputs=inputs, targets=targets))]
        for group, (inputs, targets) in zip(made, recipe.batches(), strict=True)
    ]
    run.task = dataclasses.replace(run.task)
    object.__setattr__(run.task, "prepare", lambda inputs: inputs)  # done, as for the others
    data_of_run = run.train_data

    def steps(count: int) -> float:
        run.train_data, run.state.segments = InMemory(data_of_run, groups, count), []
        start = time.perf_counter()
        loop.epoch(run)
        return time.perf_counter() - start

    steps.stack = stack  # type: ignore[attr-defined]  # else it ends here, and the process group with it
    return steps


def below(share: float, of: str) -> tuple[str, Callable[[Result], bool]]:
    words = f"overhead at most {share:g} of {of}'s" if share != 1 else f"overhead below {of}'s"
    return words, lambda result: result.overhead("harness") <= share * result.overhead(of)


def at_most(ratio: float, name: str) -> tuple[str, Callable[[Result], bool]]:
    return f"ratio at most {ratio:g}", lambda result: result.ratio(name) <= ratio


def loops() -> Iterator[Case]:
    peers = {"Fabric": fabric, "accelerate": accelerate, "Lightning, barebones": lightning}
    for network, num_steps in (("mlp", 200), ("cnn", 20)):
        for bf16 in (False, True):
            recipe = Recipe(network, bf16)
            contenders = {"by hand": partial(by_hand, recipe), "harness": partial(harness, recipe)}
            contenders["by hand, tuned"] = partial(by_hand, dataclasses.replace(recipe, tuned=True))
            contenders |= {name: partial(make, recipe) for name, make in peers.items()}
            goal = below(1, "Fabric") if bf16 else below(0.5, "Fabric")
            name = f"{network}, {'bfloat16' if bf16 else 'float32'}"
            yield Case(name, contenders, {"harness": goal if network == "mlp" else at_most(1.01, "harness")}, num_steps)
    recipe = Recipe("cnn")
    two = {"torch DDP by hand": partial(by_hand, recipe), "harness": partial(harness, recipe),
           "harness, overlapped": partial(harness, recipe, "parallel.delay_allreduce=false")}  # fmt: skip
    yield Case("cnn, float32, two ranks", two, {"harness": at_most(1.01, "harness")}, 20, world=2)
    for network in ("mlp", "cnn", "transformer"):
        recipe = Recipe(network, compiled=True)
        two = {"by hand": partial(by_hand, recipe), "harness": partial(harness, recipe)}
        yield Case(f"{network}, float32, compiled", two, {"harness": at_most(1.0, "harness")}, 50)


# harness.apex


def convolutional() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for index in range(8):
        layers += [nn.Conv2d(32 if index else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 256, 10)), torch.randn(16, 3, 16, 16)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 128, 10)), torch.randn(8, 32, 128)


def autocast(make: Callable[[], tuple[nn.Module, Tensor]]) -> Steps:
    """In bfloat16: torch's float16 on a CPU is too slow to compare with."""
    model, inputs = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, [(inputs, torch.zeros(len(inputs), dtype=torch.long))])


def masters_by_hand(make: Callable[[], tuple[nn.Module, Tensor]]) -> Steps:
    """A loop with bfloat16 weights and float32 masters, as O5 has them."""
    model, inputs = make()
    weights = list(model.parameters())
    masters = [weight.detach().clone() for weight in weights]
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.bfloat16()
    optimizer = torch.optim.SGD(masters, lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        F.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return timed(step, [(inputs, torch.zeros(len(inputs), dtype=torch.long))])


def amp_level(make: Callable[[], tuple[nn.Module, Tensor]], level: str) -> Steps:
    from harness.apex import amp

    model, inputs = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step(inputs: Tensor, targets: Tensor) -> None:
        with amp.scale_loss(F.cross_entropy(model(inputs), targets), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, [(inputs, torch.zeros(len(inputs), dtype=torch.long))])


def updates(library: str, name: str) -> Steps:
    """Only the optimizer's steps, over the weights of a transformer."""
    module = torch.optim
    if library == "apex":
        from harness.apex import optimizers as module  # type: ignore[no-redef]
    model, _ = transformer()
    optimizer = getattr(module, name)(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return timed(lambda *_: optimizer.step(), [(torch.zeros(()), torch.zeros(()))])


def norms(synchronized: bool) -> Steps:
    """Forward and backward of a batch norm, alone or over two ranks."""
    from harness.apex import parallel

    torch.distributed.init_process_group("gloo")
    norm = parallel.SyncBatchNorm(64) if synchronized else nn.BatchNorm2d(64)
    inputs = torch.randn(48, 64, 32, 32, requires_grad=True)

    def step(inputs: Tensor, gradient: Tensor) -> None:
        norm(inputs).backward(gradient)
        inputs.grad = None

    return timed(step, [(inputs, torch.randn_like(inputs))])


def parts() -> Iterator[Case]:
    for make in (convolutional, transformer):
        two = {"torch.autocast": partial(autocast, make), "O4": partial(amp_level, make, "O4")}
        yield Case(f"{make.__name__}, O4", two, {"O4": at_most(1.02, "O4")}, 10)
        two = {"by hand": partial(masters_by_hand, make), "O5": partial(amp_level, make, "O5")}
        yield Case(f"{make.__name__}, O5", two, {"O5": at_most(1.02, "O5")}, 10)
    two = {"torch's AdamW": partial(updates, "torch", "AdamW"), "FusedLAMB": partial(updates, "apex", "FusedLAMB"),
           "FusedAdam": partial(updates, "apex", "FusedAdam")}  # fmt: skip
    yield Case("update of 0.8 M weights", two, {name: at_most(1.0, name) for name in ("FusedLAMB", "FusedAdam")}, 100)
    two = {"batch norm": partial(norms, False), "SyncBatchNorm": partial(norms, True)}
    yield Case("normalization, two ranks", two, {"SyncBatchNorm": at_most(1.15, "SyncBatchNorm")}, 20, world=2)


HEADER = ["measured", "contender", "us per step", "overhead, us", "ratio", "quartiles", "goal", "reached"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; the results are printed, not written")
    arguments = parser.parse_args()
    cases = [case for case in (*loops(), *parts()) if any(text in case.name for text in arguments.only)]
    rows: list[list[str]] = []
    for case in cases:
        rows += measure(case, arguments.rounds).rows()
        print(json.dumps(rows[-len(case.contenders) - 1 :], indent=None).replace("], [", "],\n ["), flush=True)
    if arguments.only == [""]:
        machine.write("peers", "Training steps against hand-written loops and other libraries", page(rows, arguments))


def page(rows: Sequence[Sequence[str]], arguments: argparse.Namespace) -> str:
    from importlib.metadata import version

    elsewhere = machine.table(["page", "measured", "found", "goal", "reached"], machine.goals(without="peers"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "accelerate"))
    return machine.table(HEADER, [list(row) for row in rows]) + (
        f"\n\n{versions}; Fabric is part of lightning. {arguments.rounds} alternating rounds, one thread per rank, "
        "batches of 64 images of 8x8 pixels in all, SGD with momentum and weight decay. The harness logs, counts and "
        "times; the others do only the step. The harness also uses torch's fused optimizers and, on a CPU, keeps freed "
        'memory for the next step; of the others, only "by hand, tuned" does both. Ratios are to the mean of the first '
        'contender of each case and of "again", its code in a second process: how far these two differ is the noise. '
        f"All are started {STARTS} times."
        f"\n\n## Goals on other pages\n\n{elsewhere}"
    )


if __name__ == "__main__":
    main()
