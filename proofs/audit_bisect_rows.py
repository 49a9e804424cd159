"""Errors planted into one step: the journal finds the step, `bisect` the part, replica and leaf."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from audit_runs import bisected, command, differing, in_directory, run, run_to_end

from report import Row, row

AT, REPLICA = 7, 5

PLANTED: dict[str, tuple[str, str, tuple[int, ...], str, str]] = {
    "between": ("total", "before", (), "w/a", "changed outside"),
    "batch": ("batch", "batch", (REPLICA,), "x", "other data"),
    "position": ("batch", "batch", tuple(range(8)), "x", "data position"),
    "key": ("total", "key", (REPLICA,), "key", "other key"),
    "contribution": ("total", "contribution", (REPLICA,), "grads/b", "other gradient"),
    "sum": ("total", "total", (), "grads/a", "other sum"),
    "update": ("state", "update", (), "speed/b", "other update"),
    "after": ("state", "state", (), "w/b", "changed outside"),
}
"""By kind: what differs in the journal, the part, its replicas, its first leaf and the cause."""

OF_A_LOOP: dict[str, tuple[str, str, tuple[int, ...], str, str]] = {
    "batch": ("batch", "batch", (), "x", "other data"),
    "generator": ("state", "draws", (0,), "numpy", "other draws"),
}


def rows() -> Iterator[Row]:
    """One row for each claim and program."""
    for engine in ("jax", "torch"):
        yield from in_directory(_of_strategy(engine))
    for framework in ("numpy", "jax", "torch"):
        yield from in_directory(_of_loop(framework))
    yield from in_directory(_of_fit())


def _of_fit() -> Iterator[Row]:
    """Two calls of `fit` that part at the fourth batch; their first common backup is of the 15th."""
    right = command("keras_fit", "run=right", "journal=0")
    wrong = command("keras_fit", "run=wrong", "journal=0", "rate=0.01")
    run_to_end(right)
    run_to_end(wrong)
    found, step = bisected("right", "wrong", right, wrong)
    leaves = [leaf.path for leaf in step.part.leaves] if step.part else []
    seen = found.compared, found.step, step.step, "optimizer/learning_rate" in leaves
    yield row(
        "bisect, a Keras fit without a journal: the step between two backups, and the leaf",
        [seen == ("checkpoints", 15, 4, True)],
    )


def _of_loop(framework: str) -> Iterator[Row]:
    right = command("plain_loop", framework, "run=right")
    run_to_end(right)
    found = [
        _finds("plain_loop", framework, kind, expected, right)
        for kind, expected in OF_A_LOOP.items()
    ]
    yield row(f"bisect, a loop of {framework}: step, part, leaf and cause named", found)


def _of_strategy(engine: str) -> Iterator[Row]:
    right = command("strategy_step", engine, "run=right")
    run_to_end(right)
    planted = {kind: (differing(engine, what), *rest) for kind, (what, *rest) in PLANTED.items()}
    found = [
        _finds("strategy_step", engine, kind, expected, right) for kind, expected in planted.items()
    ]
    yield row(f"bisect, a strategy of {engine}: step, part, replica, leaf and cause named", found)
    yield row(
        f"bisect, {engine}: an error that its program does not repeat: the run is named, and the step",
        [_wrong(engine, kind, right) for kind in PLANTED],
    )
    yield row(
        f"journal, {engine}: a resumed run stops at the step with the error",
        [_stops(engine, kind, expected[0]) for kind, expected in planted.items()],
    )


def _finds(
    program: str,
    engine: str,
    kind: str,
    expected: tuple[object, ...],
    right: list[str],
) -> bool:
    shutil.rmtree("runs/wrong", ignore_errors=True)
    wrong = command(program, engine, "run=wrong", f"plant={kind}", f"at={AT}")
    run_to_end(wrong)
    found, step = bisected("right", "wrong", right, wrong)
    part = step.part
    leaf = part.leaves[0].path.removeprefix("contributions/") if part else ""
    seen = (
        found.what,
        part.part if part else "",
        part.numbers if part else (),
        leaf,
        step.diagnosis.cause,
    )
    is_right = seen == expected and (found.step, step.step) == (AT, AT) and not step.wrong
    if not is_right:
        print(
            f"       {engine} {kind}: step {found.step}, {step.step}: {seen}; expected {expected}"
        )
    return is_right


def _wrong(engine: str, kind: str, right: list[str]) -> bool:
    shutil.rmtree("runs/wrong", ignore_errors=True)
    run_to_end(command("strategy_step", engine, "run=wrong", f"plant={kind}", f"at={AT}"))
    _, step = bisected("right", "wrong", right)
    named = [run.rpartition("/")[2] for run in step.wrong]
    seen = named, step.step, step.runs[1].result.step, step.part, step.diagnosis.cause
    if seen != (["wrong"], AT, AT, None, "computed wrongly"):
        print(f"       {engine} {kind}: {seen}")
        return False
    return True


def _stops(engine: str, kind: str, what: str) -> bool:
    """The run is killed after step 7, which came after the checkpoint of step 4, and resumed."""
    name = f"stopped-{kind}"
    line = command("strategy_step", engine, f"run={name}")
    status, _ = run([*line, f"kill={AT}"])
    if status != -9:
        raise RuntimeError(f"{name}: expected a kill, found status {status}")
    status, errors = run([*line, f"plant={kind}", f"at={AT}"])
    said = f"step {AT}, computed again from the checkpoint of step 4, has another {what}"
    is_found = status not in (0, -9) and "JournalMismatchError" in errors and said in errors
    if not is_found:
        print(f"       {engine} {kind}: status {status}\n{errors[-500:]}")
        return False
    status, _ = run(line)  # without the error it continues
    return status == 0
