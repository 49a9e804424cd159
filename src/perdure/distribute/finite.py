"""`strategy.step(..., check_finite=True)`: finds the replica whose contributions are not finite.

Every process raises the same error, before `update` changes the state. The check changes no bit of a
finite step.
"""

from __future__ import annotations

import json
from typing import Any

from perdure.distribute.arrays import namespace
from perdure.distribute.engine import Engine, Grad, Merge, NotFused, Stream, Update
from perdure.errors import NonFiniteError


class FiniteEngine:
    """The verbs of another engine, with a check of the contributions.

    `grad` only computes flags; they are read once in a step, so that devices need not wait.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[Stream, tuple[list[str], list[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

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
            f"step {step}: NaN or infinity in {', '.join(lines[:10])}"
            + (f" and {len(lines) - 10} more" if len(lines) > 10 else "")
            + ". The state has not changed. strategy.batch(dataset, "
            f"{step}).values holds the shares of this step, strategy.keys({step}) their keys"
        )
