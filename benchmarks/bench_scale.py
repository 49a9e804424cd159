"""States that are sharded over processes, saved and restored by perdure, Orbax and DCP.

make bench-scale          one table, and the same as JSON in build/bench-scale.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import scale_shards
from table import finish


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale.json"))
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every subject")
    parser.add_argument("--saves", type=int, default=2, help="saves in each turn, after the first")
    parser.add_argument("--processes", default="2,4", help="with commas between")
    subjects = ",".join(scale_shards.PEERS)
    parser.add_argument("--subjects", default=subjects, help="with commas between")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    return finish(scale_shards.rows(given), given.out)


if __name__ == "__main__":
    sys.exit(main())
