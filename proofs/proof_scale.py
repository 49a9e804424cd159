"""Proves that sharded states are saved and restored exactly. About 10 minutes on two cores.

Run by `make proof-scale`; ARGS='--engine torch' runs one engine, ARGS=--kills the killed processes.
"""

from __future__ import annotations

import argparse

import shard_rows

from report import finish


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("jax", "torch"))
    parser.add_argument("--kills", action="store_true", help="the killed processes alone")
    given = parser.parse_args()
    finish("scale", shard_rows.rows(given.engine, kills_only=given.kills))


if __name__ == "__main__":
    main()
