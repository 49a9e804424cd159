"""The call of `fit` that is running: the one place that knows how Keras is made inside.

A callback is told of epochs and batches; how `fit` comes to its batches is in the local variables of
`fit` and in the methods of its epoch iterator. They are read here, and changed on that one iterator and
on that one list of callbacks, which end with the call: no class and no function of Keras is replaced.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import keras

from perdure.errors import TrainError

_OLDEST = (3, 12)  # the first whose epoch iterator is that of today; tested with 3.15
_NEEDED = ("data_adapter", "steps_per_epoch", "steps_per_execution", "_current_iterator")
_NEEDED += ("_steps_seen", "_num_batches", "_enumerate_iterator", "_get_iterator")


class RunningFit:
    """What `fit` was called with, and how it iterates."""

    def __init__(self, model: Any, local: dict[str, Any]) -> None:
        self.model = model
        self.iterator = local["epoch_iterator"]
        self.callbacks = local["callbacks"]
        names = inspect.signature(keras.Model.fit).parameters
        self.arguments = {name: local[name] for name in names if name in local and name != "self"}
        version = tuple(int(part) for part in keras.__version__.split(".")[:2])
        missing = [name for name in _NEEDED if not hasattr(self.iterator, name)]
        if version < _OLDEST or missing or not hasattr(model, "_initial_epoch"):
            raise TrainError(
                f"expected Keras {_OLDEST[0]}.{_OLDEST[1]} or newer, whose `fit` can be brought back "
                f"to a batch, found {keras.__version__}{f' without {missing[0]}' if missing else ''}."
            )

    def build(self) -> None:
        """Make the variables of the optimizer and of the metrics, which TensorFlow makes late.

        Takes no batch from the data: shapes and dtypes are enough.
        """
        model = self.model
        if keras.backend.backend() == "tensorflow":
            spec = self.iterator.data_adapter.get_tf_dataset().element_spec
            model._symbolic_build(data_batch=spec)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def ahead_of_validation(self, action: Callable[[], None]) -> None:
        """Call `action` as the validation of an epoch begins, before any callback is told of it."""
        callbacks = self.callbacks

        def begin(logs: Any = None) -> None:
            action()
            type(callbacks).on_test_begin(callbacks, logs)

        callbacks.on_test_begin = begin

    def release(self) -> None:
        """The list of callbacks is as Keras made it."""
        with suppress(AttributeError):
            del self.callbacks.on_test_begin

    def stand_in(self, logs: dict[str, float]) -> tuple[int, int, Any]:
        """What the iterator yields so that the body of the loop runs once and changes nothing.

        `fit` remembers what the last step returned, and an epoch may have no step left. So that step
        is played: the training function gives back `logs`, and no callback is told.
        """
        model, callbacks = self.model, self.callbacks
        trained = model.train_function

        def step(*given: Any) -> Any:
            model.train_function = trained
            return (logs, given[0]) if keras.backend.backend() == "jax" else logs

        def end(*_: Any, **named: Any) -> None:  # noqa: ARG001 (as Keras calls it)
            del callbacks.on_train_batch_begin, callbacks.on_train_batch_end

        model.train_function = step
        callbacks.on_train_batch_begin = _nothing
        callbacks.on_train_batch_end = end
        return 0, 0, itertools.repeat(None)


def running_fit(model: Any) -> RunningFit:
    """The call of `fit` on `model` that this is called from."""
    frame = _search(sys._getframe(1), lambda local: local.get("self") is model)
    if frame is None:
        raise TrainError(
            f"expected to be called by the `fit` of Keras, found another loop (Keras "
            f"{keras.__version__}, model {type(model).__name__}). In a loop of your own use "
            f"`perdure.CheckpointManager`."
        )
    return RunningFit(model, frame.f_locals)


def is_running(frame: FrameType | None, iterator: Any) -> bool:
    """Whether `frame` is below the `fit` that has this epoch iterator."""
    return _search(frame, lambda local: local.get("epoch_iterator") is iterator) is not None


def _search(frame: FrameType | None, wanted: Any) -> FrameType | None:
    while frame is not None:
        code = frame.f_code
        is_fit = code.co_name == "fit" and "epoch_iterator" in code.co_varnames
        if is_fit and wanted(frame.f_locals):
            return frame
        frame = frame.f_back
    return None


def _nothing(*_: Any, **named: Any) -> None:
    pass
