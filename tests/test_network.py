"""The interface towards a host; unknown where it cannot be known, never an exception."""

from __future__ import annotations

import sys

import pytest

from harness.network import address_of, interface_towards


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_loopback():
    assert interface_towards("127.0.0.1") == "lo"
    assert address_of("lo") == "127.0.0.1"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "::1", "x" * 70])
def test_unknown(host):
    assert interface_towards(host) is None


def test_no_such_interface():
    assert address_of("nope0") is None
