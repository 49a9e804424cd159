"""`checked_command`: refuses a command that cannot be started, before anything is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from perdure.errors import LaunchError


def checked_command(command: Sequence[str]) -> list[str]:
    """The command; raises `LaunchError` if it cannot be started."""
    if not command:
        raise LaunchError(
            "expected a command after --, for instance: perdure run -- python train.py"
        )
    path = shutil.which(command[0])
    if path is None:
        raise LaunchError(
            f"{command[0]}: no such command, or not executable. Expected a program and its arguments, "
            "for instance: perdure run -- python train.py"
        )
    _check_interpreter(path)
    first = os.path.basename(command[0])
    script = command[1] if first.startswith("python") and len(command) > 1 else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise LaunchError(f"{script}: no such file, in {Path.cwd()}")
    return list(command)


def _check_interpreter(path: str) -> None:
    """Raises `LaunchError` if the first line of a script names a program that is not there."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:  # a program may be executable and not readable
        return
    words = line[2:].split()
    if not line.startswith(b"#!") or not words:
        return
    interpreter = os.fsdecode(words[0])
    if not os.access(interpreter, os.X_OK):
        raise LaunchError(
            f"{path}: its first line names the interpreter {interpreter}, which is no program here. "
            f"Correct that line, or name the interpreter: perdure run -- python {path}"
        )
