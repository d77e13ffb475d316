"""Several machines on this one, for tests: network namespaces joined by a cable that can be cut.

The nodes have the same host name, and it resolves to the loopback address, as on many real machines: whoever binds to
that address never meets its peer.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

ADDRESSES = ("192.168.77.1", "192.168.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """The names of two network namespaces that reach each other over ADDRESSES; removed again, whatever happens."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip (Debian: apt-get install iproute2)")
    tag = secrets.token_hex(3)
    names = [f"node0-{tag}", f"node1-{tag}"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            cable = [word for name in names for word in ("name", "eth0", "netns", name)]
            ip("link", "add", *cable[:4], "type", "veth", "peer", *cable[4:])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def cut(node: str) -> None:
    """Pull the cable of ``node``; what is sent to it and from it is lost."""
    ip("-n", node, "link", "set", "eth0", "down")


def mend(node: str) -> None:
    ip("-n", node, "link", "set", "eth0", "up")
