"""The command line and the result of a worker program that `group.launch` starts."""

from __future__ import annotations

import argparse
import json
import sys
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


def answer(result: dict[str, Any]) -> None:
    """Write the result as the last line of stdout."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
