"""What the parts of a manager share: the run directory and who uses it, and when a save is due."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from perdure.checkpoint.caller_warning import warn_caller
from perdure.checkpoint.journal import Journal
from perdure.checkpoint.mirror import Mirror
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.checkpoint.recipe import RecipeCheck
from perdure.runtime.process_group import Processes
from perdure.store import Run


@dataclass(frozen=True)
class ManagedRun:
    """What the saver and the restorer of a manager have in common."""

    run: Run
    mirror: Mirror | None
    processes: Processes
    recipe: RecipeCheck
    journal: Journal

    @property
    def where(self) -> str:
        """Path or URL of the run directory."""
        return self.run.where

    def update_mirror(self) -> None:
        """Bring the mirror up to date, in the background; the chief does it."""
        if self.mirror is not None and self.processes.is_chief:
            self.mirror.notify()

    def warn_of_mirror(self) -> None:
        """Warn about what went wrong in the mirror."""
        for note in self.mirror.notes() if self.mirror is not None else ():
            warn_caller(note)


class SaveInterval:
    """Says when a multiple of `steps` has been passed since the last save or restore in `run`.

    The answer depends on the step and on the step that was saved or restored last. Both survive an
    interruption, so an interrupted run saves at the same steps as an uninterrupted one.
    """

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
        last = self.last  # once: another thread may save meanwhile
        return step > last and step // self.steps > last // self.steps

    @property
    def last(self) -> int:
        """The step that was saved or restored last; 0 before the first."""
        return self._newest if self._last is None else self._last

    @cached_property
    def _newest(self) -> int:
        """A run without a restore or save continues from its newest checkpoint; listed once."""
        return self._run.newest_step() or 0


def abandon(run: Run, preemption: PreemptionFlag, pid: int) -> None:
    """Close a manager that nobody refers to any more, after its save has ended."""
    if os.getpid() != pid:  # the lock is the parent's
        return
    preemption.abandon()
    run.close()
