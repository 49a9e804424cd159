"""examples/cluster/train.py, to which something happens at given steps, once each.

    python faulty.py MARKS STEP:RANK:SIGNAL:WHOM... -- ARGUMENTS OF train.py

In process RANK of the group (* for each of them), after STEP, SIGNAL goes to WHOM: `self`, or
`launcher`, its parent, which is expected to pass SIGTERM on; the step waits for that. MARKS, a
directory, gets a file for each that has fired, and is why it does not fire again in the next attempt.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from perdure import CheckpointManager
from perdure.checkpoint.preemption import Interrupted

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster"
LIMIT_S = 60


def install(marks: Path, faults: Sequence[str]) -> None:
    """Let the faults happen in this process."""
    asked = CheckpointManager.reached_preemption

    def reached_preemption(manager: Any, step: int) -> bool:
        for fault in faults:
            at, rank, name, whom = fault.split(":")
            index = manager._processes.index
            if step != int(at) or rank not in ("*", str(index)):
                continue
            mark = marks / f"{at}-{index}-{name}-{whom}"
            if mark.exists():
                continue
            mark.touch()
            manager.preemption.install()
            number = signal.Signals[name]
            if whom == "self":
                os.kill(os.getpid(), number)
            else:
                os.kill(os.getppid(), number)
                with suppress(Interrupted):
                    manager.preemption.interruptible(partial(Event().wait, LIMIT_S))
        return asked(manager, step)

    CheckpointManager.reached_preemption = reached_preemption  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    faults, arguments = sys.argv[2:], []
    if "--" in faults:
        cut = faults.index("--")
        faults, arguments = faults[:cut], faults[cut + 1 :]
    install(Path(sys.argv[1]), faults)
    sys.path.insert(0, str(EXAMPLE))
    importlib.import_module("train").main(arguments)


if __name__ == "__main__":
    main()
