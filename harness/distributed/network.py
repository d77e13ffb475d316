"""The network interfaces of this machine, and the one that leads to a host. Linux only; elsewhere the answer is
None."""

from __future__ import annotations

import contextlib
import socket
import struct

from harness.errors import LaunchError

_SIOCGIFADDR = 0x8915  # "get interface address", linux/sockios.h
_ANYWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737), so the route to it is the default route


def interface_towards(host: str, outward: bool = False) -> str | None:
    """Return the name of the interface that sends packets to ``host``, or None if it is unknown.

    ``outward``: other machines must reach it. A host's own name often resolves to a loopback address on that host. Then
    the result is the interface of the default route, or the first one that is not loopback.
    """
    name = _interface_of(_own_address_towards(host))
    if outward and name and is_loopback(address_of(name)):
        candidates = [interface for interface, address in interfaces().items() if not is_loopback(address)]
        return _interface_of(_own_address_towards(_ANYWHERE)) or next(iter(candidates), name)
    return name


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, by name."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return {}
    return {name: address for name in names if (address := address_of(name))}


def is_here(host: str) -> bool:
    """Return True if one of the addresses of ``host`` can be bound on this machine."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def is_loopback(host: str | None) -> bool:
    """Return True if ``host`` is a loopback address or localhost."""
    return host is not None and (host in ("localhost", "::1") or host.startswith("127."))


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
    return next((name for name, has in interfaces().items() if has == address), None)


def require_address(interface: str) -> str:
    """Return the IPv4 address of ``interface``, the value of launch.interface. Raises LaunchError."""
    if (address := address_of(interface)) is None:
        raise no_route(f"this machine has no network interface {interface} with an IPv4 address")
    return address


def no_route(message: str, where: str = "launch.interface") -> LaunchError:
    """Return an error that lists the interfaces to choose from."""
    listed = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
    return LaunchError(message, where=where, hint=f"set launch.interface to one of: {listed}")


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of ``interface``, or None."""
    with contextlib.suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl  # late: Windows has none

        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    return None
