"""The strategy: V logical replicas on any devices and processes, with the same bits.

Owns the plan of a step: which replica runs where, and in which order contributions are added.
Invariant: with V fixed, the result of a step is a function of the state, the batch and the seed; no
number of devices or processes enters it. This module names no framework: what differs between them
is behind `perdure.distribute.engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from perdure.distribute.engine import Engine, Grad, Scalar, Stream, Update
from perdure.distribute.processes import Processes
from perdure.distribute.reduction import Plan, Reduction
from perdure.distribute.step import TrainStep
from perdure.distribute.values import PerReplica
from perdure.errors import DataError, TopologyError

# Goes into the recipe. It changes whenever the order of additions or the derivation of keys does.
TREE_VERSION = 1


class Dataset(Protocol):
    """What a strategy asks of a dataset; perdure.data.ArrayDataset is one."""

    @property
    def batch_size(self) -> int: ...

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any: ...

    def recipe(self) -> Mapping[str, Scalar]: ...


class Strategy:
    """V logical replicas on the devices of an engine.

    `replicas` is V, by default the number of devices in the whole group, as in TensorFlow. Give it,
    and the result no longer depends on the devices.
    """

    def __init__(self, engine: Engine, replicas: int | None = None, *, seed: int = 0) -> None:
        if not 0 <= seed < 2**63:
            raise TopologyError(f"seed must be 0 to 2**63 - 1, got {seed}")
        self._engine = engine
        self._seed = seed
        self._replicas = sum(engine.devices_per_process) if replicas is None else replicas
        self._plan = Plan(engine, self._replicas)

    @property
    def num_replicas_in_sync(self) -> int:
        """V, the number of logical replicas."""
        return self._replicas

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

    def recipe(self, dataset: Dataset | None = None) -> dict[str, Scalar]:
        """What decides the result, and nothing about topology. Save it beside every checkpoint.

        An entry of the dataset whose name is taken gets the prefix "data_" (data_seed).
        """
        own: dict[str, Scalar] = {
            "replicas": self._replicas,
            "seed": self._seed,
            "tree": TREE_VERSION,
            **self._engine.recipe(),
        }
        for name, value in (dataset.recipe() if dataset is not None else {}).items():
            own[f"data_{name}" if name in own else name] = value
        return own

    def batch(self, dataset: Dataset, step: int) -> PerReplica:
        """The shares of this process's replicas of the global batch of a step."""
        if not 0 <= step < 2**32:
            raise DataError(f"step must be 0 to 2**32 - 1, got {step}")
        shares = tuple(dataset.batch(step, r, self._replicas) for r in self.local_replicas)
        return PerReplica(shares, self.local_replicas, step)

    def keys(self, step: int) -> PerReplica:
        """A source of random numbers for each local replica, a function of (seed, step, replica)."""
        return PerReplica(
            tuple(self._engine.key(Stream(self._seed, step, r)) for r in self.local_replicas),
            self.local_replicas,
            step,
        )

    def step(self, grad: Grad, update: Update) -> TrainStep:
        """A training step, to be called as `state, logs = train_step(state, batch)`.

        `grad(state, batch, key)` returns the contributions of ONE logical replica: sums over its
        examples, never means (gradients, (sum, weight) pairs of metrics, sums of model state).
        `update(state, total)` gets the contributions summed over all replicas and returns
        (state, logs); it divides once, by a weight that is part of the total.
        """
        return TrainStep(self._plan, self._seed, grad, update)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerReplica:
        """fn for every local replica, eagerly. PerReplica arguments are split, others passed whole."""
        kwargs = dict(kwargs or {})
        for value in (*args, *kwargs.values()):
            if isinstance(value, PerReplica) and value.replicas != self.local_replicas:
                raise TopologyError(
                    f"expected values for the replicas {self.local_replicas}, found {value.replicas}"
                )
        results = [
            self._engine.call(
                fn,
                self._engine.devices[device],
                [_of(value, replica) for value in args],
                {name: _of(value, replica) for name, value in kwargs.items()},
            )
            for device, (start, stop) in enumerate(self._plan.local)
            for replica in range(start, stop)
        ]
        return PerReplica(tuple(results), self.local_replicas)

    def reduce(self, reduce_op: str, value: PerReplica, axis: int | None = None) -> Any:
        """"sum" or "mean" over all replicas of the group, in the fixed tree. A collective.

        With `axis`, over that axis of every replica's value too; the mean is then over all elements.
        A mean of shares that hold padding is wrong: reduce (sum, weight) pairs with "sum".
        """
        op = str(getattr(reduce_op, "value", reduce_op)).lower()
        if op not in ("sum", "mean"):
            raise TopologyError(f'reduce_op must be "sum" or "mean", got {reduce_op!r}')
        if not isinstance(value, PerReplica) or value.replicas != self.local_replicas:
            raise TopologyError(
                f"reduce expects a PerReplica for the replicas {self.local_replicas}, got {value!r}"
            )
        engine = self._engine
        sizes: list[int] = []

        def prepare(leaf: Any) -> Any:
            sizes.append(1 if axis is None else leaf.shape[axis])
            return leaf if axis is None else leaf.sum(axis)

        reduction = Reduction(self._plan)
        for device, (start, stop) in enumerate(self._plan.local):
            for replica in range(start, stop):
                sizes.clear()
                own = engine.map(prepare, _of(value, replica))
                reduction.push(device, replica, engine.put(own, engine.devices[device]))
        total = reduction.total(check=True)
        if op == "sum":
            return total
        # Every replica has the same sizes, which the reduction has checked. Divided once, at the end.
        remaining = iter(sizes)
        return engine.map(lambda leaf: leaf / (self._replicas * next(remaining)), total)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas; of any other value, the tuple of it alone."""
        return value.values if isinstance(value, PerReplica) else (value,)


def _of(value: Any, replica: int) -> Any:
    if isinstance(value, PerReplica):
        return value.values[value.replicas.index(replica)]
    return value
