"""Proves that a state does not depend on how it is sharded over processes. About 10 minutes.

Twelve shardings for each engine, on one to four processes, uneven ones and copies among them. The state
is saved under each, and restored under each: 144 pairs. Leaves and fingerprints are the same in all.

Run by `make proof-scale`; ARGS='--engine torch' runs one engine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Row, finish, row

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
for folder in (TESTS, TESTS / "distribute"):
    sys.path.insert(0, str(folder))

from group import results  # noqa: E402
from shard_worker import DEVICES, SHARDINGS, names  # noqa: E402

from perdure import verify_run  # noqa: E402
from perdure.store import Run  # noqa: E402

Outcome = tuple[str, bool, str]


def group(engine: str, processes: int, action: str, root: Path) -> list[list[Outcome]]:
    """What each process of a group reports."""
    devices = {"JAX_NUM_CPU_DEVICES": str(DEVICES[processes]), "JAX_PLATFORMS": "cpu"}
    arguments = ("--engine", engine, "--action", action, "--root", str(root))
    program: Any = str(HERE / "shard_worker.py")
    env = devices if engine == "jax" else {}
    reports = results(program, processes, *arguments, env=env, forked=engine)
    return [report["outcomes"] for report in reports]


def pairs(engine: str, root: Path) -> Iterator[Row]:
    """Save under each sharding, restore under each."""
    for count in SHARDINGS[engine]:
        group(engine, count, "save", root)
    saved = {name: Run(root / name).manifest(1).fingerprint for name in names(engine)}
    first = next(iter(saved.values()))
    yield row(
        f"{engine}: the fingerprint of one process under {len(saved)} shardings",
        [fingerprint == first for fingerprint in saved.values()],
    )
    yield row(
        f"{engine}: checkpoints that verify",
        [not verify_run(Run(root / n)).problems for n in saved],
    )
    leaves: list[bool] = []
    prints: list[bool] = []
    for count in SHARDINGS[engine]:
        reports = group(engine, count, "restore", root)
        for outcomes in zip(*reports, strict=True):
            leaves.append(all(equal for _, equal, _ in outcomes))
            prints.append(all(fingerprint == first for *_, fingerprint in outcomes))
            if not (leaves[-1] and prints[-1]):
                print(f"       {engine}, {outcomes[0][0]}: {outcomes}")
    yield row(f"{engine}: saved under one and restored under another, equal leaves", leaves)
    yield row(f"{engine}: saved again by those that restored it, equal fingerprints", prints)
    yield row(f"{engine}: pairs", [True] * len(leaves) if len(leaves) == 144 else [False])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("jax", "torch"))
    given = parser.parse_args()

    def rows() -> Iterator[Row]:
        for engine in SHARDINGS if given.engine is None else (given.engine,):
            with tempfile.TemporaryDirectory(prefix="perdure-proof-") as scratch:
                yield from pairs(engine, Path(scratch))

    finish("scale", rows())


if __name__ == "__main__":
    main()
