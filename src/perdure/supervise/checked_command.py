"""`checked_command`: refuses a command that cannot be started, before anything is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from perdure.errors import CommandError


def checked_command(command: Sequence[str], usage: str = "perdure run --") -> list[str]:
    """The command; raises `CommandError` if it cannot be started. `usage` is what stands before it."""
    if not command:
        raise CommandError(f"expected a command after --, for instance: {usage} python train.py")
    path = shutil.which(command[0])
    if path is None:
        raise CommandError(
            f"{command[0]}: no such command, or not executable. Expected a program and its arguments, "
            f"for instance: {usage} python train.py"
        )
    _check_interpreter(path, usage)
    first = os.path.basename(command[0])
    script = command[1] if first.startswith("python") and len(command) > 1 else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise CommandError(f"{script}: no such file, in {Path.cwd()}")
    return list(command)


def _check_interpreter(path: str, usage: str) -> None:
    """Raises `CommandError` if the first line of a script names a program that is not there."""
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
        raise CommandError(
            f"{path}: its first line names the interpreter {interpreter}, which is no program here. "
            f"Correct that line, or name the interpreter: {usage} python {path}"
        )
