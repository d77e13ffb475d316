"""Errors of collectives as users have recorded them, and whose fault each is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.distributed import collective_errors
from harness.distributed.collective_errors import Fault

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
CUDA = "ncclUnhandledCudaError: Call to CUDA function failed."
FRAMES = """
Exception raised from getNCCLComm at /opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1287 (most \
recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7efd2a176d87 in /torch/lib/libc10.so)"""
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) "
UNIQUE_ID = "is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
LAUNCH = (
    "unhandled cuda error, NCCL version 2.27.5\nLast error:\nCuda failure 702 'the launch timed out and was terminated'"
)

# {thread in which it was reported: message, fault, part of the text, part of the hint}
RECORDED = {
    "NVIDIA/nccl#2076": (
        f"{NCCL}NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5\n{REMOTE}\n"
        "Last error:\nsocketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer",
        Fault.PEER_LOST, "Call to recv from 172.16.0.4<33759> failed : Connection reset by peer", "",
    ),
    "NVIDIA/nccl#1928": (
        f"{NCCL}ProcessGroupNCCL.cpp:3763, remote process exited or there was a network error, NCCL version 2.28.8\n"
        f"{REMOTE}\nLast error:\nNET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113. Error: 2 (UNDEL"
        "IVERABLE). Completed length: 0",
        Fault.PEER_LOST, "Error: 2 (UNDELIVERABLE)", "",
    ),
    "tatsu-lab/stanford_alpaca#207": (
        f"NCCL error: remote process exited or there was a network error, NCCL version 2.14.3\n{REMOTE}\nLast error:\n"
        "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129",
        Fault.PEER_LOST, "Got completion from peer 11.214.147.122<39138> with error 12", "",
    ),
    "NVIDIA/nccl#934": (
        f"{NCCL}ProcessGroupNCCL.cpp:1347, remote process exited or there was a network error, NCCL version 2.18.5\n"
        f"{REMOTE}",
        Fault.PEER_LOST, "NCCL 2.18.5: remote process exited or there was a network error", "",
    ),
    "NVIDIA/nccl#1514": (
        f"{NCCL}ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\nncclInternalError: Internal check "
        "failed.\nLast error:\nNet : Connection closed by remote peer user<50260>",
        Fault.PEER_LOST, "Connection closed by remote peer user<50260>", "",
    ),
    "NVIDIA/nccl#1410": (
        f"{NCCL}NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
        f"{CUDA}\nLast error:\nCuda failure 1 'invalid argument'",
        Fault.OWN, "NCCL 2.20.5: unhandled cuda error: Cuda failure 1 'invalid argument'", "",
    ),
    "NVIDIA/nccl#1241": (
        f"{NCCL}ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.17.1\n{USAGE}\nLast error:\n"
        f"Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000{FRAMES}",
        Fault.OWN, "Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000", "one rank per GPU",
    ),
    "verl-project/verl#161": (
        f"{NCCL}NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\n{USAGE}\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
        Fault.OWN, "invalid usage: Duplicate GPU detected", "one rank per GPU",
    ),
    "hkproj/pytorch-transformer-distributed#1": (
        f"{NCCL}ProcessGroupNCCL.cpp:1333, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
        f"2.18.6\n{SYSTEM} \nLast error:\n"
        "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
        Fault.OWN, "Connect to 192.168.19.14<52822> failed : No route to host", "NCCL_SOCKET_IFNAME",
    ),
    "WangRongsheng/XrayGLM#83": (
        f"{NCCL}ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
        f"2.19.3\n{SYSTEM} \nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-CsYXMW (size 9637888)",
        Fault.OWN, "Error while creating shared memory segment /dev/shm/nccl-CsYXMW", "--shm-size",
    ),
    "zai-org/GLM-130B#132": (
        f"NCCL communicator was aborted on rank 2.  Original reason for failure was: [Rank 2] {WATCHDOG}ran for "
        "1805457 milliseconds before timing out.",
        Fault.TIMEOUT, "Watchdog caught collective operation timeout", "",
    ),
    "hiyouga/LlamaFactory#3698": (
        f"[4] {UNIQUE_ID}but store->get('0') got error: Socket Timeout",
        Fault.TIMEOUT, "Socket Timeout", "NCCL_SOCKET_IFNAME",
    ),
    "pytorch/pytorch#82091": (
        f"[1] {UNIQUE_ID}but store->get('0') got error: Timeout waiting for key: default_pg/0/0 after 1800000 ms",
        Fault.TIMEOUT, "Timeout waiting for key", "NCCL_SOCKET_IFNAME",
    ),
    "pytorch/pytorch#153586": (
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        Fault.PEER_LOST, "Failed to recv, got 0 bytes", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("thread", RECORDED)
def test_recorded_error(thread):
    message, fault, words, hint = RECORDED[thread]
    found = collective_errors.diagnose(dist.DistBackendError(message))
    assert found.fault is fault
    assert words in found.text
    assert "\n" not in found.text
    assert "frame #" not in found.text
    assert hint in found.hint
    assert bool(hint) == bool(found.hint)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"), Fault.PEER_LOST),
        (RuntimeError("[/gloo/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"), Fault.TIMEOUT),
        (RuntimeError("[/gloo/unbound_buffer.cc:78] Application timeout caused pair closure"), Fault.TIMEOUT),
        (dist.DistNetworkError("Connection reset by peer"), Fault.PEER_LOST),
        (dist.DistBackendError(f"{NCCL}NCCLUtils.hpp:77, internal error, NCCL version 2.27.5"), Fault.OWN),
        (dist.DistBackendError(f"{NCCL}NCCLUtils.hpp:77, invalid usage, NCCL version 2.27.5\n{USAGE}"), Fault.OWN),
        (dist.DistBackendError(f"{NCCL}NCCLUtils.hpp:77, {LAUNCH}"), Fault.OWN),  # no other rank was waited for
        (dist.DistError("something else"), None),
        (RuntimeError("NCCL is mentioned, and it timed out, in an error of another kind"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
    ],
)
def test_other_errors(error, fault):
    found = collective_errors.diagnose(error)
    assert (found and found.fault) is fault
