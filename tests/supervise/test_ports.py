"""Free ports, for every launcher by one mechanism."""

from __future__ import annotations

import socket

import pytest

from perdure import ports


@pytest.mark.parametrize("host", [ports.HOST, ""])
def test_ports_are_free_different_and_not_the_kernels(host: str) -> None:
    free = ports.free_ports(5, host)
    assert len(set(free)) == 5
    assert all(20000 <= port < ports._first_ephemeral() for port in free)
    assert not any(ports.is_taken(port, host) for port in free)
    with socket.socket() as stranger:
        stranger.bind((host, free[0]))
        stranger.listen()
        assert ports.is_taken(free[0], host)
