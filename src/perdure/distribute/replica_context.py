"""Where the calling code stands: under no strategy, in its scope, or in one of its replicas.

Owns the answers of `get_strategy` and `get_replica_context`. Invariant: inside `run` every replica sees
its own context, whichever thread it runs in; inside `grad` and `update` of a step only what is equal
in all strategies with that number of replicas is visible, because they share the compiled program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perdure.errors import TopologyError

if TYPE_CHECKING:
    from perdure.distribute.strategy import Strategy
    from perdure.distribute.values import PerReplica


class ReplicaContext(Protocol):
    """What the code of one logical replica may ask; see `get_replica_context`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """V, the number of logical replicas."""
        ...

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this logical replica, 0 to V-1."""
        ...

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        ...

    def all_reduce(self, reduce_op: str, value: Any) -> Any:
        """ "sum" or "mean" of a tree of arrays over all replicas, in the fixed tree, in each of them.

        Every replica of the group must come to it. It is not differentiated through.
        """
        ...

    def all_gather(self, value: Any, axis: int) -> Any:
        """The values of all replicas in their order, joined along `axis`, in each of them."""
        ...

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`merge_fn(strategy, *args, **kwargs)`, once in each process, with PerReplica arguments.

        Every replica gets its part of a PerReplica result, or the whole of another one.
        """
        ...


class _Place(NamedTuple):
    strategy: Strategy | None
    replica: ReplicaContext | None
    compiled: str | None = None


_place: ContextVar[_Place | None] = ContextVar("perdure_place", default=None)


@contextlib.contextmanager
def standing(
    strategy: Strategy | None, replica: ReplicaContext | None, compiled: str | None = None
) -> Iterator[None]:
    """Let the code inside stand in the scope of a strategy, or in one of its replicas."""
    token = _place.set(_Place(strategy, replica, compiled))
    try:
        yield
    finally:
        _place.reset(token)


def has_strategy() -> bool:
    """True in `with strategy.scope():`, in the function of `run`, and in those of `step`."""
    return _place.get() is not None


def get_strategy() -> Strategy:
    """The strategy whose scope or replica this is. Raises TopologyError where there is none."""
    place = _place.get()
    if place is None:
        raise TopologyError(
            "no strategy here: expected to be called in `with strategy.scope():` or in the function "
            "of strategy.run"
        )
    if place.strategy is None:
        raise TopologyError(
            f"{place.compiled} is compiled once for all strategies with the same number of replicas, "
            "so it cannot know its strategy; what it may ask is "
            "get_replica_context().num_replicas_in_sync"
        )
    return place.strategy


def get_replica_context() -> ReplicaContext | None:
    """The context of the logical replica whose code this is; None outside of `run` and `grad`."""
    place = _place.get()
    return None if place is None else place.replica


def in_cross_replica_context() -> bool:
    """True under a strategy and in no replica: in its scope, in `update`, in `merge_call`."""
    place = _place.get()
    return place is not None and place.replica is None


def compiled_in() -> str | None:
    """ "grad" or "update" in these functions of a step."""
    place = _place.get()
    return None if place is None else place.compiled


class ReplicaFunction:
    """`grad` or `update` of a step, which knows the number of replicas.

    Engines cache compiled programs by this object: by the identity of the function and by V, because
    V may be a constant in the program. A function's own `==` does not count: two callable dataclasses
    with the fields 0.0 and -0.0, or 1 and True, are equal and compute other bits.
    """

    def __init__(self, fn: Callable[..., Any], replicas: int, kind: str) -> None:
        self.fn = fn
        self.replicas = replicas
        self.kind = kind
        # A bound method is a new object each time that it is looked up.
        parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
        self._key = (kind, replicas, *map(id, parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", repr(self.fn))

    def __call__(self, *args: Any) -> Any:
        replica = _GradContext(self.replicas) if self.kind == "grad" else None
        with standing(None, replica, self.kind):
            return self.fn(*args)


@dataclass(frozen=True)
class _GradContext:
    """The replica context in `grad`: its program serves every replica, so it knows none."""

    num_replicas_in_sync: int

    @property
    def replica_id_in_sync_group(self) -> int:
        raise TopologyError(
            "grad is one program for all logical replicas, so it has no replica number; take what "
            "must differ from its batch or its key"
        )

    @property
    def strategy(self) -> Strategy:
        return get_strategy()

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


class Recorder(Protocol):
    """Takes what replicas recorded in one `run`, once all of them have ended well."""

    def commit(self, rounds: list[PerReplica]) -> None: ...
