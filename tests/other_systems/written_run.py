"""Writes a run for readers on other systems, into the folder that is the argument.

    python tests/other_systems/written_run.py FOLDER

The folder gets the run directory `run` and `answer.json`, which says what `reading.py` found in it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import perdure

LARGE = 3 * 512 * 1024 + 7
"""Elements of a leaf that is read in several chunks, the last one not of whole blocks."""


def main(folder: Path) -> None:
    """Write three checkpoints, with every kind of bytes that a text mode would change."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    state = {
        "large": rng.random(LARGE, np.float32),
        "bytes": np.frombuffer(b"\r\n\n\x1a\x00" * 1001, np.uint8).copy(),
        "name": "Gauß",
        "step": 0,
    }
    with perdure.CheckpointManager(folder / "run") as manager:
        state, _ = manager.restore_or_initialize(state)
        for step in (1, 2, 3):
            state["large"][step] = step
            state["step"] = step
            manager.save(step, state, metrics={"loss": 1 / step})
    reading = Path(__file__).with_name("reading.py")
    command = [sys.executable, str(reading), str(folder), str(folder / "written")]
    found = subprocess.run(command, capture_output=True, check=True).stdout
    (folder / "answer.json").write_bytes(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
