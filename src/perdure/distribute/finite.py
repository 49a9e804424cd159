"""An engine that finds the replica whose contributions are not finite.

Owns `strategy.step(..., check_finite=True)`. Invariant: every process raises the same error, before
`update` and therefore before the state changes; a finite step has the bits that it has without.
"""

from __future__ import annotations

import json
from typing import Any

from perdure.distribute.arrays import namespace
from perdure.distribute.engine import Engine, Grad, Merge, Stream, Update
from perdure.errors import NonFiniteError


class FiniteEngine:
    """The verbs of another engine, with a look at what `grad` returns.

    Only flags are computed there; they are read once in a step, so that devices need not wait.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[Stream, tuple[list[str], list[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def together(self, *args: Any) -> None:
        """None: no step as one program, because this engine looks in between."""

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        value = self._engine.grad(fn, state, share, stream)
        flags: list[Any] = []

        def look(leaf: Any) -> Any:
            flags.append(namespace(leaf).is_finite(leaf))
            return leaf

        self._engine.map(look, value)
        # To the end, also when the step is tried again: the last one tells which step it is.
        self._seen.pop(stream, None)
        self._seen[stream] = (list(self._engine.describe(value)), flags)
        return value

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        # Before the others wait for values that will not come.
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
            # An earlier step may be there too, if it did not come to its end.
            if stream.step == next(reversed(seen)).step
            for name, finite in zip(*seen[stream], strict=True)
            if not bool(finite)
        ]
        every = self._engine.processes.gather(json.dumps(bad).encode())
        found = [item for text in every for item in json.loads(text)]
        if not found:
            return
        step = found[0][0]
        lines = [f"{name} of logical replica {replica}" for _, replica, name in found]
        raise NonFiniteError(
            f"step {step}: NaN or infinity in {', '.join(lines[:10])}"
            + (f" and {len(lines) - 10} more" if len(lines) > 10 else "")
            + ". The state has not changed. strategy.batch(dataset, "
            f"{step}).values holds the shares that led there, strategy.keys({step}) their keys"
        )
