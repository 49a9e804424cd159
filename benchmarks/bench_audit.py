"""What it costs to check a run: digests, the journal at every step, a search in two journals, audits.

    make bench-audit        one table, and the same as JSON in build/bench-audit.json

The large state has 16 leaves of float32, 1 GiB in all, on the CPU, and stands beside a copy of the
same memory. The rounds of all subjects alternate in one process, and the best of each counts. `--mib`
takes another size, and `--only digest,bisect` some of the parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from audit_cost import audit_rows
from audit_journal import bisect_rows, journal_rows
from store_probe import MIB, spread
from table import Row, compared, finish, row

from perdure.digests import digest

LEAVES = 16
SMALL = 1000


def digest_rows(size: int, rounds: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    leaves = {
        f"layer{n:02}/kernel": rng.integers(0, 2**32, size // LEAVES // 4, np.uint32).view("<f4")
        for n in range(LEAVES)
    }
    copies = {path: np.zeros_like(array) for path, array in leaves.items()}
    on_jax = jax.tree.map(jnp.asarray, leaves)
    on_torch = {path: torch.from_numpy(array) for path, array in leaves.items()}

    def memcpy() -> None:
        for path, array in leaves.items():
            np.copyto(copies[path], array)

    subjects: dict[str, Callable[[], Any]] = {
        "memcpy": memcpy,
        "NumPy": lambda: digest(leaves),
        "JAX": lambda: digest(on_jax),
        "PyTorch": lambda: digest(on_torch),
    }
    results = {name: subject() for name, subject in subjects.items()}  # compiles, and touches pages
    assert len({results[name] for name in subjects if name != "memcpy"}) == 1, results
    speeds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            start = time.perf_counter()
            subject()
            speeds[name].append(size / (time.perf_counter() - start) / 1e9)
    best = {name: max(series) for name, series in speeds.items()}
    for name, series in speeds.items():
        what = row(
            name if name == "memcpy" else f"digest: {name}", best[name], "GB/s", spread(series)
        )
        yield what if name == "memcpy" else compared(what, "memcpy", best["memcpy"], least=0.4)


def small_rows(rounds: int) -> Iterator[Row]:
    """What each of many small leaves adds to a digest."""
    leaves = {
        f"layer{n}": {"kernel": np.full((8, 8), n, np.float32), "bias": np.zeros(8, np.float32)}
        for n in range(SMALL // 2)
    }
    states = {
        "NumPy": leaves,
        "JAX": jax.tree.map(jnp.asarray, leaves),
        "PyTorch": jax.tree.map(torch.from_numpy, leaves),
    }
    assert len({digest(state) for state in states.values()}) == 1
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(4 * rounds):
        for name, state in states.items():
            start = time.perf_counter()
            digest(state)
            seconds[name].append((time.perf_counter() - start) / SMALL * 1e6)
    for name, series in seconds.items():
        yield row(
            f"digest of {SMALL:,} small leaves: {name}", min(series), "us/leaf", spread(series)
        )


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "digest": lambda options: digest_rows(options.mib * MIB, options.rounds),
    "small": lambda options: small_rows(options.rounds),
    "journal": lambda options: journal_rows(options.blocks, options.steps),
    "bisect": lambda options: bisect_rows(options.rounds),
    "audit": lambda options: audit_rows(options.blocks, options.steps),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=20, help="of bare and of recorded steps")
    parser.add_argument("--steps", type=int, default=10, help="in each block")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    options = parser.parse_args()
    parts = [PARTS[name](options) for name in options.only.split(",")]
    return finish(chain.from_iterable(parts), options.out)


if __name__ == "__main__":
    sys.exit(main())
