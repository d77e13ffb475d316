"""How ranks find and talk to each other: libraries, interfaces, what the launcher left in the environment.

Nothing is sent, and no name is resolved.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

from harness.distributed.launch_env import detect
from harness.distributed.network import address_of, interface_towards
from harness.doctor.findings import Finding, Place
from harness.errors import LaunchError

_HERE = "127.0.0.1"


def collectives(place: Place) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        text = "this torch has no gloo, without which only one process can train"
        remedy = "choose another build at https://pytorch.org/get-started/locally"
        yield Finding("collectives", "problem", text, (remedy,))
    elif dist.is_nccl_available():
        version = torch.cuda.nccl.version()
        number = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
        yield Finding("collectives", "ok", f"gloo (CPU), nccl {number} (CUDA)")
    elif torch.cuda.is_available() and torch.cuda.device_count() > 1:
        text = f"{torch.cuda.device_count()} CUDA devices, but this torch has no nccl to use them together"
        yield Finding("collectives", "problem", text, ("parallel.strategy=dp, or a torch with nccl (Linux)",))
    else:
        yield Finding("collectives", "ok", "gloo (CPU); no nccl")


def network(place: Place) -> Iterator[Finding]:
    """The interface that the ranks would take, and what the two variables that decide it say."""
    one_node, several = interface_towards(_HERE), interface_towards(_HERE, outward=True)
    present = [name for _, name in socket.if_nameindex()]
    if several is None:
        yield Finding("network", "ok", "which interface ranks would use is not known on this system")
    elif several == one_node:
        text = f"only the loopback interface {several}: ranks on several nodes cannot meet here"
        yield Finding("network", "note", text, ("docker run --network=host …, if there are to be several nodes",))
    else:
        text = f"ranks of one node meet over {one_node}, of several nodes over {several} ({address_of(several)})"
        yield Finding("network", "ok", text)
    better = next((name for name in [several, *present] if name and name != one_node), None)
    for variable, chosen in (("GLOO_SOCKET_IFNAME", _gloo), ("NCCL_SOCKET_IFNAME", _nccl)):
        if value := place.variables.get(variable):
            yield _variable(variable, value, chosen(value, present), present, better)


def _variable(
    variable: str, value: str, chosen: Sequence[str] | None, present: Sequence[str], better: str | None
) -> Finding:
    if chosen:
        return Finding("network", "ok", f"{variable}={value} chooses {', '.join(chosen)}")
    text = f"{variable}={value} matches no interface; there are {', '.join(present)}"
    remedies = [f"unset {variable}"]
    if better:
        remedies.append(f"export {variable}={better}")
    return Finding("network", "problem", text, tuple(remedies))


def _gloo(value: str, present: Sequence[str]) -> list[str] | None:
    """gloo takes a comma-separated list of names, all of which must exist."""
    names = value.split(",")
    return names if set(names) <= set(present) else None


def _nccl(value: str, present: Sequence[str]) -> list[str]:
    """nccl takes prefixes; exact names after "="; all others after "^" (NCCL user guide, NCCL_SOCKET_IFNAME)."""
    others, rest = value.startswith("^"), value.removeprefix("^")
    exact, names = rest.startswith("="), rest.removeprefix("=").split(",")
    fits: Callable[[str, str], bool] = str.__eq__ if exact else str.startswith
    return [name for name in present if any(fits(name, wanted) for wanted in names) != others]


def launch(place: Place) -> Iterator[Finding]:
    try:
        found = detect(place.variables)
    except LaunchError as error:
        yield Finding("launch", "problem", error.message, (error.hint,) if error.hint else ())
        return
    if found.by == "one process":
        yield Finding("launch", "ok", "no launcher's variables: one process")
    else:
        where = f"{found.master_addr}:{found.master_port}"
        yield Finding("launch", "ok", f"rank {found.rank} of {found.world_size} by {found.by}, meeting at {where}")
