"""Steps of `explained_functions` on several topologies, beside the slow way on one device.

Prints JSON with, for each function and number of devices, whether the bits are those of the slow way,
and what `strategy.explain` says.
"""

from __future__ import annotations

import argparse
from typing import Any

import explained_functions as explained
import jax
import numpy as np
from matrix_worker import tell

from perdure.jax import MirroredStrategy

REPLICAS, STEPS = 4, 2


def trained(case: explained.Case, devices: int, *, slow: bool = False) -> tuple[list[bytes], str]:
    """The bits of the state and the logs after some steps, and what explains the step."""
    strategy = MirroredStrategy(devices, REPLICAS)
    step = strategy.step(case.grad, case.update)
    if slow:
        step._fused = None
    state, logs = explained.first_state(), None
    for number in range(STEPS):
        state, logs = step(state, explained.shares(number, REPLICAS))
    jax.effects_barrier()
    return [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, logs))
    ], strategy.explain(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="1", help="numbers of devices, by comma")
    parser.add_argument("--names", help="a part of the functions, by semicolon")
    options, _ = parser.parse_known_args()
    tables: dict[str, dict[str, explained.Case]] = {
        "fast": explained.FAST,
        "refused on several devices": explained.REFUSED_ON_SEVERAL,
    }
    names = options.names and options.names.split(";")
    rows: list[dict[str, Any]] = []
    for table, cases in tables.items():
        for name, case in cases.items():
            if names and name not in names:
                continue
            expected, _ = trained(case, 1, slow=True)
            for devices in map(int, options.devices.split(",")):
                actual, why = trained(case, devices)
                fast = table == "fast" or devices == 1
                phrase = "Fast: " if fast else f"Not fast: {case.why}"
                rows.append({
                    "name": name, "devices": devices, "equal": actual == expected,
                    "explained": why.startswith(phrase), "why": why,
                })  # fmt: skip
    tell(event="explained", rows=rows)


if __name__ == "__main__":
    main()
