"""`SaveInterval`: at which steps a manager saves.

Invariant: the answer depends on the step and on the step that was saved or restored last. Both survive
an interruption, so an interrupted run saves at the same steps as an uninterrupted one.
"""

from __future__ import annotations

from functools import cached_property

from perdure.store import Run


class SaveInterval:
    """Says when a multiple of `steps` has been passed since the last save or restore in `run`."""

    def __init__(self, steps: int, run: Run) -> None:
        self.steps = steps
        self._last: int | None = None
        self._run = run

    def record(self, step: int) -> None:
        """`step` has been saved or restored."""
        self._last = step

    def is_due(self, step: int) -> bool:
        """Whether a save is due at `step`. Changes nothing."""
        if step % self.steps == 0:
            return True
        return step > self.last and step // self.steps > self.last // self.steps

    @property
    def last(self) -> int:
        """The step that was saved or restored last; 0 before the first."""
        return self._newest if self._last is None else self._last

    @cached_property
    def _newest(self) -> int:
        """A run without a restore or save continues from its newest checkpoint; listed once."""
        return self._run.newest_step() or 0
