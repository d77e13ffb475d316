"""The choice of workers for a run's ranks, made in the scheduler's process, where nothing else happens meanwhile.

The scheduler need not have the harness installed: these functions are sent by value, and import nothing of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.errors import plural

KEYS = "apex-harness-"  # prefix of our tasks' keys
_RESERVATIONS = "apex_harness_reservations"


def reserve(job: str, client: str, num_ranks: int, needs: dict[str, float], dask_scheduler: Any) -> dict[str, Any]:
    """Reserve places for ``num_ranks`` ranks, all or none, until ``release`` or until ``client`` is gone.

    A rank takes a thread of its worker, and ``needs`` of its resources. A worker holds one rank, or one per GPU if it
    announces GPUs as a resource; such workers come first. Returns {"places": [(address, resources the rank takes)],
    "seen": [a line about each worker]}; there are no places if too few are free.
    """
    reserved: dict[str, tuple[str, list[str]]] = vars(dask_scheduler).setdefault(_RESERVATIONS, {})
    for gone in [name for name, (owner, _) in reserved.items() if owner not in dask_scheduler.clients]:
        del reserved[gone]
    taken = Counter(address for _, addresses in reserved.values() for address in addresses)
    offers = [_offer(worker, taken[worker.address], needs) for worker in dask_scheduler.workers.values()]
    offers.sort(key=lambda offer: offer["order"])
    places = [(offer["address"], offer["takes"]) for offer in offers for _ in range(offer["room"])][:num_ranks]
    if len(places) < num_ranks:
        places = []
    else:
        reserved[job] = (client, [address for address, _ in places])
    return {"places": places, "seen": [offer["line"] for offer in offers]}


def release(job: str, dask_scheduler: Any) -> None:
    """Give the places of ``job`` back."""
    vars(dask_scheduler).setdefault(_RESERVATIONS, {}).pop(job, None)


def _offer(worker: Any, taken: int, needs: dict[str, float]) -> dict[str, Any]:
    """The room of ``worker``, next to ``taken`` reserved ranks and other people's tasks."""
    others = [task for task in worker.processing if not str(task.key).startswith(KEYS)]
    has_gpus = worker.resources.get("GPU", 0) > 0
    takes = {"GPU": 1, **needs} if has_gpus else dict(needs)
    room = min((int(worker.resources["GPU"]) if has_gpus else 1) - taken, worker.nthreads - len(others) - taken)
    for name, need in takes.items():
        used = sum((task.resource_restrictions or {}).get(name, 0) for task in others)
        room = min(room, int((worker.resources.get(name, 0) - used) / need) - taken)
    room = max(room, 0) if worker.status.name == "running" else 0
    facts = [plural(worker.nthreads, "thread"), worker.status.name]
    facts += [f"resources {dict(worker.resources)}"] if worker.resources else []
    facts += [plural(len(others), "other task")] if others else []
    facts += [f"{plural(taken, 'rank')} of another run"] if taken else []
    return {
        "address": worker.address,
        "takes": takes,
        "room": room,
        "order": (not has_gpus, len(others), worker.host, worker.address),
        "line": f"{worker.address}: {', '.join(facts)}: room for {room}",
    }
