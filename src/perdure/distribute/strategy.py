"""The strategy: V logical replicas on any devices and processes, with the same bits.

With V fixed, the result of a step is a function of the state, the batch and the seed; the numbers of
devices and processes do not enter it. `perdure.distribute.engine.Engine` is the seam to a framework.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from perdure.checkpoint.arguments import step_number
from perdure.checkpoint.journal import Journal
from perdure.checkpoint.recipe import allowed, check_group, note_strategy_in_use
from perdure.data.pipelines import by_index
from perdure.distribute import inputs
from perdure.distribute.audit import OnCorruption, audit_options
from perdure.distribute.cluster import Cluster
from perdure.distribute.engine import Engine, Grad, Scalar, Stream, Update
from perdure.distribute.inputs import AutoShardPolicy, DistributedDataset, StepDataset
from perdure.distribute.run import calls, collectives
from perdure.distribute.run.context import (
    ReplicaFunction,
    Scope,
    current,
    current_strategy,
    enter,
    get_replica_context,
)
from perdure.distribute.run.replicas import ReplicaRun
from perdure.distribute.step import TrainStep
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica, ReduceOp
from perdure.errors import ArgumentError, TopologyError
from perdure.runtime.process_group import Processes
from perdure.tensorflow_names import TensorFlowNames

# In the recipe. It changes with the order of additions, the addition itself, the derivation of keys and
# the program that is made of a user's function.
TREE_VERSION = 3


class Strategy(TensorFlowNames):
    """V logical replicas on the devices of an engine.

    All processes of a group make their strategies together.

    Args:
        engine: The framework, on the local devices.
        replicas: V. By default the number of devices in the whole group, as in TensorFlow; with a
            number of your own the result does not depend on the devices.
        seed: 0 to 2**63 - 1. All random numbers are functions of (seed, step, replica).

    Raises:
        RecipeMismatchError: The recipes of the processes differ; raised in each of them.
        TopologyError: `seed` or `replicas` is not a valid number.
    """

    cluster_resolver: Cluster | None = None
    """The group that this strategy joined, with `task_type` and `task_id`; None if it joined none."""

    def __init__(self, engine: Engine, replicas: int | None = None, *, seed: int = 0) -> None:
        if not _is_whole(seed) or not 0 <= seed < 2**63:
            raise TopologyError(f"seed: expected an integer from 0 to 2**63 - 1, found {seed!r}")
        if replicas is not None and not _is_whole(replicas):
            raise TopologyError(
                f"replicas: expected an integer, or None for the devices, found {replicas!r}"
            )
        self._engine = engine
        self._seed = int(seed)
        self._follows_devices = replicas is None
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
        """The framework, on the local devices of this process."""
        return self._engine

    @property
    def processes(self) -> Processes:
        """The group of processes; pass it to CheckpointManager."""
        return self._engine.processes

    @property
    def is_chief(self) -> bool:
        """True in process 0, which commits checkpoints."""
        return self._engine.processes.is_chief

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Numbers of the logical replicas that this process runs."""
        return self._plan.local_replicas

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """`with strategy.scope():` makes it the strategy that get_strategy() returns inside.

        Metrics made there belong to it. `fit` of a Keras model, there or if it was compiled there,
        raises TopologyError, because Keras would train without the strategy.

        Raises:
            TopologyError: The code is in the scope of another strategy.
        """
        if current() is not None and current_strategy() is not self:
            raise TopologyError(
                "the scope of one strategy was entered in that of another; leave the outer one first"
            )
        calls.install()
        with enter(Scope(self)):
            yield self

    def recipe(self, dataset: StepDataset | DistributedDataset | None = None) -> dict[str, Scalar]:
        """What decides the result, and nothing about topology. Save it with every checkpoint.

        Args:
            dataset: Its recipe is added. An entry whose name is taken gets the prefix "data_"
                (data_seed).
        """
        recipe: dict[str, Scalar] = {
            "replicas": self._replicas,
            "seed": self._seed,
            "tree": TREE_VERSION,
            **self._engine.recipe(),
        }
        if (dataset := by_index(dataset)) is not None:
            inputs.require_dataset(dataset, "recipe")
        for name, value in (dataset.recipe() if dataset is not None else {}).items():
            recipe[f"data_{name}" if name in recipe else name] = value
        return recipe

    def batch(self, dataset: StepDataset, step: int) -> PerReplica:
        """The shares of this process's replicas of the global batch of a step."""
        if (step := step_number(step)) >= 2**32:
            raise ArgumentError(f"step: expected 0 to 2**32 - 1, found {step}.")
        inputs.require_dataset(dataset)
        shares = tuple(dataset.batch(step, r, self._replicas) for r in self.local_replicas)
        return PerReplica(shares, self.local_replicas, step)

    def distribute_dataset(
        self,
        dataset: StepDataset,
        auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.DATA,
    ) -> DistributedDataset:
        """The batches of all steps, one after the other, from step 0; see DistributedDataset."""
        source = inputs.sharded(by_index(dataset), auto_shard_policy)
        return DistributedDataset(source, self.batch)

    experimental_distribute_dataset = distribute_dataset

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[inputs.InputContext], Any],
        recipe: Mapping[str, Scalar] | None = None,
    ) -> DistributedDataset:
        """The batches of one pipeline for each local replica.

        Pipelines belong to logical replicas and not to processes, so that a batch does not depend on
        the number of processes.

        Args:
            dataset_fn: `dataset_fn(input_context)` returns a pipeline of the shares of a replica: a
                sequence (`__len__` and `__getitem__`; one pass over it is an epoch) or an iterable.
            recipe: What of the data decides the result ({"dataset": "digits-v2", "batch_size": 128}),
                which cannot be read from a function. `Strategy.recipe` and `Trainer` need it.
        """
        local = self.local_replicas
        source = inputs.Pipelines(dataset_fn, local, self._replicas, recipe, self.processes)
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

    def step(
        self,
        grad: Grad,
        update: Update,
        *,
        check_finite: bool = False,
        journal: Journal | None = None,
        audit: float | None = None,
        on_corruption: OnCorruption | None = None,
        donate: bool | None = None,
    ) -> TrainStep:
        """A training step, to be called as `state, logs = train_step(state, batch)`.

        Args:
            grad: `grad(state, batch, key)` returns the contributions of ONE logical replica: sums over
                its examples, never means (gradients, (sum, weight) pairs of metrics, sums of model
                state).
            update: `update(state, total)` gets the contributions summed over all replicas and returns
                (state, logs). It divides once, by a weight that is part of the total.
            check_finite: Raise NonFiniteError, which names step, replica and array, before `update` if
                a contribution is not finite. Every contribution is then read once more.
            journal: `manager.journal`, whose lines then have digests of the batch, and of the total
                unless a step on JAX runs as one program, in which there is none.
            audit: The share of the steps, 0 to 1, in which the contribution of one replica is computed
                again on another device and compared, before `update` (docs/DOCTOR.md). None for what
                `perdure run --audit` says, or no audit. It changes no bit.
            on_corruption: "raise" SilentCorruptionError in every process (by default); "exclude" also
                has `perdure run` restart without the device that was wrong.
            donate: True gives the state that is passed away: a fast step on JAX then uses its memory
                for the new one, and the old arrays are deleted. By default only a `Trainer` does so,
                with states that the step itself returned. PyTorch changes a state in place in any case.

        Raises:
            ArgumentError: `journal` is no journal.
            TopologyError: `audit` or `on_corruption` has another value, or devices are to be excluded
                and the number of replicas follows the number of devices.
        """
        audited = audit_options(audit, on_corruption)
        if audited.excludes and self._follows_devices:
            raise TopologyError(
                "on_corruption='exclude': expected a strategy with replicas of its own, found one with "
                "as many as it has devices, whose result would change with a device less. Give it "
                f"replicas={self._replicas}"
            )
        note_strategy_in_use(self)
        train_step = TrainStep(
            self._plan,
            self._seed,
            ReplicaFunction(grad, self._replicas, "grad"),
            ReplicaFunction(update, self._replicas, "update"),
            journal,
            donate,
            check_finite=check_finite,
        )
        train_step.set_audit(audited)
        return train_step

    def explain(self, train_step: TrainStep) -> str:
        """Whether the last call of a step was fast, and why or why not, in one sentence.

        On JAX a step runs as fewer and larger programs if their instructions are those of the separate
        programs for grad, the additions and update, and on other platforms than the CPU if the variable
        PERDURE_FAST_ON names them (docs/STRATEGIES.md). It never changes a bit. The
        logger "perdure.distribute" gets the same sentence at level DEBUG.

        Args:
            train_step: What `step` returned.

        Raises:
            TopologyError: `train_step` is something else.
        """
        if not isinstance(train_step, TrainStep):
            raise TopologyError(
                f"explain: expected what strategy.step(grad, update) returned, found "
                f"{type(train_step).__name__}"
            )
        return train_step.explain()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerReplica:
        """Call fn for every local replica, eagerly, one replica after the other.

        In fn, `get_replica_context()` offers the collectives; all replicas of the group must call the
        same ones. If an argument carries a step (a batch, keys), the numbers of PyTorch's global
        generators are a function of (seed, step, replica), and in a merge_call of (seed, step, V);
        otherwise draw from keys that you pass.

        An optimizer of PyTorch or Keras that steps in fn is a collective too: it adds the gradients of
        all replicas in the tree and steps once, as in TensorFlow.

        Args:
            fn: The function for one replica.
            args: Positional arguments. Of a PerReplica each replica gets its own value.
            kwargs: Named arguments, likewise.

        Returns:
            The results of the local replicas.

        Raises:
            StateError: A replica changed a tensor of PyTorch or a variable of Keras from outside of it
                in another way, or the replicas did not call the same collectives.
            TopologyError: Called in a replica, or with values of another strategy.
        """
        self._require_outside_of_replicas("run")
        note_strategy_in_use(self)
        if not isinstance(args, (tuple, list)):
            raise TopologyError(
                f"args: expected a tuple of arguments, found {type(args).__name__}; for one argument "
                "write (batch,), with a comma"
            )
        kwargs = dict(kwargs or {})
        split = [value for value in (*args, *kwargs.values()) if isinstance(value, PerReplica)]
        for value in split:
            if value.replicas != self.local_replicas:
                raise TopologyError(
                    f"expected values for the replicas {self.local_replicas}, found "
                    f"{value.replicas}: they were made by another strategy"
                )
        step = next((value.step for value in split if value.step is not None), None)
        streams = None if step is None else partial(Stream, self._seed, step)
        calls.install()
        return ReplicaRun(self._plan, self, fn, args, kwargs, streams)()

    def reduce(self, reduce_op: ReduceOp | str, value: PerReplica, axis: int | None = None) -> Any:
        """Reduce the values of all replicas of the group, in the fixed tree. A collective.

        A mean of shares that hold padding is wrong: reduce (sum, weight) pairs with "sum".

        Args:
            reduce_op: "sum" or "mean", or the member of `ReduceOp`.
            value: A tree of arrays for each local replica, such as `run` returns.
            axis: Reduce over this axis of every replica's arrays too; the mean is then over all
                elements.

        Returns:
            The reduced tree, the same in every process.

        Raises:
            StateError: The structures of the replicas differ, or a value is traced (inside of jit).
            TopologyError: Called in a replica, or with the value of another strategy.
        """
        self._require_outside_of_replicas("reduce")
        return collectives.reduce(self._plan, reduce_op, value, axis)

    def gather(self, value: PerReplica, axis: int) -> Any:
        """Join the values of all replicas of the group, in their order, along `axis`. A collective.

        Args:
            value: A tree of arrays for each local replica. Arrays may differ in length along `axis`
                only.
            axis: The axis to join along.

        Returns:
            The joined tree, the same in every process.

        Raises:
            StateError: The arrays differ in something else, or a value is traced (inside of jit).
            TopologyError: Called in a replica, or with the value of another strategy.
        """
        self._require_outside_of_replicas("gather")
        return collectives.gather(self._plan, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas; of any other value, a tuple that holds it alone."""
        return value.values if isinstance(value, PerReplica) else (value,)

    experimental_local_results = local_results

    def everywhere(self, value: Any) -> PerReplica:
        """The same value for every local replica, on its device."""
        return self._plan.everywhere(value)

    def _require_outside_of_replicas(self, name: str) -> None:
        if get_replica_context() is not None:
            raise TopologyError(
                f"strategy.{name} was called in a logical replica, which has only its own values; use "
                "get_replica_context().all_reduce or .all_gather there"
            )


def get_strategy() -> Strategy:
    """The strategy whose scope or replica this is.

    Raises:
        TopologyError: Under no strategy, and in `grad` and `update`, which serve several.
    """
    return current_strategy()


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's too
