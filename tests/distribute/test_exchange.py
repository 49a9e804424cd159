"""The two exchanges give the same total, whatever the sizes, types and the number of processes."""

from __future__ import annotations

from typing import Any

import group
import pytest


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("processes", [2, 3])
def test_slices_and_wholes_have_one_total(engine: str, processes: int) -> None:
    found: list[Any] = group.results("exchange_worker.py", processes, "--engine", engine)
    assert found[0]["listening"], "process 0 holds the store"
    # 127.0.0.1, the coordinator's, as /proc/net writes it; not every address of the machine.
    # IPv6 sockets give it as ::ffff:127.0.0.1.
    assert {address[-8:] for own in found for address in own["listening"]} == {"0100007F"}
    expected = found[0]["expected"]
    for own in found:
        assert own["moved"] == {"wholes": ["gather"], "slices": ["scatter", "gather"]}
        # Of 2 and of 3 processes, 5 replicas leave one partial sum to some and two to others.
        assert own["wholes"] == own["slices"] == expected
        assert own["reversed"] != expected, "the order of additions is in the bits"
