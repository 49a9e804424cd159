"""Environments that hold one installation of perdure and nothing else, and what is tried in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
SERIES = ("3.11", "3.12", "3.13", "3.14")
"""The series of Python that perdure supports."""


class Failed(Exception):
    """A command failed; the message is the end of what it printed."""


def run(*command: object, directory: Path | None = None) -> str:
    """Run a command and return its output; raises `Failed`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MAKEFLAGS")
    }
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise Failed(f"{command[0]} ended with {ended.returncode}:\n{ended.stdout[-2000:]}")
    return ended.stdout


def interpreters(named: Sequence[str]) -> dict[str, str]:
    """By version, the interpreters that are named, or else those on the PATH that start."""
    found: dict[str, str] = {}
    for name in named or [sys.executable, *(f"python{series}" for series in SERIES)]:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            version = run(path, "-c", "import platform; print(platform.python_version())").strip()
        except Failed:  # a stand-in of a version manager that has no such version
            continue
        if version.rpartition(".")[0] in SERIES:
            found.setdefault(version.rpartition(".")[0], path)
    return dict(sorted(found.items(), key=lambda item: int(item[0].partition(".")[2])))


def try_readme(bin_folder: Path, directory: Path) -> None:
    """Run the loop of the README twice and list its checkpoints; raises `Failed`."""
    directory.mkdir(parents=True)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = text.split("```python\n", 1)[1].split("```", 1)[0]
    (directory / "first.py").write_text(program, encoding="utf-8")
    for _ in range(2):  # the second time it continues
        run(bin_folder / "python", "first.py", directory=directory)
    if "100" not in run(bin_folder / "perdure", "ls", "runs/first", directory=directory):
        raise Failed("`perdure ls runs/first` does not list step 100")


def try_demo(bin_folder: Path, engine: str, directory: Path) -> None:
    """Run `perdure demo`, which compares the bits; raises `Failed`."""
    directory.mkdir(parents=True)
    command = (bin_folder / "perdure", "demo", "--engine", engine, "--epochs", 2)
    run(*command, directory=directory)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for line in (titles, *rows):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
