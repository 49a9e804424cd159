"""The options that all examples share, and the comparison at their end."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from perdure.store import Run


def options(doc: str | None, **numbers: int) -> argparse.Namespace:
    """Parse `--data`, `--directory`, and an option for each of `numbers` with its default."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--data", help="MNIST files (IDX or .npz); default: scikit-learn's digits")
    parser.add_argument("--directory", type=Path, help="where the runs go; default: a new place")
    for name, default in numbers.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"default: {default}")
    given = parser.parse_args()
    given.directory = given.directory or Path(tempfile.mkdtemp(prefix="perdure-"))
    return given


def prove(undisturbed: Path, other: Path) -> None:
    """Compare the newest checkpoints of two runs, bit by bit; exit with status 1 if they differ."""
    newest = []
    for where in (undisturbed, other):
        run = Run(where)
        manifest = run.manifest(run.steps()[-1])
        newest.append((manifest.step, manifest.fingerprint))
        print(f"{where}: step {manifest.step}, fingerprint {manifest.fingerprint[:16]}")
    if newest[0] != newest[1]:
        sys.exit("FAIL: they differ")
    print("PASS: every bit is equal")
