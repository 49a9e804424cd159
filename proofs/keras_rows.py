"""Lines 1 and 2 of the loops: Keras's `fit`, interrupted, against one that nobody interrupts.

The matrix: backend x data x model x interruption, for our callback and for Keras's own. A backend is
one program (`keras_program.py`) that imports everything once and forks a process for each run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from keras_program_cases import BATCHES_OF_KILLS, FAULTS, LONG, MODELS, SOURCES
from report import Row, row

PROGRAM = Path(__file__).parent / "keras_program.py"
OWNERS = ("perdure", "keras")


class Backend:
    """The program on one backend."""

    def __init__(self, name: str, work: Path) -> None:
        settings = {
            "KERAS_BACKEND": name,
            "JAX_PLATFORMS": "cpu",
            "PJRT_NPROC": "8",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self._work = work
        self._log = (work / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def run(self, name: str, **case: Any) -> tuple[int, Any, int]:
        """Status, end, and the number of steps that all runs of this name have made."""
        where = self._work / name
        where.mkdir(exist_ok=True)
        paths = {part: str(where / part) for part in ("backup", "log", "result")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**paths, **case}) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        result, log = Path(paths["result"]), Path(paths["log"])
        text = result.read_text() if result.exists() else ""
        result.unlink(missing_ok=True)
        if status == 1:
            print(text)
        end = json.loads(text) if status == 0 else None
        return status, end, len(log.read_text().splitlines()) if log.exists() else 0


def matrix(work: Path) -> Iterator[Row]:
    """Line 1. A cell is `=` where the end and the number of optimizer steps are equal."""
    table = ["| backend | model | data | " + " | ".join(FAULTS) + " |", "|---" * 7 + "|"]
    held: dict[str, list[bool]] = {who: [] for who in OWNERS}
    fired: list[bool] = []
    without = importlib.util.find_spec("tensorflow") is None
    if without:
        print("       left out: TensorFlow is not installed here (pip install tensorflow-cpu)")
    for backend, every in SOURCES.items():
        sources = [each for each in every if not (without and each == "tf.data")]
        if without and backend == "tensorflow":
            continue
        with Backend(backend, work) as program:
            for model in MODELS:
                for data in sources:
                    cells: dict[str, list[str]] = {}
                    for who in OWNERS:
                        case = {"who": who, "model": model, "data": data}
                        name = f"{backend}-{model}-{data}-{who}"
                        _, whole, _ = program.run(f"{name}-whole", **case)
                        for kind, (fault, status) in FAULTS.items():
                            at = f"{name}-{kind.replace(' ', '-')}"
                            ended, _, _ = program.run(at, **case, fault=fault)
                            _, end, _ = program.run(at, **case)
                            # Keras's own does not listen to SIGTERM, which then ends the process.
                            fired.append(ended in (status, -15 if status == 75 else status))
                            equal = whole is not None and end == whole
                            held[who].append(equal)
                            cells.setdefault(kind, []).append("=" if equal else "differs")
                    row_of = " | ".join(" / ".join(cell) for cell in cells.values())
                    table.append(f"| {backend} | {model} | {data} | {row_of} |")
                    print(table[-1], flush=True)
    Path("build").mkdir(exist_ok=True)
    Path("build/keras-matrix.md").write_text("\n".join(table) + "\n")
    yield row("interruptions of the matrix that fired", fired)
    yield row("fit with our callback: cells equal to the uninterrupted run", held["perdure"])
    differ = [not equal for equal in held["keras"]]
    print(f"       Keras's own callback differs in {sum(differ)} of {len(differ)} cells")


def every_batch(work: Path) -> Iterator[Row]:
    """Line 2: SIGKILL at every batch of a fit of three epochs of ten."""
    equal = []
    with Backend("jax", work) as program:
        case = {"who": "perdure", "model": "mlp", "data": "arrays", "every": 1, **LONG}
        _, whole, _ = program.run("kills-whole", **case)
        for epoch, batch in BATCHES_OF_KILLS:
            name = f"kill-{epoch}-{batch}"
            ended, _, _ = program.run(name, **case, fault=["SIGKILL", epoch, batch])
            _, end, _ = program.run(name, **case)
            equal.append(ended == -9 and end is not None and end == whole)
    yield row("killed at each batch of a fit, and resumed: equal", equal)


def keras_fit(work: Path, signals: int) -> Iterator[Row]:
    """Both lines; `signals` is for the other parts."""
    yield from matrix(work)
    yield from every_batch(work)
