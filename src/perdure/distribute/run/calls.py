"""Wraps methods of a framework's classes for calls by a replica, and those of Keras on any backend.

An optimizer is applied once, with the sum of the gradients in the fixed tree. Any other assignment
to a variable would be made once for each replica, and is refused; so is `fit` in a scope.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import numpy as np

from perdure.distribute.arrays import on_host
from perdure.distribute.run import collectives
from perdure.distribute.run.context import Meeting, current
from perdure.distribute.run.replicas import current_run
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica
from perdure.errors import StateError, TopologyError

_compiled_in_scope: WeakSet[Any] = WeakSet()


def install() -> None:
    """Wrap Keras's classes, if it is imported; called at each `run` and scope."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "optimizers"):  # its import is under way
        return
    for base, name, make in (
        (keras.metrics.Metric, "update_state", _update),
        (keras.optimizers.Optimizer, "apply", _apply),
        (keras.Variable, "_direct_assign", _assign),
        (keras.Model, "compile", _compile),
        (keras.Model, "fit", _refused("fit")),
        (keras.Model, "train_on_batch", _refused("train_on_batch")),
    ):
        for cls in (*base.__mro__, *with_subclasses(base)):
            wrap(cls, name, make)


def _apply(old: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
        context = current_run()
        if context is None or _stateless():
            return old(self, grads, trainable_variables, **kwargs)
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        gradients = {str(n): grad for n, grad in enumerate(grads) if grad is not None}

        def join(plan: Plan, values: PerReplica) -> Any:
            total = collectives.reduce(plan, "sum", values, None)["gradients"]
            if sys.modules["keras"].backend.backend() == "jax":
                # Of no device, as Keras's variables are: replicas on all devices compute with them.
                total = {name: on_host(value) for name, value in total.items()}
            summed = [total.get(str(n)) for n in range(len(grads))]
            return old(self, summed, variables, **kwargs)

        value = {"gradients": gradients, "steps": np.ones((), np.float32)}
        call = f"{type(self).__name__}.apply() of {self.name} with {len(gradients)} gradients"
        return context.meet(Meeting(call, value, join))

    return apply


def _assign(old: Any) -> Any:
    def _direct_assign(self: Any, value: Any) -> Any:
        if (context := current_run()) is not None:
            raise StateError(
                f"{self.path}: logical replica {context.replica_id_in_sync_group} assigns to this "
                "variable of Keras. Replicas run one after another, so the result would depend on how "
                "many of them this process has. In the function of strategy.run, only an optimizer and "
                "`update_state` of a metric may change variables; seed generators (Dropout) and "
                "BatchNormalization need perdure.keras.Stateless with strategy.step, or training=False"
            )
        return old(self, value)

    return _direct_assign


def _compile(old: Any) -> Any:
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        (_compiled_in_scope.discard if current() is None else _compiled_in_scope.add)(self)
        return old(self, *args, **kwargs)

    return compile


def _refused(name: str) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if current() is None and self not in _compiled_in_scope:
                return old(self, *args, **kwargs)
            where = "compiled" if current() is None else "called"
            raise TopologyError(
                f"model.{name}: {where} in strategy.scope(), and Keras would train without the "
                "strategy. Train under it with perdure.keras.Stateless and strategy.step, or a loop "
                "over strategy.run (docs/MODELS.md). To let Keras train, compile and call it outside "
                "of the scope, with keras.distribution for several devices"
            )

        return method

    return make


def _update(old: Any) -> Any:
    """Metrics of Keras are sums: what each replica adds to zero goes through the tree."""

    def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_run()
        if context is None or _stateless():
            return old(self, *args, **kwargs)
        keras: Any = sys.modules["keras"]
        empty = [(variable, keras.ops.zeros_like(variable.value)) for variable in self.variables]
        with keras.StatelessScope(state_mapping=empty) as scope:
            old(self, *args, **kwargs)
        added = {str(n): scope.get_current_value(v) for n, v in enumerate(self.variables)}

        def join(plan: Plan, values: PerReplica) -> None:
            total = collectives.reduce(plan, "sum", values, None)
            for number, variable in enumerate(self.variables):
                variable.assign_add(on_host(total[str(number)]))

        context.meet(Meeting(f"{type(self).__name__}.update_state() of {self.name}", added, join))
        return None

    return update_state


def _stateless() -> bool:
    """Whether Keras collects assignments instead of making them, as in `stateless_apply`."""
    backend: Any = sys.modules.get("keras.src.backend")
    return bool(backend is not None and backend.common.stateless_scope.in_stateless_scope())


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the method that `owner` itself defines as `name` by `make(method)`, at most once."""
    old = vars(owner).get(name)
    if callable(old) and not getattr(old, "_knows_replicas", False):
        new: Any = functools.wraps(old)(make(old))
        new._knows_replicas = True
        setattr(owner, name, new)


def with_subclasses(cls: type) -> Iterator[type]:
    """A class and all classes that are derived from it so far."""
    yield cls
    for child in cls.__subclasses__():
        yield from with_subclasses(child)
