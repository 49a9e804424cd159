"""The parts of one step of a strategy, reported while `perdure bisect` replays it."""

from __future__ import annotations

from typing import Any, cast

from perdure.checkpoint.step_trace import is_computing_traced, is_tracing, trace_part
from perdure.distribute.engine import Engine, FusedStep, Grad, Stream, Update


def traced_engine(engine: Engine) -> Engine:
    """`engine` itself, or one that reports the parts of a step if they are asked for."""
    return cast(Engine, TracedEngine(engine)) if is_tracing() else engine


class TracedEngine:
    """The verbs of another engine, with digests of what goes in and out in the traced step.

    They change no bit. The traced step is made of the verbs, whether a fused one exists or not.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._updated = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

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
