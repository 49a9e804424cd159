"""Engines around another one, which look at what goes in and out of a step and change no bit of it.

`FiniteEngine` (`strategy.step(..., check_finite=True)`) finds the replica whose contributions are not
finite; every process raises the same error, before `update` changes the state. `TracedEngine` reports
digests of the parts of one step while `perdure bisect` replays it.
"""

from __future__ import annotations

import json
from typing import Any, cast

from perdure.checkpoint.step_trace import is_computing_traced, is_tracing, trace_part
from perdure.distribute.arrays import namespace
from perdure.distribute.engine import Engine, FusedStep, Grad, Merge, NotFused, Stream, Update
from perdure.errors import NonFiniteError
from perdure.text import few


class _Around:
    """The verbs of another engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class FiniteEngine(_Around):
    """The verbs of another engine, with a check of the contributions.

    `grad` only computes flags; they are read once in a step, so that devices need not wait.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._seen: dict[Stream, tuple[list[str], list[Any]]] = {}

    def fused_step(self, *args: Any) -> NotFused:
        return NotFused("check_finite=True reads every contribution between grad and update")

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        value = self._engine.grad(fn, state, share, stream)
        flags: list[Any] = []

        self._engine.trees.map(lambda leaf: flags.append(namespace(leaf).is_finite(leaf)), value)
        # Inserted again when a step is tried again: the last entry names the current step.
        self._seen.pop(stream, None)
        self._seen[stream] = (self._engine.trees.paths(value), flags)
        return value

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        # Here, before the other processes wait for values that will not come.
        self._check()
        return self._engine.exchange(roots, counts, merge)

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        if self._engine.processes.count == 1:
            self._check()
        return self._engine.update(fn, state, total, stream)

    def _check(self) -> None:
        seen, self._seen = self._seen, {}
        bad = [
            (stream.step, stream.replica, name)
            for stream in sorted(seen)
            # An earlier step may be there too, if it failed before its check.
            if stream.step == next(reversed(seen)).step
            for name, finite in zip(*seen[stream], strict=True)
            if not bool(finite)
        ]
        texts = self._engine.processes.gather(json.dumps(bad).encode())
        if not (bad := [item for text in texts for item in json.loads(text)]):
            return
        step = bad[0][0]
        lines = [f"{name} of logical replica {replica}" for _, replica, name in bad]
        raise NonFiniteError(
            f"step {step}: NaN or infinity in {few(lines, 10)}. The state has not changed. "
            f"strategy.batch(dataset, {step}).values holds the shares of this step, and "
            f"strategy.keys({step}) their keys"
        )


def traced_engine(engine: Engine) -> Engine:
    """`engine` itself, or one that reports the parts of a step if they are asked for."""
    return cast(Engine, TracedEngine(engine)) if is_tracing() else engine


class TracedEngine(_Around):
    """The verbs of another engine, with digests of what goes in and out in the traced step.

    They change no bit. The traced step is made of the verbs, whether a fused one exists or not.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._updated = -1

    def fused_step(self, grad: Grad, update: Update, replicas: int, seed: int) -> FusedStep | None:
        fused = self._engine.fused_step(grad, update, replicas, seed)
        return None if fused is None else _UnlessTraced(fused)

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        replica = stream.replica
        if not is_computing_traced(stream.step + 1):
            return self._engine.grad(fn, state, share, stream)
        if replica == 0:
            trace_part("before", state)
        trace_part("batch", share, replica)
        trace_part("key", {"key": self._engine.key(stream)}, replica)
        value = self._engine.grad(fn, state, share, stream)
        trace_part("contribution", value, replica)
        return value

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        # Only once: all local devices compute the same.
        if self._updated == stream.step or not is_computing_traced(stream.step + 1):
            return self._engine.update(fn, state, total, stream)
        self._updated = stream.step
        trace_part("total", total)
        result = self._engine.update(fn, state, total, stream)
        trace_part("update", result[0])
        return result


class _UnlessTraced:
    """A fused step for all steps but the traced one."""

    def __init__(self, fused: FusedStep) -> None:
        self._fused = fused
        self._traced = False

    def __call__(self, *arguments: Any) -> tuple[Any, Any] | None:
        self._traced = is_computing_traced(arguments[2] + 1)
        return None if self._traced else self._fused(*arguments)

    def explain(self) -> str:
        if self._traced:
            return "Not fast: the step was traced, which reports each of its parts."
        return self._fused.explain()

    def forget(self) -> None:
        self._fused.forget()
