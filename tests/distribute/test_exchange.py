"""The two exchanges give the same total for all sizes, dtypes and numbers of processes."""

from __future__ import annotations

from typing import Any

import group
import pytest


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("processes", [2, 3])
def test_both_exchanges_give_one_total(engine: str, processes: int) -> None:
    reports: list[Any] = group.results(
        "exchange_worker.py", processes, "--engine", engine, forked=engine
    )
    assert reports[0]["listening"], "process 0 holds the store"
    # 127.0.0.1, the coordinator's, as /proc/net writes it; not every address of the machine.
    # IPv6 sockets give it as ::ffff:127.0.0.1.
    listening = {address[-8:] for report in reports for address in report["listening"]}
    assert listening == {"0100007F"}
    expected = reports[0]["expected"]
    for report in reports:
        assert report["moved"] == {"wholes": ["gather"], "slices": ["scatter", "gather"]}
        # Of 2 and of 3 processes, 5 replicas leave one partial sum to some and two to others.
        assert report["wholes"] == report["slices"] == expected
        assert report["reversed"] != expected, "the order of additions is in the bits"
