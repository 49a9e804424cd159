"""Three runs of `fit` on the backend that the environment names: whole, killed, and resumed.

Run as a program. It forks before anything of a framework has run; prints what came out as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from cases import End, network, same, train


def forked(where: Path, body: Callable[[], End]) -> tuple[int, End | None]:
    """Status and end of `body` in a process of its own."""
    where.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        end = body()
        values = {name: value.hex() for name, value in end.values.items()}
        where.write_text(json.dumps([values, *end[1:]]))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        return status, None
    values, history, epochs, steps = json.loads(where.read_text())
    return status, End({n: bytes.fromhex(v) for n, v in values.items()}, history, epochs, steps)


def main(work: Path) -> None:
    several: dict[str, Any] = (
        {} if keras.backend.backend() == "torch" else {"steps_per_execution": 3}
    )
    options: dict[str, Any] = {
        "model": lambda: network(**several),
        "validation_data": (np.full((4, 5), 0.5, "float32"), np.arange(4) % 3),
    }

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    at = (1, 2) if several else (1, 1)
    _, whole = forked(work / "end", lambda: train(work / "whole", **options))
    killed, _ = forked(work / "end", lambda: train(work / "run", at, fault=kill, **options))
    _, again = forked(work / "end", lambda: train(work / "run", **options))
    assert whole is not None and again is not None  # noqa: PT018
    print(  # noqa: T201 (what the test reads)
        json.dumps(
            {
                "backend": keras.backend.backend(),
                "killed": killed,
                "equal": same(again, whole),
                "left": len(again.steps),
                "all": len(whole.steps),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
