"""The interface towards a host; unknown where it cannot be known, never an exception."""

from __future__ import annotations

import sys

import pytest

from harness.distributed.network import (
    address_of,
    interface_towards,
    interfaces,
    is_here,
    is_loopback,
)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_loopback():
    assert interface_towards("127.0.0.1") == "lo"
    assert address_of("lo") == "127.0.0.1"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "::1", "x" * 70])
def test_unknown_host(host):
    assert interface_towards(host) is None


def test_missing_interface():
    assert address_of("nope0") is None


def test_a_system_without_fcntl_knows_no_address(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert address_of("lo") is None


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_own_addresses():
    assert interfaces()["lo"] == "127.0.0.1"
    assert all(is_here(address) for address in interfaces().values())
    assert is_here("localhost")
    assert is_here("127.0.1.1")  # as Debian writes a host's own name
    assert not is_here("192.0.2.1")
    assert not is_here("no.such.host.invalid")


@pytest.mark.parametrize(("host", "expected"), [("localhost", True), ("127.1.2.3", True), ("::1", True), ("n0", False),
                                                ("10.0.0.1", False), (None, False)])  # fmt: skip
def test_loopback_by_name(host, expected):
    assert is_loopback(host) is expected
