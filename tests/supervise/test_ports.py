"""Free ports, for every launcher by one mechanism, and the addresses to listen on."""

from __future__ import annotations

import socket

import pytest

from perdure import ports


@pytest.mark.parametrize("host", [ports.HOST, ""])
def test_ports_are_free_different_and_not_the_kernels(host: str) -> None:
    found = ports.free_ports(5, host)
    assert len(set(found)) == 5
    assert all(20000 <= port < ports._first_ephemeral() for port in found)
    assert not any(ports.is_taken(port, host) for port in found)
    with socket.socket() as stranger:
        stranger.bind((host, found[0]))
        stranger.listen()
        assert ports.is_taken(found[0], host)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.7", "127.0.0.7"),
        ("localhost", ""),  # a name may mean an address that other machines do not reach
        (socket.gethostname(), ""),
        ("192.0.2.1", ""),  # for documentation (RFC 5737): no machine has it
        ("", ""),
    ],
)
def test_a_listener_takes_the_address_of_the_group_only(host: str, expected: str) -> None:
    assert ports.own_address(host) == expected
    with ports.listen(0, host) as listener:
        address, port = listener.getsockname()[:2]
        assert address == expected or (not expected and address in ("::", "0.0.0.0"))
        reached = {here: not ports.is_taken(port, here) for here in ("127.0.0.1", "127.0.0.7")}
        assert reached == {here: bool(expected) and here != expected for here in reached}
