"""Turns a Keras model and its optimizer into functions of a state, on JAX and PyTorch.

Invariant: the variables of the model are only read by `state` and only written by `write`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from perdure.errors import StateError
from perdure.state.keras_state import SEED, read_variable, variables_by_path, write_variables
from perdure.state.paths import flatten_dict, unflatten_dict

__all__ = ["Stateless"]


class Stateless:
    """A Keras model and its optimizer as functions of a state, for `perdure.jax` and `perdure.torch`.

    The state is `{"model": ..., "optimizer": ...}` with the leaf paths that `perdure.Checkpoint` gives
    the model and the optimizer, so a checkpoint of one restores into the other.

    Args:
        model: A built model.
        optimizer: Built here if it is not.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None) -> None:
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._model = model
        self._optimizer = optimizer
        self._variables = variables_by_path(model)
        # By identity: on PyTorch, `==` of variables compares their values.
        trained = {id(variable) for variable in model.trainable_variables}
        self._trainable = [p for p, v in self._variables.items() if id(v) in trained]
        self._seeds = [p for p, v in self._variables.items() if v.name == SEED]
        self._paths = {id(variable): path for path, variable in self._variables.items()}

    def state(self) -> dict[str, Any]:
        """The values of the model and of the optimizer now, copied into a tree of arrays."""
        state = {
            "model": unflatten_dict(
                {path: _copy(read_variable(v)) for path, v in self._variables.items()}
            )
        }
        if self._optimizer is not None:
            slots = variables_by_path(self._optimizer)
            state["optimizer"] = unflatten_dict(
                {path: _copy(read_variable(v)) for path, v in slots.items()}
            )
        return state

    def write(self, state: Mapping[str, Any]) -> None:
        """Write a state into the model and the optimizer, to evaluate or to save with Keras."""
        write_variables(self._variables, flatten_dict(state["model"]))
        if self._optimizer is not None and "optimizer" in state:
            write_variables(variables_by_path(self._optimizer), flatten_dict(state["optimizer"]))

    def trainable(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The trainable variables by path, to differentiate a loss by."""
        values = flatten_dict(state["model"])
        if keras.backend.backend() == "torch":
            return {path: values[path].detach().requires_grad_() for path in self._trainable}
        return {path: values[path] for path in self._trainable}

    def __call__(
        self,
        state: Mapping[str, Any],
        trainable: Mapping[str, Any],
        x: Any,
        key: Any,
        *,
        training: bool = True,
    ) -> tuple[Any, dict[str, Any]]:
        """Call the model for one logical replica; every seed generator starts from its `key`.

        Losses that layers add are not computed. Returns the outputs, and the non-trainable variables
        (of BatchNormalization) by path; return these as contributions.
        """
        values = {**flatten_dict(state["model"]), **trainable, **self._seeded(key)}
        model = self._model
        result = model.stateless_call(
            [values[self._paths[id(v)]] for v in model.trainable_variables],
            [values[self._paths[id(v)]] for v in model.non_trainable_variables],
            x,
            training=training,
        )
        paths = [self._paths[id(v)] for v in model.non_trainable_variables]
        statistics = dict(zip(paths, result[1], strict=True))
        return result[0], {path: v for path, v in statistics.items() if path not in self._seeds}

    def apply(
        self, state: Mapping[str, Any], grads: Mapping[str, Any], statistics: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state after one step of the optimizer, or StateError if there is none.

        `grads` and `statistics` are means over the replicas, by path.
        """
        if self._optimizer is None:
            raise StateError("apply needs an optimizer: Stateless(model, optimizer)")
        optimizer = self._optimizer
        values = {**flatten_dict(state["model"]), **statistics}
        slots = flatten_dict(state["optimizer"])
        trained = [self._paths[id(v)] for v in self._model.trainable_variables]
        new, changed = optimizer.stateless_apply(
            [slots[path] for path in variables_by_path(optimizer)],
            [grads[path] for path in trained],
            [values[path] for path in trained],
        )
        values |= dict(zip(trained, new, strict=True))
        slots = dict(zip(variables_by_path(optimizer), changed, strict=True))
        return {**state, "model": unflatten_dict(values), "optimizer": unflatten_dict(slots)}

    def _seeded(self, key: Any) -> dict[str, Any]:
        if keras.backend.backend() == "jax":
            import jax

            keys = [jax.random.fold_in(key, number) for number in range(len(self._seeds))]
            words = [jax.random.key_data(each).astype("uint32") for each in keys]
        else:
            import torch

            words = [
                torch.randint(-(2**31), 2**31, (2,), generator=key, dtype=torch.int32)
                for _ in self._seeds
            ]
        return dict(zip(self._seeds, words, strict=True))


def _copy(value: Any) -> Any:
    """PyTorch's optimizers write into the tensors that they are given."""
    return value.detach().clone() if hasattr(value, "detach") else value
