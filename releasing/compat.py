"""Tries perdure with the lowest and the newest releases of what it depends on: `make compat`.

For each interpreter that is there and each engine: the lowest releases that pyproject.toml allows and
that have wheels, and the newest. In each environment the loop of the README runs twice, and the demo,
which compares the bits of an interrupted run on other devices. PyTorch is tried in the release of
requirements/constraints.txt alone, because every other one brings gigabytes; --torch names others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from environments import (
    ROOT,
    Failed,
    interpreters,
    print_table,
    run,
    try_demo,
    try_readme,
)

SHOWN = ("numpy", "blake3", "msgspec", "click", "rich", "ml-dtypes")


def pinned_torch() -> str:
    lines = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(python: str, resolution: str, engine: str, torch: str, work: Path) -> dict[str, str]:
    """Make an environment; returns the releases that it has, by name."""
    uv = (sys.executable, "-m", "uv", "--quiet")
    run(*uv, "venv", "--python", python, work)
    extra = [torch] if engine == "torch" else []
    run(
        *(*uv, "pip", "install", "--python", work / "bin" / "python", "--only-binary", ":all:"),
        *("--no-binary", "perdure", "--resolution", resolution, f"{ROOT}[{engine},demo]", *extra),
    )
    listed = run(*uv, "pip", "list", "--python", work / "bin" / "python", "--format", "json")
    return {package["name"]: package["version"] for package in json.loads(listed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "compat.json")
    parser.add_argument(
        "--python", action="append", default=[], help="instead of those on the PATH"
    )
    parser.add_argument("--torch", default=pinned_torch(), help="a requirement, such as torch>=2.6")
    given = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="perdure-compat-") as scratch:
        for version, python in interpreters(given.python).items():
            for engine in ("jax", "torch"):
                for resolution in ("lowest-direct", "highest"):
                    work = Path(scratch) / f"{version}-{engine}-{resolution}"
                    print(f"{work.name} ...", file=sys.stderr, flush=True)
                    tried = _try(python, engine, resolution, given.torch, work)
                    rows.append((version, engine, resolution, *tried))
    titles = ("Python", "engine", "resolution", "its release", *SHOWN, "README", "demo")
    print_table(titles, rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps([dict(zip(titles, row, strict=True)) for row in rows], indent=1)
    )
    return int(any("FAILED" in row for row in rows))


def _try(python: str, engine: str, resolution: str, torch: str, work: Path) -> tuple[str, ...]:
    try:
        found = install(python, resolution, engine, torch, work)
    except Failed as error:
        print(error, file=sys.stderr)
        return ("not to be had here", *("" for _ in SHOWN), "", "")
    results = []
    for attempt in (
        lambda: try_readme(work / "bin", work / "readme"),
        lambda: try_demo(work / "bin", engine, work / "demo"),
    ):
        try:
            attempt()
            results.append("ok")
        except Failed as error:
            print(error, file=sys.stderr)
            results.append("FAILED")
    return (found.get(engine, ""), *(found.get(name, "") for name in SHOWN), *results)


if __name__ == "__main__":
    sys.exit(main())
