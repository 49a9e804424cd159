"""The cost of scale: many leaves, many checkpoints, and states that are sharded over processes.

    make bench-scale          one table, and the same as JSON in build/bench-scale.json

Each part of the table has a module of its own, with `add_arguments` and `rows`.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

import scale_shards
import scale_store
from table import finish

PARTS = {"store": scale_store, "shards": scale_shards}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale.json"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    for part in PARTS.values():
        part.add_arguments(parser)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)  # run directories are made beside it
    return finish(chain.from_iterable(PARTS[name].rows(given) for name in given.parts), given.out)


if __name__ == "__main__":
    sys.exit(main())
