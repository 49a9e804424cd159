"""The context of one logical replica inside `run`.

Owns what a replica says to the others and what it records. Invariant: a collective of a replica is a
meeting of all replicas, computed by the same `reduce` and `gather` that serve outside of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perdure.distribute.collectives import operation
from perdure.distribute.engine import Guard
from perdure.distribute.lockstep import Lockstep, Meeting
from perdure.distribute.replica_context import Recorder
from perdure.distribute.values import PerReplica, ReduceOp
from perdure.errors import StateError

if TYPE_CHECKING:
    from perdure.distribute.strategy import Strategy


class RunContext:
    """See perdure.distribute.replica_context.ReplicaContext."""

    def __init__(self, strategy: Strategy, replica: int, lockstep: Lockstep, guard: Guard) -> None:
        self._strategy = strategy
        self._replica = replica
        self._lockstep = lockstep
        self.guard = guard
        self.recorded: dict[Recorder, list[Any]] = {}

    @property
    def num_replicas_in_sync(self) -> int:
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        return self._replica

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        op = operation(reduce_op)

        def join(values: PerReplica) -> PerReplica:
            return self._strategy.everywhere(self._strategy.reduce(op, values))

        return self.meet(Meeting(f'all_reduce("{op}")', value, join))

    def all_gather(self, value: Any, axis: int) -> Any:
        def join(values: PerReplica) -> PerReplica:
            return self._strategy.everywhere(self._strategy.gather(values, axis))

        return self.meet(Meeting(f"all_gather(axis={axis})", value, join))

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def join(values: PerReplica) -> Any:
            def column(kind: int, key: Any) -> PerReplica:
                return PerReplica(tuple(v[kind][key] for v in values.values), values.replicas)

            return merge_fn(
                self._strategy,
                *(column(0, position) for position in range(len(args))),
                **{name: column(1, name) for name in kwargs or {}},
            )

        call = f"merge_call({getattr(merge_fn, '__name__', merge_fn)}) with {len(args)} arguments"
        return self.meet(Meeting(call, (tuple(args), dict(kwargs or {})), join))

    def meet(self, meeting: Meeting) -> Any:
        """Wait for all other replicas, and get this one's part of what the meeting gives."""
        return self._lockstep.meet(self._replica, meeting)

    def record(self, recorder: Recorder, value: Any) -> None:
        """Keep a value for `recorder.commit`, which gets it when all replicas have ended."""
        self.recorded.setdefault(recorder, []).append(value)


def commit(contexts: Sequence[RunContext]) -> None:
    """Hand over what the replicas recorded: for each recorder, one PerReplica for each time."""
    first = contexts[0]
    for context in contexts[1:]:
        for recorder in first.recorded.keys() | context.recorded.keys():
            counts = [len(c.recorded.get(recorder, ())) for c in (first, context)]
            if counts[0] != counts[1]:
                raise StateError(
                    f"{recorder}: logical replica {first.replica_id_in_sync_group} updated it "
                    f"{counts[0]} times and replica {context.replica_id_in_sync_group} "
                    f"{counts[1]} times in one run; every replica must do so equally often"
                )
    replicas = tuple(context.replica_id_in_sync_group for context in contexts)
    for recorder in first.recorded:
        columns = zip(*(context.recorded[recorder] for context in contexts), strict=True)
        recorder.commit([PerReplica(column, replicas) for column in columns])
