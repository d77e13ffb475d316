"""The training loops that benchmarks/peers.py compares: by hand, with other libraries, and the harness."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import Batches, Steps, settle, timed, world_size

RATES: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


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
    device: str = "cpu"

    def model(self) -> nn.Module:
        from harness.training.model.built_in import mlp, small_cnn

        torch.manual_seed(0)
        model: nn.Module = mlp.Model(10, 1)
        if self.network != "mlp":
            model = small_cnn.Model(10, batch_norm=True) if self.network == "cnn" else Transformer(10)
        model(torch.zeros(2, 1, 8, 8))  # for the sizes of lazy layers
        return model.to(self.device)

    def batches(self) -> Batches:
        shape, generator = (64 // world_size(), 1, 8, 8), torch.Generator().manual_seed(1)
        return [
            (
                torch.rand(shape, generator=generator).to(self.device),
                torch.randint(10, shape[:1], generator=generator).to(self.device),
            )
            for _ in range(16)
        ]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), fused=self.tuned or None, **RATES)


def by_hand(recipe: Recipe) -> Steps:
    if recipe.tuned:
        from harness.training.measuring import memory

        memory.keep_freed_memory(torch.device("cpu"))
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    if world_size() > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if recipe.compiled:
        model.compile()

    def step(inputs: Tensor, targets: Tensor) -> None:
        if recipe.bf16:
            with torch.autocast(recipe.device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), targets)
        else:
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, recipe.batches())


def fabric(recipe: Recipe) -> Steps:
    from lightning.fabric import Fabric

    own = Fabric(accelerator=recipe.device, devices=1, precision="bf16-mixed" if recipe.bf16 else "32-true")
    return prepared(recipe, own, own.setup)


def accelerate(recipe: Recipe) -> Steps:
    from accelerate import Accelerator

    own = Accelerator(cpu=recipe.device == "cpu", mixed_precision="bf16" if recipe.bf16 else "no")
    return prepared(recipe, own, own.prepare)


def prepared(recipe: Recipe, own: Any, prepare: Callable[..., Any]) -> Steps:
    """Steps of a library whose object ``own`` wraps the model, the optimizer and the backward pass."""
    built = recipe.model()
    model, optimizer = prepare(built, recipe.optimizer(built))

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
            settle()
            self.seconds = time.perf_counter() - self.started

    module, batches = Module(), recipe.batches()

    def steps(count: int) -> float:
        module.started = 0.0
        precision = "bf16-mixed" if recipe.bf16 else "32-true"
        trainer = Trainer(accelerator=recipe.device, devices=1, barebones=True, precision=precision, max_epochs=1)
        trainer.fit(module, Repeated(batches, count))
        return module.seconds

    return steps


def hf_trainer(recipe: Recipe) -> Steps:
    """Trainer of transformers, without logging, checkpoints and clipping. Its start is not measured."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    model, folder = recipe.model(), tempfile.mkdtemp()
    batches: Any = [{"images": images, "labels": labels} for images, labels in recipe.batches()]

    class Clock(TrainerCallback):
        started = seconds = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            settle()
            self.seconds = time.perf_counter() - self.started

    class OnBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return Repeated(batches, self.args.max_steps)

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return F.cross_entropy(model(inputs["images"]), inputs["labels"])

    def steps(count: int) -> float:
        model.__dict__.pop("forward", None)  # else the autocast of the Trainer before is around that of this one
        arguments = TrainingArguments(
            folder, max_steps=count, use_cpu=recipe.device == "cpu", bf16=recipe.bf16, max_grad_norm=0,
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        clock = Clock()
        trainer = OnBatches(model, arguments, callbacks=[clock], optimizers=(recipe.optimizer(model), None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        assert trainer.state.global_step == count, "it ended before all steps were taken"
        return clock.seconds

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
    from harness.distributed.launch_env import detect
    from harness.distributed.process_group import open_runtime
    from harness.distributed.stop import Stop
    from harness.runs.run_dir import RunFolder
    from harness.tools.data import digits
    from harness.training import build, loop

    multiprocessing.set_start_method("fork", force=True)
    folder = Path(tempfile.mkdtemp())
    data = Path(tempfile.gettempdir()) / "apex-harness-digits"
    digits.write(data)
    optimizer = [f"optimizer.{key}={value}" for key, value in RATES.items()]
    name = {"cnn": "small_cnn", "transformer": "benchmarks.peer_loops.Transformer"}.get(recipe.network, recipe.network)
    args = "model.args={batch_norm: true}" if recipe.network == "cnn" else "model.args=null"
    config = loader.load(
        "configs/digits.yaml",
        [f"output={folder}", f"task.train_csv={data}/train.csv", f"task.eval_csv={data}/eval.csv", f"task.root={data}",
         f"model.name={name}", args, "optimizer.name=sgd", *optimizer,
         f"precision.opt_level={'O4' if recipe.bf16 else 'O0'}", "schedule.warmup=null", "train.epochs=100000",
         "train.evaluate_every=100000", "train.log_every=50", "checkpoint.every=null", "data.num_workers=0",
         "batch.global=64", f"runtime.device={recipe.device}",
         f"model.compile={str(recipe.compiled).lower()}", *overrides],
    )  # fmt: skip
    run_folder = RunFolder(folder / "run")
    run_folder.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    runtime = stack.enter_context(open_runtime(detect(os.environ), recipe.device))
    run = build.build(config, runtime, run_folder, Stop(runtime))
    made = list(run.train_data.groups(0, []))[:16]
    groups = [
        [
            dataclasses.replace(micro, batch=dataclasses.replace(micro.batch, inputs=rows, targets=labels))
            for micro, rows, labels in zip(group, inputs.chunk(len(group)), targets.chunk(len(group)), strict=True)
        ]
        for group, (inputs, targets) in zip(made, recipe.batches(), strict=True)
    ]
    run.task = dataclasses.replace(run.task)
    object.__setattr__(run.task, "prepare", lambda inputs: inputs)  # done, as for the others
    data_of_run = run.train_data

    def steps(count: int) -> float:
        run.train_data, run.state.segments = InMemory(data_of_run, groups, count), []
        before, start = run.state.step, time.perf_counter()
        loop.epoch(run)
        settle()
        duration_s = time.perf_counter() - start
        assert run.state.step == before + count, "the loop ended before all steps were taken"
        return duration_s

    steps.stack = stack  # type: ignore[attr-defined]  # else it ends here, and the process group with it
    return steps
