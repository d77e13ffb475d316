"""Which network interface leads to a host. Linux only; elsewhere the answer is "unknown"."""

from __future__ import annotations

import contextlib
import socket
import struct

_SIOCGIFADDR = 0x8915  # "get interface address", linux/sockios.h


_ANYWHERE = "192.0.2.1"  # set aside for documentation (RFC 5737): the way there is the default route


def interface_towards(host: str, outward: bool = False) -> str | None:
    """The name of the interface whose address a packet to ``host`` would carry, or None where that is not known.

    ``outward``: other machines must reach it. A host's own name often means a loopback address on that host; then it is
    the interface of the default route, or the first that is not loopback.
    """
    name = _interface_of(_own_address_towards(host))
    if outward and name and _is_loopback(name):
        others = [other for _, other in socket.if_nameindex() if address_of(other) and not _is_loopback(other)]
        return _interface_of(_own_address_towards(_ANYWHERE)) or next(iter(others), name)
    return name


def _own_address_towards(host: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # a datagram socket only chooses a route; nothing is sent
            address: str = probe.getsockname()[0]
    except (OSError, UnicodeError):  # the latter for what cannot be a host name, such as "a..b"
        return None
    # All of 127.0.0.0/8 is the loopback interface, which has one address of its own.
    return "127.0.0.1" if address.startswith("127.") else address


def _interface_of(address: str | None) -> str | None:
    try:
        return next((name for _, name in socket.if_nameindex() if address and address_of(name) == address), None)
    except OSError:
        return None


def _is_loopback(interface: str) -> bool:
    return (address_of(interface) or "").startswith("127.")


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
