"""The cost of scale: many leaves and many checkpoints.

    make bench-scale          one table, and the same as JSON in build/bench-scale.json

Each part of the table has a module of its own, with `add_arguments` and `rows`.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

import scale_store
from table import finish

PARTS = (scale_store,)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale.json"))
    for part in PARTS:
        part.add_arguments(parser)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)  # run directories are made beside it
    return finish(chain.from_iterable(part.rows(given) for part in PARTS), given.out)


if __name__ == "__main__":
    sys.exit(main())
