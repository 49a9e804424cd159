"""The strategy: V logical replicas on any devices and processes, with the same bits.

Owns the plan of a step: which replica runs where, and in which order contributions are added.
Invariant: with V fixed, the result of a step is a function of the state, the batch and the seed; no
number of devices or processes enters it. This module names no framework: what differs between them
is behind `perdure.distribute.engine.Engine`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from perdure.checkpoint.recipe import allowed, check_group
from perdure.data.pipelines import refuse_pipeline
from perdure.distribute import collectives, inputs, keras_calls, replica_context
from perdure.distribute.cluster import Cluster
from perdure.distribute.engine import Engine, Grad, Scalar, Stream, Update
from perdure.distribute.finite import FiniteEngine
from perdure.distribute.inputs import AutoShardPolicy, DistributedDataset, StepDataset
from perdure.distribute.lockstep import Lockstep
from perdure.distribute.reduction import Plan
from perdure.distribute.replica import RunContext, commit
from perdure.distribute.replica_context import ReplicaFunction
from perdure.distribute.step import TrainStep
from perdure.distribute.values import PerReplica, ReduceOp, of
from perdure.errors import DataError, TopologyError
from perdure.process_group import Processes

# In the recipe. It changes whenever the order of additions, the addition itself, the derivation of keys
# or the program that is made of a user's function does.
TREE_VERSION = 3


class Strategy:
    """V logical replicas on the devices of an engine.

    `replicas` is V, by default the number of devices in the whole group, as in TensorFlow. Give it,
    and the result no longer depends on the devices. All processes of a group make it together:
    RecipeMismatchError in each of them where their recipes differ.
    """

    cluster_resolver: Cluster | None = None
    """The group that this strategy joined, with `task_type` and `task_id`; None if it joined none."""

    def __init__(self, engine: Engine, replicas: int | None = None, *, seed: int = 0) -> None:
        if not _is_whole(seed) or not 0 <= seed < 2**63:
            raise TopologyError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}")
        if replicas is not None and not _is_whole(replicas):
            raise TopologyError(
                f"replicas must be an integer, or None for the devices, got {replicas!r}"
            )
        self._engine = engine
        self._seed = int(seed)
        self._replicas = int(sum(engine.devices_per_process) if replicas is None else replicas)
        if note := check_group(engine.processes, self.recipe(), allowed()):
            warnings.warn(note, stacklevel=3)
        self._plan = Plan(engine, self._replicas)

    @property
    def num_replicas_in_sync(self) -> int:
        """V, the number of logical replicas."""
        return self._replicas

    @property
    def engine(self) -> Engine:
        """The framework's verbs."""
        return self._engine

    @property
    def processes(self) -> Processes:
        """The group of processes; pass it to CheckpointManager."""
        return self._engine.processes

    @property
    def is_chief(self) -> bool:
        """True in the process that writes what only one may write."""
        return self._engine.processes.is_chief

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Numbers of the logical replicas that this process runs."""
        return self._plan.local_replicas

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """`with strategy.scope():` makes it the strategy that get_strategy() returns inside.

        Metrics made there belong to it. A scope of another strategy inside is refused.
        """
        if replica_context.has_strategy() and replica_context.get_strategy() is not self:
            raise TopologyError(
                "the scope of one strategy cannot stand in that of another; leave the outer one first"
            )
        with replica_context.standing(self, None):
            yield self

    def recipe(self, dataset: StepDataset | DistributedDataset | None = None) -> dict[str, Scalar]:
        """What decides the result, and nothing about topology. Save it beside every checkpoint.

        An entry of the dataset whose name is taken gets the prefix "data_" (data_seed).
        """
        own: dict[str, Scalar] = {
            "replicas": self._replicas,
            "seed": self._seed,
            "tree": TREE_VERSION,
            **self._engine.recipe(),
        }
        refuse_pipeline(dataset)
        for name, value in (dataset.recipe() if dataset is not None else {}).items():
            own[f"data_{name}" if name in own else name] = value
        return own

    def batch(self, dataset: StepDataset, step: int) -> PerReplica:
        """The shares of this process's replicas of the global batch of a step."""
        if not 0 <= step < 2**32:
            raise DataError(f"step must be 0 to 2**32 - 1, got {step}")
        inputs.require_dataset(dataset)
        shares = tuple(dataset.batch(step, r, self._replicas) for r in self.local_replicas)
        return PerReplica(shares, self.local_replicas, step)

    def distribute_dataset(
        self,
        dataset: StepDataset,
        auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.DATA,
    ) -> DistributedDataset:
        """The batches of all steps, one after the other, from step 0; see DistributedDataset."""
        source = inputs.sharded(dataset, auto_shard_policy)
        return DistributedDataset(source, self.batch)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[inputs.InputContext], Any],
        recipe: Mapping[str, Scalar] | None = None,
    ) -> DistributedDataset:
        """The batches of pipelines that `dataset_fn(input_context)` makes: one for each replica.

        A pipeline is a sequence (`__len__` and `__getitem__`; one pass over it is an epoch) or an
        iterable of the shares of its replica. Pipelines go by logical replica and not by process, so
        that a batch does not depend on the number of processes. `recipe` says what of the data decides
        the result ({"dataset": "digits-v2", "batch_size": 128}): nobody can tell by a function. It is
        recorded as that of any dataset is, and `recipe` of the strategy and `Trainer` need it.
        """
        source = inputs.from_function(dataset_fn, self.local_replicas, self._replicas, recipe)
        inputs.same_length(source, self.processes)
        return DistributedDataset(source, self.batch)

    def distribute_values_from_function(
        self, value_fn: Callable[[inputs.ValueContext], Any]
    ) -> PerReplica:
        """`value_fn(value_context)` of every local replica."""
        values = [value_fn(inputs.ValueContext(r, self._replicas)) for r in self.local_replicas]
        return PerReplica(tuple(values), self.local_replicas)

    def keys(self, step: int) -> PerReplica:
        """A source of random numbers for each local replica, a function of (seed, step, replica)."""
        return PerReplica(
            tuple(self._engine.key(Stream(self._seed, step, r)) for r in self.local_replicas),
            self.local_replicas,
            step,
        )

    def step(self, grad: Grad, update: Update, *, check_finite: bool = False) -> TrainStep:
        """A training step, to be called as `state, logs = train_step(state, batch)`.

        `grad(state, batch, key)` returns the contributions of ONE logical replica: sums over its
        examples, never means (gradients, (sum, weight) pairs of metrics, sums of model state).
        `update(state, total)` gets the contributions summed over all replicas and returns
        (state, logs); it divides once, by a weight that is part of the total.

        With `check_finite`, contributions that are not finite raise NonFiniteError before `update`,
        which names step, replica and array. It costs a look at every contribution.
        """
        plan = self._plan
        if check_finite:
            plan = Plan(cast(Engine, FiniteEngine(self._engine)), self._replicas)
        return TrainStep(
            plan,
            self._seed,
            ReplicaFunction(grad, self._replicas, "grad"),
            ReplicaFunction(update, self._replicas, "update"),
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerReplica:
        """fn for every local replica, eagerly. PerReplica arguments are split, others passed whole.

        In fn, `get_replica_context()` offers the collectives; all replicas of the group must come to
        the same ones. Where an argument carries a step (a batch, keys), PyTorch's global generators
        are under (seed, step, replica), and in a merge_call under (seed, step, V); without one, draw
        from keys that you pass.

        An optimizer of PyTorch or Keras that steps in fn is a collective too: it adds the gradients of
        all replicas in the tree and steps once, as in TensorFlow. StateError for any other change that
        a replica makes to a tensor of PyTorch or a variable of Keras from outside.
        """
        self._outside_of_replicas("run")
        if not isinstance(args, (tuple, list)):
            raise TopologyError(
                f"args: expected a tuple of arguments, found {type(args).__name__}; of one argument, "
                "(batch,) with a comma"
            )
        kwargs = dict(kwargs or {})
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, PerReplica)]
        for value in given:
            if value.replicas != self.local_replicas:
                raise TopologyError(
                    f"expected values for the replicas {self.local_replicas}, found "
                    f"{value.replicas}: they were made by another strategy"
                )
        step = next((value.step for value in given if value.step is not None), None)

        def body(replica: int) -> Any:
            own = [of(value, replica) for value in given]
            with (
                replica_context.standing(self, contexts[replica - self._plan.first]),
                guard.replica(replica, own),
            ):
                return self._engine.call(
                    fn,
                    self._engine.devices[self._device_of(replica)],
                    [of(value, replica) for value in args],
                    {name: of(value, replica) for name, value in kwargs.items()},
                    None if step is None else Stream(self._seed, step, replica),
                )

        name = getattr(fn, "__name__", repr(fn))
        between = None if step is None else Stream(self._seed, step, self._replicas)
        keras_calls.install()
        guard = self._engine.guard(self)
        lockstep = Lockstep(self, body, name=name, guard=guard, stream=between)
        contexts = [RunContext(self, r, lockstep, guard) for r in self.local_replicas]
        try:
            results = PerReplica(tuple(lockstep()), self.local_replicas)
            guard.finish()
            commit(contexts)
        finally:
            contexts.clear()  # a cycle, which would keep the arguments until it is collected
        return results

    def reduce(self, reduce_op: ReduceOp | str, value: PerReplica, axis: int | None = None) -> Any:
        """ "sum" or "mean" over all replicas of the group, in the fixed tree. A collective.

        With `axis`, over that axis of every replica's value too; the mean is then over all elements.
        A mean of shares that hold padding is wrong: reduce (sum, weight) pairs with "sum".
        """
        self._outside_of_replicas("reduce")
        return collectives.reduce(self._plan, reduce_op, value, axis)

    def gather(self, value: PerReplica, axis: int) -> Any:
        """The values of all replicas of the group, in their order, joined along `axis`. A collective.

        The result is the same in every process. The values may differ in length along `axis`, and in
        nothing else.
        """
        self._outside_of_replicas("gather")
        return collectives.gather(self._plan, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas; of any other value, the tuple of it alone."""
        return value.values if isinstance(value, PerReplica) else (value,)

    def everywhere(self, value: Any) -> PerReplica:
        """The same value for every local replica, on its device."""
        values = tuple(
            self._engine.put(value, self._engine.devices[self._device_of(replica)])
            for replica in self.local_replicas
        )
        return PerReplica(values, self.local_replicas)

    def _device_of(self, replica: int) -> int:
        return next(d for d, (_, stop) in enumerate(self._plan.local) if replica < stop)

    def _outside_of_replicas(self, name: str) -> None:
        if replica_context.get_replica_context() is not None:
            raise TopologyError(
                f"strategy.{name} was called in a logical replica, which cannot speak for all; use "
                "get_replica_context().all_reduce or .all_gather there"
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's too
