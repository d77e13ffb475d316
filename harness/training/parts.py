"""Parts of the harness for a training script without a configuration or a task. Each works without the others, on one
process or on several ranks, whose model is then in a DistributedDataParallel::

    from harness.training.parts import Checkpoints, Sums, amp, bounds, load, open_runtime, save, shard

    def batches(rows, ranks, epoch, done):  # each row once over all ranks, without the first ``done`` of this one
        order = shard("global", len(rows), ranks.rank, ranks.world_size, epoch, seed=0)
        return DataLoader(rows, 10, sampler=order[done:], generator=torch.Generator())  # keeps the random streams

    def one_step(model, optimizer, inputs, targets):  # both from amp.initialize(model, optimizer, opt_level="O1")
        with amp.scale_loss(cross_entropy(model(inputs), targets), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    def one_epoch(model, optimizer, rows, ranks, checkpoints):  # of 5 steps; an interrupted one resumes bit for bit
        parts = {"model": model, "optimizer": optimizer, "amp": amp}
        done = load(checkpoints, parts, ranks)
        for step, batch in enumerate(batches(rows, ranks, done // 5, done % 5 * 10), done + 1):
            one_step(model, optimizer, *batch)
            save(checkpoints, step, parts, ranks)

    def accuracy(model, rows, ranks):  # counts each row once
        sums = Sums()
        for inputs, targets in DataLoader(rows, 10, sampler=range(*bounds(len(rows), ranks.rank, ranks.world_size))):
            sums.add({"right": ((model(inputs).argmax(1) == targets).sum(), torch.tensor(len(targets)))})
        return sums.over(ranks).ratio("right")

    with open_runtime() as ranks:  # those of torchrun, or this process alone
        one_epoch(model, optimizer, rows, ranks, Checkpoints(Path("checkpoints"), keep=2))

With shards of unequal length, end each epoch after ``num_steps(len(rows), world_size, 10, "drop")`` steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from harness.apex import amp
from harness.data.shards import bounds, num_steps, shard
from harness.distributed.runtime import Runtime, open_runtime
from harness.errors import CheckpointError
from harness.runs.checkpoint import Checkpoints, read
from harness.training import rng
from harness.training.evaluation.metrics import Sums

__all__ = [
    "Checkpoints",
    "Runtime",
    "Sums",
    "amp",
    "bounds",
    "load",
    "num_steps",
    "open_runtime",
    "save",
    "shard",
]

log = logging.getLogger("harness")


class Stateful(Protocol):
    """What a checkpoint can hold: a model, an optimizer, a schedule, ``amp``, or an object of your own whose state
    consists of tensors and plain data."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def save(checkpoints: Checkpoints, step: int, parts: Mapping[str, Stateful], ranks: Runtime | None = None) -> None:
    """Write the ``parts`` after ``step`` steps. Rank 0 writes them; of each rank, the random streams and the buffers of
    the models are kept. Collective over ``ranks``. Raises CheckpointError, with earlier checkpoints intact."""
    ranks = ranks or Runtime()
    with ranks.together("saving"):
        buffers = {name: {key: each.cpu() for key, each in own.items()} for name, own in _buffers(parts).items()}
        own = {"rng": rng.get_state(ranks.device).plain(), "buffers": buffers}
    of_ranks = ranks.gather_to_first(own)
    with ranks.together("saving"):
        if ranks.rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            checkpoints.write(step, {"step": step, "parts": states, "ranks": of_ranks})


def load(checkpoints: Checkpoints, parts: Mapping[str, Stateful], ranks: Runtime | None = None) -> int:
    """Restore the ``parts``, and the random streams of this rank, from the newest checkpoint; return its step, 0 if
    there is none. Call it when all else is set up: at the same number of ranks, training then goes on bit for bit. All
    machines must share the folder. Collective over ``ranks``. Raises CheckpointError."""
    ranks = ranks or Runtime()
    with ranks.together("looking for a checkpoint"):
        path = checkpoints.newest() if ranks.rank == 0 else None
    path = ranks.from_first(path)
    if path is None:
        return 0
    with ranks.together("restoring"):
        content = read(path)
        if missing := sorted(parts.keys() - content["parts"].keys()):
            saved = ", ".join(content["parts"])
            what = f"the checkpoint has no part {' or '.join(missing)}; it has {saved}"
            raise CheckpointError(what, where=str(path), hint="name the parts as they were saved")
        for name, part in parts.items():
            part.load_state_dict(content["parts"][name])
        if len(content["ranks"]) == ranks.world_size:
            own = content["ranks"][ranks.rank]
            for name, buffers in _buffers(parts).items():
                for key, buffer in buffers.items():
                    buffer.copy_(own["buffers"][name][key])
            rng.set_state(rng.Streams.from_plain(own["rng"]), ranks.device)
        else:
            log.info(
                "number of ranks: %d in %s, %d now; random streams go on as they are",
                len(content["ranks"]),
                path,
                ranks.world_size,
            )
    return int(content["step"])


def _buffers(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """Return the buffers of each model, such as the statistics of batch norms, which each rank has its own of."""
    return {name: dict(part.named_buffers()) for name, part in parts.items() if isinstance(part, nn.Module)}
