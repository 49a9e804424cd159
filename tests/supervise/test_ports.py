"""Free ports, for every launcher by one mechanism."""

from __future__ import annotations

import socket

import pytest

from perdure.errors import LaunchError
from perdure.runtime import ports


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


def test_each_port_is_tried_once_and_too_few_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_first_ephemeral", lambda: 20007)
    bound: list[int] = []

    class Listener:
        def bind(self, address: tuple[str, int]) -> None:
            bound.append(address[1])
            if address[1] == 20003:
                raise OSError

        def __enter__(self) -> Listener:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(ports, "_socket", lambda _: Listener())
    with pytest.raises(LaunchError) as caught:
        ports.free_ports(7)
    assert "expected 7 free ports from 20000 to 20007, found 6" in str(caught.value)
    assert sorted(bound) == list(range(20000, 20007))
