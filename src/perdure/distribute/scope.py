"""Which strategy, and which of its logical replicas, the calling code belongs to.

A scope is a context variable, so each thread has its own. Inside `strategy.run` every replica sees its
own context, whichever thread it runs in. `grad` and `update` of a step see only what is equal in all
strategies with that number of replicas, because such strategies share the compiled program.

Strategies are opaque here, so that this module can be imported from below them; `replica_context` has
the public functions with their types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

from perdure.errors import TopologyError


class Scope(NamedTuple):
    """A strategy, the context of a replica, and the name of a compiled function ("grad", "update").

    `replica` is None outside of replicas. `strategy` is None in a compiled function.
    """

    strategy: Any
    replica: Any = None
    compiled: str | None = None


_current: ContextVar[Scope | None] = ContextVar("perdure_scope", default=None)


def current() -> Scope | None:
    """The scope of the calling code; None under no strategy."""
    return _current.get()


@contextlib.contextmanager
def enter(scope: Scope) -> Iterator[None]:
    """Run the code inside in `scope`."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


def current_strategy() -> Any:
    """The strategy of the calling code. Raises TopologyError where there is none."""
    scope = _current.get()
    if scope is None:
        raise TopologyError(
            "no strategy here: expected a call in `with strategy.scope():` or in the function of "
            "strategy.run"
        )
    if scope.strategy is None:
        raise TopologyError(
            f"{scope.compiled} is compiled once for all strategies with the same number of replicas, "
            "so it cannot know its strategy; it may ask for "
            "get_replica_context().num_replicas_in_sync"
        )
    return scope.strategy


def current_replica() -> Any:
    """The context of the logical replica that calls; None outside of `run` and `grad`."""
    scope = _current.get()
    return None if scope is None else scope.replica


class ReplicaFunction:
    """`grad` or `update` of a step, which knows the number of replicas.

    Engines keep compiled programs by this object: by the identity of the function and by V, because V
    may be a constant in the program. The function's own `==` is not used: two callable dataclasses
    with the fields 0.0 and -0.0, or 1 and True, are equal and compute other bits.
    """

    def __init__(self, fn: Callable[..., Any], replicas: int, kind: str) -> None:
        self.fn = fn
        self.replicas = replicas
        self.kind = kind
        # A bound method is a new object at each access.
        parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
        self._key = (kind, replicas, *map(id, parts))
        self._scope = Scope(None, _GradContext(replicas) if kind == "grad" else None, kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", repr(self.fn))

    def __call__(self, *args: Any) -> Any:
        token = _current.set(self._scope)
        try:
            return self.fn(*args)
        finally:
            _current.reset(token)


@dataclass(frozen=True)
class _GradContext:
    """The replica context in `grad`. One program serves all replicas, so it knows none of them."""

    num_replicas_in_sync: int

    @property
    def replica_id_in_sync_group(self) -> int:
        raise TopologyError(
            "grad is one program for all logical replicas, so it has no replica number; take what "
            "must differ from its batch or its key"
        )

    @property
    def strategy(self) -> Any:
        return current_strategy()

    def all_reduce(self, reduce_op: str, value: Any) -> Any:
        raise self._no_collective("all_reduce")

    def all_gather(self, value: Any, axis: int) -> Any:
        raise self._no_collective("all_gather")

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise self._no_collective("merge_call")

    def _no_collective(self, name: str) -> TopologyError:
        return TopologyError(
            f"{name} in grad: the replicas of a step meet once, after grad. Return the value among "
            "the contributions, which update gets summed over all replicas; or use strategy.run"
        )
