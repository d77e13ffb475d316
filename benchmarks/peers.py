"""Measures training steps of the harness and of harness.apex against hand-written loops and other libraries.

    make bench-peers      or      python -m benchmarks.peers [--rounds 18] [--only TEXT ...] [--device cuda]

Contenders train on batches in memory and take turns (benchmarks/turns.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.peer_loops import Recipe, accelerate, by_hand, fabric, harness, hf_trainer, lightning
from benchmarks.turns import STARTS, Case, Result, Steps, measure, timed


def below(share: float, of: str) -> tuple[str, Callable[[Result], bool]]:
    words = f"overhead at most {share:g} of {of}'s" if share != 1 else f"overhead below {of}'s"
    return words, lambda result: result.overhead("harness") <= share * result.overhead(of)


def at_most(ratio: float, name: str) -> tuple[str, Callable[[Result], bool]]:
    return f"ratio at most {ratio:g}", lambda result: result.ratio(name) <= ratio


def loops(device: str) -> Iterator[Case]:
    peers = {"Fabric": fabric, "accelerate": accelerate, "Lightning, barebones": lightning, "HF Trainer": hf_trainer}
    for network, num_steps in (("mlp", 200), ("cnn", 20)):
        for bf16 in (False, True):
            recipe = Recipe(network, bf16, device=device)
            contenders = {"by hand": partial(by_hand, recipe), "harness": partial(harness, recipe)}
            contenders["by hand, tuned"] = partial(by_hand, dataclasses.replace(recipe, tuned=True))
            contenders |= {name: partial(make, recipe) for name, make in peers.items()}
            goal = below(1, "Fabric") if bf16 else below(0.5, "Fabric")
            name = f"{network}, {'bfloat16' if bf16 else 'float32'}"
            yield Case(name, contenders, {"harness": goal if network == "mlp" else at_most(1.01, "harness")}, num_steps)
    if device == "cuda":
        return
    recipe = Recipe("cnn")
    two = {"torch DDP by hand": partial(by_hand, recipe), "harness": partial(harness, recipe),
           "harness, overlapped": partial(harness, recipe, "parallel.delay_allreduce=false")}  # fmt: skip
    yield Case("cnn, float32, two ranks", two, {"harness": at_most(1.01, "harness")}, 20, world=2)
    for network in ("mlp", "cnn", "transformer"):
        recipe = Recipe(network, compiled=True)
        two = {"by hand": partial(by_hand, recipe), "harness": partial(harness, recipe)}
        yield Case(f"{network}, float32, compiled", two, {"harness": at_most(1.0, "harness")}, 50)
    for network in ("cnn", "transformer"):
        recipe = Recipe(network)
        for world in (2, 4, 8):
            name = f"{world} logical ranks"
            two = {"ddp": partial(harness, recipe), name: partial(harness, recipe, f"parallel.logical_ranks={world}")}
            goals = {name: at_most(1.05, name)}
            yield Case(f"{network}, logical ranks on {world} processes", two, goals, 20, world=world)
        two = {"4 micro-batches": partial(harness, recipe, "batch.accumulate=4"),
               "4 logical ranks": partial(harness, recipe, "parallel.logical_ranks=4")}  # fmt: skip
        goals = {"4 logical ranks": at_most(1.05, "4 logical ranks")}
        yield Case(f"{network}, logical ranks on one process", two, goals, 20)


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


def with_only(case: Case, names: Sequence[str]) -> Case:
    first = next(iter(case.contenders))
    kept = {name: make for name, make in case.contenders.items() if name == first or name in names}
    return dataclasses.replace(case, contenders=kept, goals={})


HEADER = ["measured", "contender", "us per step", "overhead, us", "ratio", "quartiles", "goal", "reached"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--starts", type=int, default=STARTS, help="of each contender's process")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; the results are printed, not written")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the loops on one rank only")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="besides the first; printed as well")
    arguments = parser.parse_args()
    made = [*loops(arguments.device), *(parts() if arguments.device == "cpu" else ())]
    cases = [case for case in made if any(text in case.name for text in arguments.only)]
    if arguments.contenders:
        cases = [
            with_only(case, arguments.contenders) for case in cases if set(arguments.contenders) & {*case.contenders}
        ]
    rows: list[list[str]] = []
    for case in cases:
        rows += measure(case, arguments.rounds, arguments.starts).rows()
        print(json.dumps(rows[-len(case.contenders) - 1 :], indent=None).replace("], [", "],\n ["), flush=True)
    if arguments.only == [""] and not arguments.contenders:
        name = "peers" if arguments.device == "cpu" else "peers_cuda"
        machine.write(name, "Training steps against hand-written loops and other libraries", page(rows, arguments))


def page(rows: Sequence[Sequence[str]], arguments: argparse.Namespace) -> str:
    from importlib.metadata import version

    elsewhere = machine.table(["page", "measured", "found", "goal", "reached"], machine.goals(without="peers"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "accelerate", "transformers"))
    return machine.table(HEADER, [list(row) for row in rows]) + (
        f"\n\n{versions}; Fabric is part of lightning. {arguments.rounds} alternating rounds, one thread per rank, "
        "batches of 64 images of 8x8 pixels in all, SGD with momentum and weight decay. The harness logs, counts and "
        "times; the others do only the step. The harness also uses torch's fused optimizers and, on a CPU, keeps freed "
        'memory for the next step; of the others, only "by hand, tuned" does both. Ratios are to the mean of the first '
        'contender of each case and of "again", its code in a second process: how far these two differ is the noise. '
        f"All are started {arguments.starts} times."
        f"\n\n## Goals on other pages\n\n{elsewhere}"
    )


if __name__ == "__main__":
    main()
