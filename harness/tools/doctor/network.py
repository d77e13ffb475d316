"""Communication between ranks: backends of torch, network interfaces, the launcher's variables.

The checks send nothing and resolve no name.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from harness.distributed.launch_env import Launch, detect
from harness.distributed.network import address_of, interface_towards
from harness.errors import LaunchError
from harness.tools.doctor.findings import Finding, System

_HERE = "127.0.0.1"


def collectives(system: System) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        text = "this torch has no gloo, so only one process can train"
        remedy = "install another build: https://pytorch.org/get-started/locally"
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


def network(system: System) -> Iterator[Finding]:
    """The interface that ranks would use, and the variable that overrides it."""
    one_node, several = interface_towards(_HERE), interface_towards(_HERE, outward=True)
    present = [name for _, name in socket.if_nameindex()]
    if several is None:
        yield Finding("network", "ok", "cannot determine on this system which interface ranks would use")
    elif several == one_node:
        text = f"only the loopback interface {several}: ranks on other nodes cannot connect"
        yield Finding("network", "note", text, ("docker run --network=host …, to train on several nodes",))
    else:
        text = f"ranks on one node connect over {one_node}, on several nodes over {several} ({address_of(several)})"
        yield Finding("network", "ok", text)
    names = system.variables.get("GLOO_SOCKET_IFNAME", "").split(",")
    if unknown := [name for name in names if name and name not in present]:
        text = f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, but the interfaces are {', '.join(present)}"
        yield Finding("network", "problem", text, ("unset GLOO_SOCKET_IFNAME",))


def launch(system: System) -> Iterator[Finding]:
    try:
        found = detect(system.variables)
    except LaunchError as error:
        yield Finding("launch", "problem", error.message, (error.hint,) if error.hint else ())
        return
    if found.by == Launch.by:
        yield Finding("launch", "ok", "no launcher variables: one process")
    else:
        where = f"{found.master_addr}:{found.master_port}"
        yield Finding(
            "launch", "ok", f"rank {found.rank} of {found.world_size} (according to {found.by}), rendezvous at {where}"
        )
