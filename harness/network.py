"""Which network interface leads to a host. Linux only; elsewhere the answer is "unknown"."""

from __future__ import annotations

import contextlib
import socket
import struct

_SIOCGIFADDR = 0x8915  # "get interface address", linux/sockios.h


def interface_towards(host: str) -> str | None:
    """The name of the interface whose address a packet to ``host`` would carry, or None where that is not known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # a datagram socket only chooses a route; nothing is sent
            address = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)
    except (OSError, UnicodeError):  # the latter for what cannot be a host name, such as "a..b"
        return None


def address_of(interface: str) -> str | None:
    """The IPv4 address of ``interface``, or None."""
    try:
        import fcntl
    except ImportError:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    return None
