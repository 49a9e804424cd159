"""The command line and the result of a worker program that `group.launch` starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def arguments(**options: Any) -> argparse.Namespace:
    """Parse the place in the group and one option for each keyword (its default or its type)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, type):
            parser.add_argument(flag, type=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    return parser.parse_args()


def listening() -> list[str]:
    """The addresses at which this process listens, as /proc/net writes them."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    addresses = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.append(fields[1].partition(":")[0])
    return sorted(addresses)


def answer(result: dict[str, Any]) -> None:
    """Write the result as the last line of stdout."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
