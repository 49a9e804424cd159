"""What the loop and the hooks share: the state of the training, and the calls of the hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from perdure.checkpoint import CheckpointManager
from perdure.errors import StateError
from perdure.train.config import RunConfig
from perdure.train.progress import Progress
from perdure.train.summaries import Summaries

_METHODS = ("before_step", "after_step", "before_save", "after_save", "after_evaluate")


class TrainingState:
    """The state of the training, and what hooks may use.

    Attributes:
        config: The configuration of the run.
        summaries: Scalars and texts of the run, by step.
        progress: The bar or the lines that show the run.
        step: Number of steps that are in `state`.
        stop_reason: Why training ends before the next step; empty if it does not.
        manager: The manager of the run directory while the run trains, else None.
        warm_start_from: The checkpoint that a new run begins with, None for the fresh state.
    """

    def __init__(self, config: RunConfig, state: Any, summaries: Summaries) -> None:
        self.config = config
        self.state = state
        self.summaries = summaries
        self.progress = Progress("off")
        self.step = 0
        self.stop_reason = ""
        self.manager: CheckpointManager | None = None
        self.warm_start_from: Any = None

    @property
    def state(self) -> Any:
        """The state after `step` steps. A hook may replace it.

        Raises:
            StateError: A step has failed that had used its memory.
        """
        if self._is_lost:
            raise StateError(
                "the state is lost: it was given to the step that failed, which used its memory. "
                "`train` resumes from the last checkpoint. To keep it, do not give it away: "
                "strategy.step(..., donate=False), or jax.jit without `donate_argnums`."
            )
        return self._target

    @state.setter
    def state(self, state: Any) -> None:
        # What a restore gives back: of a lost state the deleted arrays.
        self._target, self._is_lost = state, False

    def _step_failed(self) -> None:
        """Find out whether the step that has raised an error had used the memory of `state`."""
        if (jax := sys.modules.get("jax")) is not None:
            with suppress(TypeError, ValueError):  # no tree of JAX
                self._is_lost = any(
                    isinstance(leaf, jax.Array) and leaf.is_deleted()
                    for leaf in jax.tree.leaves(self._target)
                )

    def due(self, every: int) -> bool:
        """Whether the execution that ended at `step` contains a multiple of `every`.

        Depends on `step` alone, so an interruption changes nothing. An execution that `max_steps` cut
        short does not count: a longer run has no execution that ends there.
        """
        size, step = self.config.steps_per_execution, self.step
        if size == 1:
            return step % every == 0
        return step % size == 0 and step // every > (step - size) // every

    def request_stop(self, reason: str) -> None:
        """End training before the next step, after a save."""
        self.stop_reason = self.stop_reason or reason

    def say(self, text: str) -> None:
        """Print one line about the run."""
        self.progress.say(text)


class HookCalls:
    """Calls the hooks of one call of `Trainer.train`, with the trainer.

    A method that a hook does not override is not called for it.

    Args:
        trainer: The first argument of every call.
        hooks: Called in this order.
        base: Their base class, whose own methods do nothing.
    """

    def __init__(self, trainer: Any, hooks: Sequence[Any], base: type) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._begun: list[Any] = []
        self._methods: dict[str, list[Callable[..., None]]] = {
            name: [
                getattr(hook, name)
                for hook in hooks
                if getattr(type(hook), name) is not getattr(base, name)
            ]
            for name in _METHODS
        }

    def begin(self) -> None:
        """Call `begin` of each hook; those that are called have an `end`."""
        for hook in self._hooks:
            self._begun.append(hook)
            hook.begin(self._trainer)

    def ends(self) -> list[Callable[[], None]]:
        """A call of `end` for each hook whose `begin` was called."""
        return [partial(hook.end, self._trainer) for hook in self._begun]

    def overrides(self, name: str) -> bool:
        """Whether a hook overrides this method."""
        return bool(self._methods[name])

    def call(self, name: str, *arguments: Any) -> None:
        """Call one method of all hooks that override it."""
        for method in self._methods[name]:
            method(self._trainer, *arguments)

    def call_all(self, name: str, *arguments: Any) -> Exception | None:
        """`call` that goes on after an error; returns the first one."""
        first: Exception | None = None
        for method in self._methods[name]:
            try:
                method(self._trainer, *arguments)
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                first = first or error
        return first
