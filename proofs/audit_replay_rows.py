"""A run replayed on every topology has the bits of its journal; a program with one changed line not."""

from __future__ import annotations

import os
from collections.abc import Iterator

from audit_runs import TOPOLOGIES, command, differing, in_directory, replayed, run_to_end

from report import Row, row


def rows() -> Iterator[Row]:
    """One row for each program and claim."""
    for engine in ("jax", "torch"):
        yield from in_directory(_demo(engine))
        yield from in_directory(_strategy(engine))
    yield from in_directory(_trainer())
    for backend in ("jax", "torch"):
        yield from in_directory(_fit(backend))
    for framework in ("numpy", "jax", "torch"):
        yield from in_directory(_loop(framework))


def _demo(engine: str) -> Iterator[Row]:
    line = command("demo", engine, "run=demo", "steps=21")
    run_to_end(line)
    yield _everywhere(f"the demo on {engine}", "demo", line, 21)
    yield _changed(f"the demo on {engine}", "demo", [*line, "other=12"], 12, "batch")


def _strategy(engine: str) -> Iterator[Row]:
    line = command("strategy_step", engine, "run=mine")
    run_to_end(line)
    changed = [*line, "plant=contribution", "at=11"]
    yield _everywhere(f"a strategy on {engine}", "mine", line, 13)
    yield _changed(f"a strategy on {engine}", "mine", changed, 11, differing(engine, "total"))


def _trainer() -> Iterator[Row]:
    line = command("trainer")
    run_to_end(line)
    yield _everywhere("a Trainer", "trainer", line, 20)
    yield _changed("a Trainer", "trainer", [*line, "rate=0.06"], 10, "state")


def _loop(framework: str) -> Iterator[Row]:
    line = command("plain_loop", framework)
    run_to_end(line)
    found = [replayed("plain", line, first=first) for first in (0, 4, 8)]
    yield row(
        f"replay, a loop of {framework}: from the beginning and two checkpoints",
        [
            (each.verdict, each.steps) == ("reproduced", 13 - first)
            for each, first in zip(found, (0, 4, 8), strict=True)
        ],
    )
    yield _changed(f"a loop of {framework}", "plain", [*line, "rate=0.2"], 7, "state")


def _everywhere(name: str, run: str, line: list[str], steps: int) -> Row:
    outcomes = []
    for where, topology in TOPOLOGIES.items():
        found = replayed(run, line, first=0, **topology)
        outcomes.append((found.verdict, found.steps) == ("reproduced", steps))
        if not outcomes[-1]:
            print(f"       {name} on {where}: {found}")
    return row(f"replay, {name}: every step on {', '.join(TOPOLOGIES)}", outcomes)


def _changed(name: str, run: str, line: list[str], step: int, what: str) -> Row:
    found = replayed(run, line, first=0)
    seen = found.verdict, found.step, found.what
    if seen != ("differs", step, what):
        print(f"       {name}: {found}")
    return row(f"replay, {name} with one changed line: the step", [seen == ("differs", step, what)])


def _fit(backend: str) -> Iterator[Row]:
    name = f"a Keras fit on {backend}"
    os.environ["KERAS_BACKEND"] = backend
    line = command("keras_fit", "run=fit")
    run_to_end(line)
    found = [replayed("fit", line, first=first) for first in (0, None)]
    yield row(
        f"replay, {name}: from the beginning and from a backup in an epoch",
        [
            (each.verdict, each.steps, each.checkpoints > 0) == ("reproduced", 24 - start, True)
            for each, start in zip(found, (0, 15), strict=True)
        ],
    )
    yield _changed(name, "fit", [*line, "rate=0.01"], 4, "state")
    line = command("keras_fit", "run=silent", "journal=0")
    run_to_end(line)
    silent = replayed("silent", line, first=0)
    yield row(
        f"replay, {name} without a journal: the backups",
        [(silent.verdict, silent.steps, silent.checkpoints) == ("reproduced", 0, 2)],
    )
    yield _changed(f"{name} without a journal", "silent", [*line, "rate=0.01"], 15, "state")
