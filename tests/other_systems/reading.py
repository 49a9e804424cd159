"""Reads the run directory of `written_run.py` by all that reads, and prints what was found as JSON.

    python tests/other_systems/reading.py FOLDER OUTPUT

OUTPUT, a new folder, gets the files that are exported and drawn.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

import perdure
from perdure.cli import main as perdure_command

COMMANDS = {
    "ls": ("ls", "run", "--json"),
    "show": ("show", "run@2", "--json"),
    "stats": ("show", "run@2", "--stats"),
    "diff": ("diff", "run@1", "run@3"),
    "verify": ("verify", "run"),
    "export": ("export", "run@3", "OUTPUT/exported.safetensors", "--to", "safetensors"),
    "report": ("report", "run", "-o", "OUTPUT/report.html"),
}


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command, as it would be printed to a pipe."""
    is_windows = "windows" in (os.environ.get("PERDURE_TEST_SYSTEM"), platform.system().lower())
    encoding = "cp1252" if is_windows else "utf-8"
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict", newline="\n")
    with redirect_stdout(out), redirect_stderr(out):
        try:
            perdure_command(list(arguments), prog_name="perdure")
            status: Any = 0
        except SystemExit as exit_:
            status = exit_.code
    out.flush()
    return status, out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def timeless(text: str) -> Any:
    """A document of `--json` without the place of the run and the time since it was written."""
    document = json.loads(text)
    document.pop("run", None)
    for part in (document, *document.get("checkpoints", ())):
        part.pop("age_s", None)
    return document


def digest(value: Any) -> str:
    """Type and bytes of a leaf."""
    data = np.asarray(value)
    kind = f"{type(value).__name__} {data.dtype} {data.shape} "
    return kind + hashlib.sha256(data.tobytes()).hexdigest()


def main(folder: Path, output: Path) -> None:
    output.mkdir()
    os.chdir(folder)
    os.environ["COLUMNS"] = "120"  # one form of the tables
    found: dict[str, Any] = {"commands": {}, "leaves": {}}
    for name, command in COMMANDS.items():
        arguments = [word.replace("OUTPUT", output.as_posix()) for word in command]
        status, text = run(*arguments)
        for path in (str(output), output.as_posix()):
            text = text.replace(path, "OUTPUT")
        text = text.replace("OUTPUT\\", "OUTPUT/")
        found["commands"][name] = [status, timeless(text) if "--json" in command else text]
    for step in (1, 2, 3):
        state = perdure.load_checkpoint("run", step)
        found["leaves"][step] = {name: digest(value) for name, value in sorted(state.items())}
    with perdure.CheckpointManager("run") as manager:
        restored = manager.restore(like=state)
        found["restored"] = [restored.step, digest(restored.state["large"])]
    exported = output / "exported.safetensors"
    found["exported"] = (
        hashlib.sha256(exported.read_bytes()).hexdigest() if exported.exists() else ""
    )
    page = output / "report.html"
    found["page"] = page.exists() and "<html" in page.read_text(encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).absolute())
