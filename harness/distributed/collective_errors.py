"""The meaning of the errors that NCCL, gloo and torch's store raise in a collective: whose fault they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from harness.errors import first_line


class Fault(Enum):
    """What a failed collective says about the rank in which it failed."""

    PEER_LOST = "another rank, or the connection to it, is gone"
    TIMEOUT = "another rank did not join in time"
    OWN = "this rank, its GPU or its settings"


@dataclass(frozen=True)
class CollectiveError:
    """``text``: what failed, on one line, with NCCL's "Last error". ``hint``: what to do; may be empty."""

    fault: Fault
    text: str
    hint: str = ""


class _Rule(NamedTuple):
    pattern: str
    fault: Fault
    hint: str = ""


_INTERFACE = (
    "set NCCL_SOCKET_IFNAME to the network interface that reaches the other machines (launch.interface sets it; "
    "harness doctor lists the interfaces), and let the firewall pass traffic between them"
)
# The first pattern that occurs in the text of an error decides. NCCL puts the cause into its "Last error", while the
# name of the error says where it came up: a lost connection can be an ncclInternalError.
_RULES = (
    _Rule(
        r"Duplicate GPU detected",
        Fault.OWN,
        "give each rank its own GPU: srun --gpus-per-task=1, or at most one rank per GPU of a machine",
    ),
    _Rule(
        r"shared memory segment|/dev/shm",
        Fault.OWN,
        "NCCL needs room in /dev/shm (df -h /dev/shm): enlarge it, in Docker with --shm-size or --ipc=host",
    ),
    _Rule(
        r"Cuda failure.*out of memory",
        Fault.OWN,
        "NCCL allocates GPU memory of its own: use a smaller batch, and check with nvidia-smi who else uses the GPU",
    ),
    _Rule(r"unhandled cuda error|ncclUnhandledCudaError", Fault.OWN),
    _Rule(r"ncclInvalid(?:Usage|Argument)|invalid (?:usage|argument)\b.*, NCCL version", Fault.OWN),
    _Rule(r"Watchdog caught collective operation timeout|NCCL timeout in", Fault.TIMEOUT),
    _Rule(r"Connect to \S+ (?:failed|returned)(?!.*[Cc]onnection refused)", Fault.OWN, _INTERFACE),
    _Rule(r"no socket interface found", Fault.OWN, _INTERFACE),
    _Rule(r"setting up NCCL communicator.*(?:Socket Timeout|[Tt]imed? ?out)", Fault.TIMEOUT, _INTERFACE),
    _Rule(r"ncclRemoteError|remote process exited", Fault.PEER_LOST),
    _Rule(
        r"[Cc]onnection closed by (?:remote )?peer|Connection reset|Broken pipe|[Cc]onnection refused|"
        r"[Ff]ailed to recv, got 0 bytes",
        Fault.PEER_LOST,
    ),
    _Rule(r"[Tt]imed out|Socket Timeout|[Tt]imeout (?:waiting|caused pair closure)|wait timeout", Fault.TIMEOUT),
    _Rule(r"NCCL|nccl[A-Z]", Fault.OWN),
)


def diagnose(error: BaseException) -> CollectiveError | None:
    """Return the meaning of ``error``; None if it is not of a collective, or says nothing about the ranks."""
    text = str(error)
    if not isinstance(error, torch.distributed.DistError) and "gloo" not in text.lower():
        return None
    for rule in _RULES:
        if re.search(rule.pattern, text, re.DOTALL):
            return CollectiveError(rule.fault, _short(error, text), rule.hint)
    return None


def _short(error: BaseException, text: str) -> str:
    """Return ``text`` without places in C++ code, stacks and advice."""
    if nccl := re.search(r"NCCL error(?: in)?: (?:\S+:\d+, )?(.+?)(?: \(run with [^)]*\))?, NCCL version (\S+)", text):
        last = re.search(r"Last error: *\n?(.*?)(?:\nException raised|\Z)", text, re.DOTALL)
        lines = [line.strip() for line in last[1].splitlines() if line.strip()] if last else []
        return ": ".join([f"NCCL {nccl[2]}", nccl[1], *(["; ".join(lines)] if lines else [])])
    return re.sub(r"^\[[^\]]*:\d+\] |\. This is typically caused .*", "", first_line(error))
