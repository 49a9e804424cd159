"""Proves the store with real disks, processes and damage. Some minutes on two cores.

Run by `make proof-store`; ARGS='crash power' picks parts. Parts that need root are skipped with a
message.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cloud_rows import cloud_rows
from store_crash import crash_rows, power_rows
from store_damage import damage_rows
from store_disk import disk_rows, donation_rows, writer_rows
from store_mirror import mirror_rows
from store_walk import walk_rows

from report import Row, finish

PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "crash": crash_rows,
    "power": power_rows,
    "damage": damage_rows,
    "disk": disk_rows,
    "writers": writer_rows,
    "donation": donation_rows,
    "mirror": mirror_rows,
    "cloud": cloud_rows,
    "walk": walk_rows,
}


def rows(parts: list[str]) -> Iterator[Row]:
    """The rows of the chosen parts, each in its own directory."""
    for part in parts:
        with tempfile.TemporaryDirectory(prefix=f"perdure-{part}-") as name:
            yield from PARTS[part](Path(name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them by default")
    finish("store", rows(parser.parse_args().parts or list(PARTS)))
