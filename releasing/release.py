"""Builds what a release uploads, checks it, and tries it as a stranger gets it: `make release`.

The wheel is built from the sdist. Its files have to be those of src/perdure and no others. Both are
installed into empty environments, on every interpreter that is there, and the wheel runs the loop of
the README and the demo. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from environments import (
    ROOT,
    Failed,
    interpreters,
    print_table,
    run,
    try_demo,
    try_readme,
)

T = TypeVar("T")


def build(out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def check_metadata(sdist: Path, wheel: Path) -> str:
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"perdure-{version}.dist-info/METADATA").decode()
    description = text.partition("\n\n")[2]
    if "](docs/" in description or "](examples/" in description:
        raise Failed("the description has links that lead nowhere outside of the repository")
    if f"## {version} (" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        return f"version {version}; run `towncrier build` first: CHANGELOG.md has no such version"
    return f"version {version}"


def check_wheel(wheel: Path) -> str:
    """The files of the wheel are those that git has in src/perdure."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}
    return _same("wheel", found, expected)


def check_sdist(sdist: Path) -> str:
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    found = {name.partition("/")[2] for name in names} - {"PKG-INFO"}
    return _same("sdist", found, tracked())


def tracked() -> set[str]:
    return set(run("git", "ls-files", directory=ROOT).splitlines())


def _same(what: str, found: set[str], expected: set[str]) -> str:
    if found != expected:
        missing, extra = sorted(expected - found)[:5], sorted(found - expected)[:5]
        raise Failed(f"the {what} lacks {missing} and has {extra}, which git does not have")
    return f"{len(found)} files"


def try_installed(python: str, package: Path, extras: str, work: Path) -> Path:
    """Install a package into an empty environment, and ask for its version."""
    run(python, "-m", "venv", work)
    pip = (work / "bin" / "python", "-m", "pip", "install", "--quiet")
    run(*pip, f"{package}{extras}")
    run(work / "bin" / "perdure", "--version")
    return work / "bin"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--python", action="append", default=[], help="instead of those on the PATH"
    )
    given = parser.parse_args()
    rows: list[tuple[str, str, str]] = []

    def step(what: str, action: Callable[..., T], *arguments: object) -> T | None:
        print(f"{what} ...", file=sys.stderr, flush=True)
        try:
            found = action(*arguments)
        except Failed as error:
            rows.append((what, "FAILED", str(error).strip().splitlines()[-1]))
            print(error, file=sys.stderr)
            return None
        rows.append((what, "ok", found if isinstance(found, str) else ""))
        return found

    sdist, wheel = build(given.out)
    step("metadata, description", check_metadata, sdist, wheel)
    step("files of the wheel", check_wheel, wheel)
    step("files of the sdist", check_sdist, sdist)
    with tempfile.TemporaryDirectory(prefix="perdure-release-") as scratch:
        for version, python in interpreters(given.python).items():
            work = Path(scratch) / version
            name = f"Python {version}"
            step(f"{name}: sdist installed", try_installed, python, sdist, "", work / "sdist")
            plain = step(
                f"{name}: wheel installed", try_installed, python, wheel, "", work / "wheel"
            )
            if plain is not None:
                step(f"{name}: the loop of the README", try_readme, plain, work / "readme")
            extras = (python, wheel, "[jax,demo]", work / "demo")
            full = step(f"{name}: wheel[jax,demo] installed", try_installed, *extras)
            if full is not None:
                step(f"{name}: perdure demo", try_demo, full, "jax", work / "run")
            shutil.rmtree(work, ignore_errors=True)
    print_table(("what", "", "found"), rows)
    for path in (sdist, wheel):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"to upload: {path}  {path.stat().st_size:,} bytes  sha256 {digest}")
    return int(any(row[1] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
