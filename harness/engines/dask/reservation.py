"""Which workers hold a gang of ranks: decided in the scheduler's process, where nothing else happens meanwhile.

These functions run in the scheduler and are sent there by value: the scheduler need not have the harness installed, so
nothing of it is imported here. What happens on the workers is in ``dask_rank``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

KEYS = "apex-harness-"  # what the keys of our tasks begin with
_CLAIMS = "apex_harness_claims"


def claim(job: str, client: str, num_ranks: int, needs: dict[str, float], dask_scheduler: Any) -> dict[str, Any]:
    """Set aside ``num_ranks`` places for ``job`` until ``client`` gives them back or is gone: all of them or none.

    A rank takes a thread of its worker, and ``needs`` of its resources. A worker holds one rank, or one for each GPU
    where it announces GPUs as a resource; such workers come first. Returns {"places": [(address, what the rank takes)],
    "seen": [a line on each worker]}, without places where there are too few.
    """
    claims: dict[str, tuple[str, list[str]]] = vars(dask_scheduler).setdefault(_CLAIMS, {})
    for gone in [name for name, (owner, _) in claims.items() if owner not in dask_scheduler.clients]:
        del claims[gone]
    taken = Counter(address for _, addresses in claims.values() for address in addresses)
    offers = [_offer(worker, taken[worker.address], needs) for worker in dask_scheduler.workers.values()]
    offers.sort(key=lambda offer: offer["order"])
    places = [(offer["address"], offer["takes"]) for offer in offers for _ in range(offer["room"])][:num_ranks]
    if len(places) < num_ranks:
        places = []
    else:
        claims[job] = (client, [address for address, _ in places])
    return {"places": places, "seen": [offer["line"] for offer in offers]}


def release(job: str, dask_scheduler: Any) -> None:
    """Give the places of ``job`` back."""
    vars(dask_scheduler).setdefault(_CLAIMS, {}).pop(job, None)


def _offer(worker: Any, taken: int, needs: dict[str, float]) -> dict[str, Any]:
    """What ``worker`` has room for beside ``taken`` ranks and the tasks of others."""
    others = [task for task in worker.processing if not str(task.key).startswith(KEYS)]
    has_gpus = worker.resources.get("GPU", 0) > 0
    takes = {"GPU": 1, **needs} if has_gpus else dict(needs)
    room = min((int(worker.resources["GPU"]) if has_gpus else 1) - taken, worker.nthreads - len(others) - taken)
    for name, need in takes.items():
        used = sum((task.resource_restrictions or {}).get(name, 0) for task in others)
        room = min(room, int((worker.resources.get(name, 0) - used) / need) - taken)
    if worker.status.name != "running":
        room = 0
    facts = [f"{worker.nthreads} thread(s)", worker.status.name]
    facts += [f"resources {dict(worker.resources)}"] if worker.resources else []
    facts += [f"{len(others)} task(s) of others"] if others else []
    facts += [f"{taken} rank(s) of another run"] if taken else []
    return {
        "address": worker.address,
        "takes": takes,
        "room": max(room, 0),
        "order": (not has_gpus, len(others), worker.host, worker.address),
        "line": f"{worker.address}: {', '.join(facts)}: room for {max(room, 0)}",
    }
