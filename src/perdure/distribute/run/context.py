"""Which strategy, and which of its logical replicas, the calling code belongs to.

A scope is a context variable. `grad` and `update` of a step see only what is equal in all
strategies with that number of replicas, because these share the compiled program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

from perdure.distribute.run import collectives
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica, ReduceOp
from perdure.errors import TopologyError


class Scope(NamedTuple):
    """A strategy (None in a compiled function), the context of a replica, a function's name."""

    strategy: Any
    replica: ReplicaContext | None = None
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


def get_replica_context() -> ReplicaContext | None:
    """The context of the logical replica that calls; None outside of `run` and `grad`."""
    scope = _current.get()
    return None if scope is None else scope.replica


def has_strategy() -> bool:
    """True in `with strategy.scope():`, in the function of `run`, and in those of `step`."""
    return _current.get() is not None


def in_cross_replica_context() -> bool:
    """True under a strategy and outside of replicas: in its scope, in `update`, in `merge_call`."""
    scope = _current.get()
    return scope is not None and scope.replica is None


class Meeting(NamedTuple):
    """One replica's part in a collective: the `call` for a user, `value`, how to `join` all."""

    call: str
    value: Any
    join: Callable[[Plan, PerReplica], Any]


class ReplicaContext:
    """One logical replica, as its own code sees it; see `get_replica_context`.

    In `grad` of a step it has the number of replicas only, and no collectives.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """V, the number of logical replicas."""
        return self._replicas

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this logical replica, 0 to V-1."""
        raise TopologyError(
            "grad is one program for all logical replicas, so it has no replica number; take what "
            "must differ from its batch or its key"
        )

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return current_strategy()

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Reduces a tree of arrays over all replicas, in the fixed tree. A collective.

        The result is not differentiated through.

        Args:
            reduce_op: "sum" or "mean", or the member of `ReduceOp`.
            value: A tree of arrays; structure, dtypes and shapes are equal in all replicas.

        Returns:
            The reduced tree, in every replica.
        """
        op = collectives.operation(reduce_op)

        def join(plan: Plan, values: PerReplica) -> PerReplica:
            return plan.everywhere(collectives.reduce(plan, op, values, None))

        return self.meet(Meeting(f'all_reduce("{op}")', value, join))

    def all_gather(self, value: Any, axis: int) -> Any:
        """The values of all replicas in their order, joined along `axis`, in every replica."""

        def join(plan: Plan, values: PerReplica) -> PerReplica:
            return plan.everywhere(collectives.gather(plan, values, axis))

        return self.meet(Meeting(f"all_gather(axis={axis})", value, join))

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` once in each process. A collective.

        Args:
            merge_fn: Gets every argument as a PerReplica of the values of the local replicas.
            args: This replica's positional arguments.
            kwargs: This replica's named arguments.

        Returns:
            This replica's part of a PerReplica result, or the whole of any other result.
        """
        arguments = {**dict(enumerate(args)), **(kwargs or {})}

        def join(_: Plan, values: PerReplica) -> Any:
            columns = {name: values[name] for name in arguments}
            positional = [columns.pop(number) for number in range(len(args))]
            return merge_fn(current_strategy(), *positional, **columns)

        name = getattr(merge_fn, "__name__", merge_fn)
        return self.meet(Meeting(f"merge_call({name}) with {len(args)} arguments", arguments, join))

    def meet(self, meeting: Meeting) -> Any:
        """Wait for all other replicas, and return this one's part of what the meeting gives."""
        raise TopologyError(
            f"{meeting.call} in grad: the replicas of a step meet once, after grad. Return the value "
            "among the contributions, which update gets summed over all replicas; or use strategy.run"
        )


class ReplicaFunction:
    """`grad` or `update` of a step, which knows the number of replicas.

    Programs are kept by the identity of the function and by V. Its own `==` is not used: two
    callable dataclasses with the fields 0.0 and -0.0, or 1 and True, are equal and compute other
    bits.
    """

    def __init__(self, fn: Callable[..., Any], replicas: int, kind: str) -> None:
        self.fn = fn
        self.replicas = replicas
        self.kind = kind
        # A bound method is a new object at each access.
        parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
        self._key = (kind, replicas, *map(id, parts))
        self._scope = Scope(None, ReplicaContext(replicas) if kind == "grad" else None, kind)

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
