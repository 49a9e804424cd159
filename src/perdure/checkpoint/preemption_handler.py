"""`PreemptionCheckpointHandler`, which TensorFlow's users know, for hand-written loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.preemption import TerminationConfig


class PreemptionCheckpointHandler:
    """Saves and exits when the run is preempted, for hand-written loops, by one call after each
    step.

    It uses the manager's own flag, so do not call `manager.reached_preemption` as well. The
    `termination_config` says how the notice comes and how the run exits; None for SIGTERM and
    status 75.
    """

    def __init__(
        self, manager: CheckpointManager, termination_config: TerminationConfig | None = None
    ) -> None:
        self._manager = manager
        manager.preemption.config = termination_config or TerminationConfig()

    def save_checkpoint_if_preempted(self, step: int, state: Any) -> None:
        """Return, or save `state` as `step`, the number of finished steps, and exit with `exit_fn`
        or status 75.

        In a group every process calls this at the same steps: all exit once one has got the notice.
        The checkpoint is durable before the exit.
        """
        if self._manager.reached_preemption(step):
            self._manager.save_and_exit(step, state)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Take over SIGTERM at once, before the first step (compilation, loading), until the end of
        the block."""
        self._manager.preemption.install()
        try:
            yield
        finally:
            self._manager.preemption.remove()
