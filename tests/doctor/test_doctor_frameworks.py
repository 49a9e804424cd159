"""The doctor on JAX and PyTorch: a process of each computes kernels and first steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from forked import events, run_forked
from perdure.doctor import Computed, ResultComparison, compare


def run(engine: str, **variables: str) -> list[dict[str, Any]]:
    program = Path(__file__).parent / f"{engine}_doctor_worker.py"
    environment = {**os.environ, **variables}
    ((status, out, err),) = run_forked(engine, program, [[]], [environment])
    assert status == 0, err
    return events(out)


def compared(results: list[dict[str, Any]]) -> dict[str, ResultComparison]:
    rows = compare(Computed("", r["what"], r["device"], 1, r["leaves"]) for r in results)
    return {row.what: row for row in rows}


def kernels(found: list[dict[str, Any]]) -> dict[str, ResultComparison]:
    assert [event for event in found if event["e"] in ("failed", "refused")] == []
    return compared([event for event in found if event["e"] == "computed"])


def steps(found: list[dict[str, Any]]) -> list[dict[str, ResultComparison]]:
    return [compared(event["results"]) for event in found if event["e"] == "checked"]


def differing(rows: dict[str, ResultComparison]) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    return {
        what: [(place.device, place.leaves) for place in row.deviations]
        for what, row in rows.items()
        if not row.is_equal
    }


def test_jax_on_four_devices() -> None:
    found = run("jax", JAX_NUM_CPU_DEVICES="4")
    (built,) = [event for event in found if event["e"] == "built"]
    assert len(built["names"]) == 12
    assert built["devices"].startswith("cpu:0 (cpu), cpu:1 (cpu)")
    rows = kernels(found)
    assert rows["matmul of one row bfloat16"].devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert differing(rows) == {"planted float32": [("cpu:2", ("result",))]}
    right, wrong = steps(found)
    assert differing(right) == {}
    assert {what: row.results for what, row in right.items()} == {
        # Twice on its own device, and once on the other.
        **{f"replica {number}": 3 for number in range(2)},
        "the sum of the replicas": 1,
        # Twice on each device by the verbs, and twice as one program.
        "update": 8,
    }
    assert right["update"].devices == (
        "cpu:0",
        "cpu:1",
        "cpu:0, as one program",
        "cpu:1, as one program",
    )
    assert differing(wrong) == {"update": [("cpu:1, as one program", ("state/w",))]}


def test_pytorch() -> None:
    found = run("torch")
    assert found[0]["deterministic"] is True
    rows = kernels(found)
    assert len(rows) == 19
    assert differing(rows) == {}
    # Arguments that are changed in place, buffers and optimizer are as before at the second time.
    right, outside = steps(found)
    assert differing(right) == {}
    assert [row.results for row in right.values()] == [2, 2, 2, 2, 1, 2]
    # Moments that are not in the state make another update of the same state.
    ((what, ((device, leaves),)),) = differing(outside).items()
    assert (what, device) == ("update", "cpu")
    assert "state/model/0/weight" in leaves
