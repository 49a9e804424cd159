"""The rows `{what, tried, held, met}` that every proof prints and writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypedDict


class Row(TypedDict):
    """`held` of `tried` cases kept the promise; `met` says whether that is enough."""

    what: str
    tried: int
    held: int
    met: bool


def row(what: str, outcomes: Iterable[bool]) -> Row:
    """A row that is met if there were cases and all of them held."""
    results = list(outcomes)
    return {
        "what": what,
        "tried": len(results),
        "held": sum(results),
        "met": bool(results) and all(results),
    }


def finish(name: str, rows: Iterator[Row]) -> None:
    """Print each row when it is known, write `build/proof-NAME.json`, exit with 1 if one is not met."""
    done: list[Row] = []
    target = Path("build") / f"proof-{name}.json"
    target.parent.mkdir(exist_ok=True)
    for line in rows:
        done.append(line)
        verdict = "met" if line["met"] else "NOT MET"
        print(f"{line['held']:>6} of {line['tried']:<6} {verdict:<8} {line['what']}", flush=True)
        target.write_text(json.dumps(done, indent=1) + "\n")
    sys.exit(0 if done and all(line["met"] for line in done) else 1)
