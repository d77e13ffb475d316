"""Parts of the harness for a training script without a configuration or a task. Each works without the others. This
script is complete; killed, it resumes bit for bit, on one process or under torchrun::

    from pathlib import Path

    from harness import Checkpoints, Sums, amp, bounds, load, num_steps, open_runtime, save, shard

    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    rows, size = TensorDataset(x, x[:, :3].argmax(1)), 10

    with open_runtime() as ranks:
        mine = ranks.rank, ranks.world_size
        torch.manual_seed(ranks.rank)
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 3)).to(ranks.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        if ranks.world_size > 1:  # equal weights; each rank has its own statistics of the batch norm
            model = nn.parallel.DistributedDataParallel(model)
            model.broadcast_buffers = False  # as an argument, torch 2.14 warns of it
        parts = {"model": model, "optimizer": optimizer, "amp": amp}
        checkpoints = Checkpoints(Path("checkpoints"), keep=2)
        steps = num_steps(len(rows), ranks.world_size, size, "drop")  # of an epoch; "use" if the shards are equal
        done = load(checkpoints, parts, ranks)
        while done < 3 * steps:
            order = shard("global", len(rows), *mine, epoch=done // steps, seed=0)
            left = order[done % steps * size : steps * size]
            for inputs, targets in DataLoader(rows, size, sampler=left, generator=torch.Generator()):  # a stream apart
                outputs = model(inputs.to(ranks.device))
                with amp.scale_loss(cross_entropy(outputs, targets.to(ranks.device)), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done % 5 == 0:
                    save(checkpoints, done, parts, ranks)
        model.eval()
        sums = Sums()
        for inputs, targets in DataLoader(rows, size, sampler=range(*bounds(len(rows), *mine))):
            right = model(inputs.to(ranks.device)).argmax(1).cpu() == targets
            sums.add({"accuracy": (right.sum(), len(right))})
        accuracy = sums.over(ranks).ratio("accuracy")
        print(f"accuracy {accuracy:.3f}")
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.apex import amp
from harness.apex.parallel import DistributedDataParallel
from harness.data.shards import bounds, num_steps, shard
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError, ConfigError
from harness.runs.checkpoints import Checkpoints, read
from harness.training.evaluation.sums import Sums
from harness.training.reproducibility import rng

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

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, DistributedDataParallel)  # they have no state
_SMALL_BYTES = 1 << 20  # of a state that every rank sends to rank 0

log = logging.getLogger("harness")


class Stateful(Protocol):
    """What a checkpoint can hold: a model, an optimizer, a schedule, ``amp``, or an object of your own whose state
    consists of tensors and plain data."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def save(checkpoints: Checkpoints, step: int, parts: Mapping[str, Stateful], ranks: Runtime | None = None) -> None:
    """Write the ``parts`` after ``step`` steps. Rank 0 writes its models, optimizers, and states above 1 MiB; of each
    rank, the other parts, the random streams and the buffers of the models are kept. Collective over ``ranks``. Raises
    CheckpointError, with earlier checkpoints intact."""
    ranks = ranks or Runtime()
    with ranks.together("saving"):
        _require_stateful(parts)
        buffers = {
            name: {key: each.cpu() for key, each in tensors.items()} for name, tensors in _buffers(parts).items()
        }
        states = _own_states(parts)
        small = {name: tree_map_only(Tensor, Tensor.cpu, state) for name, state in states.items() if _is_small(state)}
        rank_state = {"rng": rng.get_state(ranks.device).plain(), "buffers": buffers, "parts": small}
        if ranks.rank == 0:
            states |= {name: _bare(part).state_dict() for name, part in parts.items() if name not in states}
    of_ranks = ranks.gather_to_first(rank_state)

    def write() -> None:
        if ranks.rank == 0:
            checkpoints.write(step, {"step": step, "parts": states, "ranks": of_ranks})

    ranks.patiently("writing a checkpoint", write)


def load(checkpoints: Checkpoints, parts: Mapping[str, Stateful], ranks: Runtime | None = None) -> int:
    """Restore the ``parts``, and the random streams of this rank, from the newest checkpoint; return its step, 0 if
    there is none. Call it when all else is set up: at the same number of ranks, training then goes on bit for bit. A
    model may be in DistributedDataParallel now and not when it was saved, or the reverse. All machines must share the
    folder. Collective over ``ranks``. Raises CheckpointError."""
    ranks = ranks or Runtime()
    with ranks.together("restoring"):
        _require_stateful(parts)
    path = ranks.patiently("looking for a checkpoint", lambda: checkpoints.newest() if ranks.rank == 0 else None)
    path = ranks.from_first(path)
    if path is None:
        return 0
    content = ranks.patiently("reading the checkpoint", lambda: read(path))
    with ranks.together("restoring"):
        if missing := sorted(parts.keys() - content["parts"].keys()):
            saved = ", ".join(content["parts"])
            message = f"the checkpoint has no part {' or '.join(missing)}; it has {saved}"
            raise CheckpointError(message, where=str(path), hint="name the parts as they were saved")
        if unused := sorted(content["parts"].keys() - parts.keys()):
            log.warning(
                "%s also holds %s, which is not restored; add it to parts to restore it", path, ", ".join(unused)
            )
        same_world_size = len(content["ranks"]) == ranks.world_size
        rank_state = content["ranks"][ranks.rank if same_world_size else 0]
        states = {**content["parts"], **rank_state.get("parts", {})}
        for name, part in parts.items():
            _bare(part).load_state_dict(states[name])
        if same_world_size:
            for name, buffers in _buffers(parts).items():
                for key, buffer in buffers.items():
                    buffer.copy_(rank_state["buffers"][name][key])
            rng.set_state(rng.Streams.from_plain(rank_state["rng"]), ranks.device)
        else:
            log.info(
                "number of ranks: %d in %s, %d now; random streams go on as they are, and parts are those of rank 0",
                len(content["ranks"]),
                path,
                ranks.world_size,
            )
    return int(content["step"])


def _require_stateful(parts: Mapping[str, object]) -> None:
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"the part {name!r} is of type {type(part).__name__}, without state_dict() and load_state_dict(state)",
                hint="give objects that have both, such as models, optimizers and amp",
            )


def _own_states(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of each part of which ranks may have their own, such as a generator."""
    return {name: part.state_dict() for name, part in parts.items() if not isinstance(part, nn.Module | Optimizer)}


def _is_small(state: Any) -> bool:
    tensors = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    return tensors <= _SMALL_BYTES and len(pickle.dumps(state)) <= _SMALL_BYTES


def _buffers(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """Return the buffers of each model, such as the statistics of batch norms, which each rank has its own of."""
    return {name: dict(_bare(part).named_buffers()) for name, part in parts.items() if isinstance(part, nn.Module)}


def _bare(part: Any) -> Any:
    """Return the model in DataParallel or DistributedDataParallel, and anything else as it is."""
    while isinstance(part, _WRAPPERS):
        part = part.module
    return part
