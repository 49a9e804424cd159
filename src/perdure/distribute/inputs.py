"""`DistributedDataset`: the batches of a strategy, to iterate over.

The batch of a step is a function of the step and the logical replica. The position is one integer, the
next step, and the only state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from perdure.data.dataset import rows_per_replica
from perdure.data.pipelines import refuse_pipeline
from perdure.distribute.engine import Scalar
from perdure.distribute.values import PerReplica
from perdure.errors import DataError
from perdure.runtime.process_group import Processes, gather_values


class StepDataset(Protocol):
    """The part of a dataset that a strategy uses; with `steps_per_epoch` it has epochs."""

    @property
    def batch_size(self) -> int: ...

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any: ...

    def recipe(self) -> Mapping[str, Scalar]: ...


class AutoShardPolicy(Enum):
    """How a global batch is divided; see tf.data.experimental.AutoShardPolicy.

    DATA: each logical replica gets its contiguous rows. OFF: each replica gets the whole batch. FILE
    raises DataError: batches by file depend on the number of workers.
    """

    OFF = -1
    FILE = 1
    DATA = 2


@dataclass(frozen=True)
class InputContext:
    """The argument of the function of `distribute_datasets_from_function`.

    There is one pipeline for each logical replica. TensorFlow has one for each worker, which makes
    every batch depend on the number of workers.

    Attributes:
        num_input_pipelines: V.
        input_pipeline_id: The number of the logical replica.
        num_replicas_in_sync: V.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """global_batch_size / V; TopologyError if it does not divide."""
        return rows_per_replica(global_batch_size, self.num_replicas_in_sync)


@dataclass(frozen=True)
class ValueContext:
    """The argument of the function of `distribute_values_from_function`."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class DistributedDataset:
    """The batches of a strategy from `step` on, as PerReplica values that carry their step.

    `for batch in dataset` ends with the epoch that `step` is in; the next loop continues with the
    following epoch. `take(n)` yields n batches, across epochs. Both advance `step` before they yield a
    batch, so that a dataset in a Checkpoint continues at the right step.
    """

    # Without a dict, so that a search for modules in a state does not walk through the data.
    __slots__ = ("_batch", "_source", "step")

    def __init__(self, source: Any, batch: Callable[[Any, int], PerReplica], step: int = 0) -> None:
        if step < 0:
            raise DataError(
                f"a dataset starts at step 0: expected a step of at least 0, found {step}"
            )
        self._source = source
        self._batch = batch
        self.step = step

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch. Raises DataError if the source has no such number."""
        steps = getattr(self._source, "steps_per_epoch", None)
        if steps is None:
            raise DataError(
                f"{type(self._source).__name__} does not say how many steps an epoch has "
                "(steps_per_epoch, or __len__ of a pipeline); use take(n)"
            )
        return steps

    def __len__(self) -> int:
        return self.steps_per_epoch

    def from_step(self, step: int) -> DistributedDataset:
        """A copy at another step, over the same data."""
        return DistributedDataset(self._source, self._batch, step)

    def epoch(self, number: int) -> DistributedDataset:
        """A copy at the start of an epoch, over the same data."""
        return self.from_step(number * self.steps_per_epoch)

    def take(self, count: int) -> Iterator[PerReplica]:
        """The next `count` batches."""
        return self._until(self.step + count)

    def __iter__(self) -> Iterator[PerReplica]:
        return self._until((self.step // self.steps_per_epoch + 1) * self.steps_per_epoch)

    def _until(self, stop: int) -> Iterator[PerReplica]:
        while self.step < stop:
            batch = self._batch(self._source, self.step)
            self.step += 1
            yield batch

    def recipe(self) -> Mapping[str, Scalar]:
        """The properties of the data that decide the result of a run."""
        return self._source.recipe()

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position."""
        self.step = int(state["step"])


def sharded(dataset: StepDataset, policy: AutoShardPolicy | str) -> Any:
    """The dataset under a policy (or the name of one). Raises DataError for FILE."""
    require_dataset(dataset)
    if isinstance(policy, str):
        policy = AutoShardPolicy.__members__.get(policy.upper(), policy)
    if not isinstance(policy, AutoShardPolicy):
        raise DataError(f"auto_shard_policy: expected DATA or OFF, found {policy!r}")
    if policy is AutoShardPolicy.FILE:
        raise DataError(
            "AutoShardPolicy.FILE is refused: it deals files out to workers, so the batches depend on "
            "the number of workers. Use DATA, which gives each logical replica its rows of the same "
            "global batch"
        )
    return _Whole(dataset) if policy is AutoShardPolicy.OFF else dataset


def require_dataset(value: Any, method: str = "batch") -> None:
    """Raise `DataError` unless `value` gives the batch of any step (or has another method)."""
    refuse_pipeline(value)
    if not callable(getattr(value, method, None)):
        raise DataError(
            f"expected a dataset, which gives the batch of any step, found {type(value).__name__}; "
            "make perdure.ArrayDataset of arrays, or perdure.data.Dataset of what has __len__ and "
            "__getitem__"
        )


class _Whole:
    """A dataset whose whole batch every replica gets, made once and copied for each."""

    def __init__(self, dataset: StepDataset) -> None:
        self._dataset = dataset
        self._made: tuple[int, Any] | None = None
        self.batch_size = dataset.batch_size
        self.steps_per_epoch = getattr(dataset, "steps_per_epoch", None)

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        if self._made is None or self._made[0] != step:
            self._made = step, self._dataset.batch(step)
        # So that no replica sees what another one does to its batch in place.
        return copy.deepcopy(self._made[1])

    def recipe(self) -> Mapping[str, Scalar]:
        return {**self._dataset.recipe(), "sharded": False}


_END = object()


class Pipelines:
    """One sequence, or one stream, of shares for each `local` replica of V, made by `dataset_fn`.

    The pipelines of all `processes` have the same length. A collective.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        local: Sequence[int],
        replicas: int,
        recipe: Mapping[str, Scalar] | None,
        processes: Processes,
    ) -> None:
        self._made = {r: dataset_fn(InputContext(replicas, r, replicas)) for r in local}
        self._recipe = None if recipe is None else dict(recipe)
        self._streams: dict[int, tuple[int, Iterator[Any]]] = {}
        lengths: list[int | None] = []
        for replica, pipeline in self._made.items():
            if not isinstance(pipeline, Iterable) and not hasattr(pipeline, "__getitem__"):
                raise DataError(
                    f"the function gave {type(pipeline).__name__} for logical replica {replica}; "
                    "expected a sequence or an iterable of the shares of that replica"
                )
            sized: Any = pipeline if hasattr(pipeline, "__len__") else None
            lengths.append(len(sized) if hasattr(sized, "__getitem__") else None)
            if lengths[-1] != lengths[0]:
                raise DataError(
                    f"the pipeline of logical replica {local[0]} has {lengths[0]} batches and that of "
                    f"replica {replica} has {lengths[-1]}; every pipeline must have the same number"
                )
        self.steps_per_epoch = lengths[0]
        if self.steps_per_epoch == 0:
            raise DataError("the pipelines hold no batches")
        lengths = gather_values(processes, lengths[0])
        for process, length in enumerate(lengths):
            if length != lengths[0]:
                raise DataError(
                    f"an epoch has {lengths[0]} steps in process 0 and {length} in process {process}; "
                    "every pipeline must have the same number of batches"
                )

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        if self.steps_per_epoch is not None:
            return self._made[replica][step % self.steps_per_epoch]
        return self._from_stream(step, replica)

    def _from_stream(self, step: int, replica: int) -> Any:
        """Element number `step`. After a resume the elements before it are read and discarded."""
        start, stream = self._streams.get(replica, (step + 1, None))
        if stream is None or start > step:
            pipeline = self._made[replica]
            reopened, start, stream = stream is not None, 0, iter(pipeline)
            if reopened and stream is pipeline:
                raise DataError(
                    f"the pipeline of logical replica {replica} is an iterator, which cannot go back "
                    "to an earlier step; give an iterable that starts from its beginning each time, or "
                    "a sequence"
                )
        share: Any = _END
        for position in range(start, step + 1):
            share = next(stream, _END)
            if share is _END:
                raise DataError(
                    f"the pipeline of logical replica {replica} ended after {position} batches, and "
                    f"step {step} was asked for; a pipeline without a length must not end"
                )
            self._streams[replica] = (position + 1, stream)
        return share

    def recipe(self) -> Mapping[str, Scalar]:
        if self._recipe is None:
            raise DataError(
                "the data behind a function are unknown; describe them: "
                'distribute_datasets_from_function(fn, recipe={"dataset": "digits-v2", '
                '"batch_size": 128}), so that a resume with other data is refused'
            )
        return self._recipe
