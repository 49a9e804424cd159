"""What the calling code may ask about its strategy and its logical replica, as in `tf.distribute`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from perdure.distribute import scope
from perdure.distribute.strategy import Strategy


class ReplicaContext(Protocol):
    """One logical replica, as its own code sees it; see `get_replica_context`."""

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
        """Reduces a tree of arrays over all replicas, in the fixed tree. A collective.

        The result is not differentiated through.

        Args:
            reduce_op: "sum" or "mean", or the member of `ReduceOp`.
            value: A tree of arrays; structure, dtypes and shapes are equal in all replicas.

        Returns:
            The reduced tree, in every replica.
        """
        ...

    def all_gather(self, value: Any, axis: int) -> Any:
        """The values of all replicas in their order, joined along `axis`, in every replica."""
        ...

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
        ...


def has_strategy() -> bool:
    """True in `with strategy.scope():`, in the function of `run`, and in those of `step`."""
    return scope.current() is not None


def get_strategy() -> Strategy:
    """The strategy whose scope or replica this is.

    Raises:
        TopologyError: Under no strategy, and in `grad` and `update`, which serve several.
    """
    return scope.current_strategy()


def get_replica_context() -> ReplicaContext | None:
    """The context of the logical replica that calls; None outside of `run` and `grad`."""
    return scope.current_replica()


def in_cross_replica_context() -> bool:
    """True under a strategy and outside of replicas: in its scope, in `update`, in `merge_call`."""
    current = scope.current()
    return current is not None and current.replica is None
