"""Part "keras" of the proof of the loop: an interrupted `fit` of Keras against an undisturbed one.

The matrix: backend x data x model x interruption, for perdure's callback and for Keras's. A backend is
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
EVERY = 2  # batches between two backups


class Backend:
    """keras_program.py on one backend."""

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
        """The status and the result of a run, and the number of steps of all runs of this name."""
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


def resumed(whole: int, killed: int, all_steps: int, every: int) -> bool:
    """Whether a second run resumed from a backup, by the number of executed steps.

    `killed` are the steps of the first run, `all_steps` of both, and `whole` of an uninterrupted run.
    The save in progress is lost with the process, so that at most two intervals are run again. A run
    that starts over ends with the same bits but executes more steps.
    """
    again = all_steps - whole  # the killed step less the step of the resume
    return 0 <= again <= 2 * every and killed <= all_steps


def matrix(work: Path) -> Iterator[Row]:
    """The matrix. A cell is `=` if the result is equal and the second run resumed from a backup."""
    width = len(FAULTS) + 3
    table = ["| backend | model | data | " + " | ".join(FAULTS) + " |", "|---" * width + "|"]
    held: dict[str, list[bool]] = {who: [] for who in OWNERS}
    fired: list[bool] = []
    anew: list[bool] = []
    without = importlib.util.find_spec("tensorflow") is None
    if without:
        print("       left out: TensorFlow is not installed here (pip install tensorflow-cpu)")
    for backend, every in SOURCES.items():
        sources = [kind for kind in every if not (without and kind == "tf.data")]
        if without and backend == "tensorflow":
            continue
        with Backend(backend, work) as program:
            for model in MODELS:
                for data in sources:
                    cells: dict[str, list[str]] = {}
                    for who in OWNERS:
                        case = {"who": who, "model": model, "data": data, "every": EVERY}
                        name = f"{backend}-{model}-{data}-{who}"
                        _, whole, steps = program.run(f"{name}-whole", **case)
                        for kind, faults in FAULTS.items():
                            outcomes = []
                            for number, (fault, status) in enumerate(faults):
                                label = f"{name}-{kind.replace(' ', '-')}-{number}"
                                ended, _, killed = program.run(label, **case, fault=fault)
                                _, end, both = program.run(label, **case)
                                # Keras's callback does not handle SIGTERM, which ends the process.
                                deaf = who == "keras" and status == 75
                                fired.append(ended == (-15 if deaf else status))
                                outcomes.append(
                                    whole is not None
                                    and end == whole
                                    and resumed(steps, killed, both, EVERY)
                                )
                            held[who].append(all(outcomes))
                            cells.setdefault(kind, []).append("=" if held[who][-1] else "differs")
                    row_of = " | ".join(" / ".join(cell) for cell in cells.values())
                    table.append(f"| {backend} | {model} | {data} | {row_of} |")
                    print(table[-1], flush=True)
            anew.append(not _passes_without(program, backend))
    Path("build").mkdir(exist_ok=True)
    Path("build/keras-matrix.md").write_text("\n".join(table) + "\n")
    yield row("interruptions of the matrix that fired", fired)
    yield row(
        "fit with our callback: equal to the uninterrupted run, behind a backup", held["perdure"]
    )
    yield row("control: a fit without a callback, which begins anew, fails", anew)
    differ = [not equal for equal in held["keras"]]
    print(f"       Keras's own callback differs in {sum(differ)} of {len(differ)} cells")


def _passes_without(program: Backend, backend: str) -> bool:
    """Whether a cell passes without a callback, which must not happen."""
    case = {"who": "nobody", "model": "mlp", "data": "arrays"}
    _, whole, steps = program.run(f"{backend}-nobody-whole", **case)
    ended, _, killed = program.run(f"{backend}-nobody", **case, fault=FAULTS["SIGKILL"][0][0])
    _, end, both = program.run(f"{backend}-nobody", **case)
    assert ended == -9, ended
    assert whole is not None, "the program failed"
    assert end == whole, "a run that begins anew ends with the same bits"
    return resumed(steps, killed, both, EVERY)


def every_batch(work: Path) -> Iterator[Row]:
    """SIGKILL at every batch of a fit of three epochs of ten batches."""
    equal = []
    with Backend("jax", work) as program:
        case = {"who": "perdure", "model": "mlp", "data": "arrays", "every": 1, **LONG}
        _, whole, steps = program.run("kills-whole", **case)
        for epoch, batch in BATCHES_OF_KILLS:
            name = f"kill-{epoch}-{batch}"
            ended, _, killed = program.run(name, **case, fault=["SIGKILL", epoch, batch])
            _, end, both = program.run(name, **case)
            went_on = resumed(steps, killed, both, 1)
            equal.append(ended == -9 and end is not None and end == whole and went_on)
        control = not _passes_without(program, "jax")
    yield row("killed at each batch of a fit, and resumed behind a backup: equal", equal)
    yield row("control: a fit without a callback, killed, begins anew and fails", [control])


def keras_fit(work: Path, signals: int) -> Iterator[Row]:
    """Both parts; `signals` is for the other parts of the proof."""
    yield from matrix(work)
    yield from every_batch(work)
