"""Measurements on this machine, each a fraction of a second, for facts that a run's record lacks."""

from __future__ import annotations

import functools
import socket
import statistics
import threading
import time

_LAYERS, _REPEATS = 20, 30
_BLOCK, _BLOCKS = bytes(1 << 20), 128


@functools.cache
def measure(name: str) -> float:
    return {"launch_s": _launch_s, "loopback": _loopback}[name]()


def _launch_s() -> float:
    """Seconds of the host per operation of a forward pass, with its backward pass and update: those of a model whose
    operations are too small to take time themselves. Median of _REPEATS."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(*(part for _ in range(_LAYERS) for part in (nn.Linear(4, 4), nn.ReLU())))
    optimizer, inputs, times = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.zeros(2, 4), []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (3 * _LAYERS)  # a linear layer is two operations: transpose and product


def _loopback() -> float:
    """Bytes per second through a socket of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()

        def receive() -> None:
            buffer = bytearray(1 << 20)
            while receiver.recv_into(buffer):
                pass

        with receiver:
            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            start = time.perf_counter()
            for _ in range(_BLOCKS):
                sender.sendall(_BLOCK)
            sender.shutdown(socket.SHUT_WR)
            thread.join(10.0)
            return len(_BLOCK) * _BLOCKS / (time.perf_counter() - start)
