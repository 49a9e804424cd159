"""`ManagedRun`: the run directory of a manager, its mirror, and the processes that share both."""

from __future__ import annotations

import os
from dataclasses import dataclass

from perdure.checkpoint.caller_warning import warn_caller
from perdure.checkpoint.journal import Journal
from perdure.checkpoint.mirror import Mirror
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.checkpoint.recipe import RecipeCheck
from perdure.process_group import Processes
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


def abandon(run: Run, preemption: PreemptionFlag, pid: int) -> None:
    """Close a manager that nobody refers to any more, after its save has ended."""
    if os.getpid() != pid:  # the lock is the parent's
        return
    preemption.abandon()
    run.close()
