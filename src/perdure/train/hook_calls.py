"""Calls the hooks of a run. A method that a hook does not override is not called for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_METHODS = ("before_step", "after_step", "before_save", "after_save", "after_evaluate")


class HookCalls:
    """The hooks of one call of `Trainer.train`, which are called with the trainer.

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
