"""All private details of Keras that this package relies on; no other module of it knows any.

They are changed only on the epoch iterator of a `fit`, its data adapter and its list of callbacks,
which end with the call.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Literal
from weakref import ref

import keras
from keras.src.backend.common import global_state
from keras.src.callbacks.monitor_callback import MonitorCallback
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.src.utils.io_utils import print_msg

from perdure.errors import TrainError
from perdure.state.keras_state import SEED
from perdure.text import few

__all__ = ["MonitorCallback", "print_msg"]

CALLBACK_ATTRIBUTES = frozenset({"_model", "params", "model"})  # Keras sets them on every callback
# Of a compiled model. `fit` of an outer model may never use the ones of a nested model.
COMPILED_ATTRIBUTES = ("_optimizer", "_loss_tracker", "_compile_metrics")

_OLDEST = (3, 12)  # the first with today's epoch iterator; tested with 3.15
_NEEDED = ("data_adapter", "steps_per_epoch", "steps_per_execution", "_current_iterator")
_NEEDED += ("_steps_seen", "_num_batches", "_enumerate_iterator", "_get_iterator")
_ADAPTERS: dict[str, Any] = {
    "arrays": ArrayDataAdapter,
    "generator": GeneratorDataAdapter,
    "PyDataset": PyDatasetAdapter,
    "tf.data": TFDatasetAdapter,
    "DataLoader": TorchDataLoaderAdapter,
}


class FitData:
    """The training data of one `fit`; `kind` is a key of `_ADAPTERS` or "other"."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.adapter_name = type(adapter).__name__
        matching = (kind for kind, cls in _ADAPTERS.items() if isinstance(adapter, cls))
        self.kind = next(matching, "other")
        self.py_dataset: Any = getattr(adapter, "py_dataset", None)
        shuffle = "_shuffle" if self.kind == "arrays" else "shuffle"
        self.shuffles = bool(getattr(adapter, shuffle, False))  # of arrays and of a PyDataset
        self.tf_dataset: Callable[[], Any] = adapter.get_tf_dataset
        self.torch_loader: Callable[[], Any] = adapter.get_torch_dataloader

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def arrays(self) -> tuple[list[Any], int, int]:
        """The arrays, the number of examples, and the batch size, of kind "arrays"."""
        adapter = self._adapter
        arrays = [array for array in keras.tree.flatten(adapter._inputs) if array is not None]
        return arrays, adapter._num_samples, adapter._batch_size

    def replace_py_dataset(self, dataset: Any) -> None:
        """Let Keras, and its workers, read `dataset` in order."""
        adapter = self._adapter
        for reader in (adapter, adapter.enqueuer):
            if reader is not None:
                reader.py_dataset, reader.shuffle = dataset, False

    def discard_batches_read_ahead(self) -> None:
        """Drop what workers read in the pass before, which Keras would yield first in the next."""
        if self._adapter.enqueuer is not None:
            self._adapter.enqueuer.ready_queue.queue.clear()


class FitIterator:
    """The epoch iterator of one `fit`, or TrainError; a pass is one iteration over the data."""

    def __init__(self, iterator: Any) -> None:
        missing = [name for name in _NEEDED if not hasattr(iterator, name)]
        version = tuple(int(part) for part in keras.__version__.split(".")[:2])
        if version < _OLDEST or missing:
            raise TrainError(
                f"expected Keras {_OLDEST[0]}.{_OLDEST[1]} or newer, whose `fit` can be resumed at a "
                f"batch, found {keras.__version__}{f' without {missing[0]}' if missing else ''}."
            )
        self._iterator = iterator
        self.data = FitData(iterator.data_adapter)
        self.has_steps_per_epoch = iterator.steps_per_epoch is not None
        kind: Any = type(iterator)
        # Keras's own methods: the steps of an epoch (first step, last step, batches); the next pass.
        self.enumerate_steps: Callable[[], Iterator[Any]] = partial(
            kind._enumerate_iterator, iterator
        )
        self.make_pass: Callable[[], Any] = partial(kind._get_iterator, iterator)

    @property
    def batches_per_epoch(self) -> int | None:
        return self._iterator.num_batches

    @property
    def batches_per_pass(self) -> int | None:
        """Number of batches of a pass, which Keras may learn at the end of the first."""
        return self._iterator._num_batches

    @batches_per_pass.setter
    def batches_per_pass(self, count: int | None) -> None:
        self._iterator._num_batches = count

    @property
    def is_in_pass(self) -> bool:
        return self._iterator._current_iterator is not None

    def continue_pass(self, batches: Iterator[Any], steps_seen: int) -> None:
        """Let the next epoch continue a pass after `steps_seen` steps."""
        self._iterator._current_iterator = batches
        self._iterator._steps_seen = steps_seen

    def replace_methods(
        self, enumerate_steps: Callable[[], Iterator[Any]], make_pass: Callable[[], Any]
    ) -> None:
        self._iterator._enumerate_iterator = enumerate_steps
        self._iterator._get_iterator = make_pass

    @property
    def tf_pipeline(self) -> Any:
        return self._iterator._distributed_dataset

    @tf_pipeline.setter
    def tf_pipeline(self, dataset: Any) -> None:
        self._iterator._distributed_dataset = dataset

    def frame_test(self) -> Callable[[FrameType | None], bool]:
        """A function that tells whether a frame is inside this `fit`. It keeps nothing alive."""
        weak = ref(self._iterator)

        def is_inside(frame: FrameType | None) -> bool:
            iterator = weak()
            return iterator is not None and (
                _fit_frame(frame, lambda local: local.get("epoch_iterator") is iterator) is not None
            )

        return is_inside


class RunningFit:
    def __init__(self, model: Any, local: dict[str, Any]) -> None:
        if not hasattr(model, "_initial_epoch"):
            raise TrainError(
                f"expected a Keras whose models have `_initial_epoch`, which sets the epoch that a "
                f"resumed `fit` begins with, found {keras.__version__} without it."
            )
        self.model = model
        self.iterator = FitIterator(local["epoch_iterator"])
        self.callbacks = local["callbacks"]
        names = inspect.signature(keras.Model.fit).parameters
        self.arguments = {name: local[name] for name in names if name in local and name != "self"}

    def build_model(self) -> None:
        """Make the variables of a model whose first batch makes them on TensorFlow, or TrainError."""
        # `build` of a subclassed model leaves its layers unbuilt.
        if not self.model.built or self._unbuilt():
            self.build()
        if not self.model.built:
            raise TrainError(
                "BackupAndRestore: expected a model that is built, found one without variables. Give "
                "it a `keras.Input`, or call it on a batch before `fit`."
            )
        self._late = [(each, len(each.variables)) for each in self._unbuilt()]
        self._build_optimizer()  # a step of the user's own may never do so

    def build(self) -> None:
        """Make the variables that TensorFlow makes late, by shapes and dtypes, or TrainError."""
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            batch, problem = self.iterator.data.tf_dataset().element_spec, None
            try:
                self.model._symbolic_build(data_batch=batch)
            except Exception as error:  # noqa: BLE001 (of any layer, or there is no `call`)
                problem = error
            unbuilt = self._unbuilt()
            # The step may call layers that `call` does not; an eager one might keep symbolic tensors.
            if (problem or unbuilt) and not (unbuilt and self.model.run_eagerly):
                with suppress(Exception):
                    tf.function(self.model.train_step, autograph=False).get_concrete_function(batch)
                    problem = None
            if problem and (unbuilt := self._unbuilt()):
                raise _late_layers(unbuilt) from problem
        self._build_optimizer()

    def _unbuilt(self) -> list[Any]:
        return [each for each in self.model._flatten_layers() if not each.built]

    def _build_optimizer(self) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)

    def set_initial_epoch(self, epoch: int | None) -> None:
        self.model._initial_epoch = epoch

    def update_model(self) -> None:
        """Bring the variables of the model up to date, which JAX keeps elsewhere during an epoch; or
        TrainError, if there are some that a new process would not have before its first step."""
        if late := [each for each, count in self._late if len(each.variables) != count]:
            raise _late_layers(late)
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()

    def call_before_validation(self, action: Callable[[], None]) -> None:
        """Call `action` when the validation of an epoch begins, before any callback is called."""
        callbacks = self.callbacks

        def begin(logs: Any = None) -> None:
            action()
            type(callbacks).on_test_begin(callbacks, logs)

        callbacks.on_test_begin = begin

    def restore_callbacks(self) -> None:
        with suppress(AttributeError):
            del self.callbacks.on_test_begin

    def replay_step(self, logs: dict[str, float]) -> tuple[int, int, Any]:
        """A step that changes nothing: `fit` keeps `logs` in a local, and an epoch may have no step."""
        model, callbacks = self.model, self.callbacks
        train_function = model.train_function

        def step(*arguments: Any) -> Any:
            model.train_function = train_function
            return (logs, arguments[0]) if keras.backend.backend() == "jax" else logs

        def end(*_: Any, **named: Any) -> None:  # noqa: ARG001 (as Keras calls it)
            del callbacks.on_train_batch_begin, callbacks.on_train_batch_end

        model.train_function = step
        callbacks.on_train_batch_begin = _nothing
        callbacks.on_train_batch_end = end
        return 0, 0, itertools.repeat(None)


def _late_layers(layers: list[Any]) -> TrainError:
    return TrainError(
        f"BackupAndRestore: expected layers that are built before the first step, found "
        f"{few([repr(each.name) for each in layers])} not built, so that a new process could not "
        f"restore the backup. Build each before `fit`: `layer.build(input_shape)`, or give it a "
        f"`keras.Input`."
    )


def running_fit(model: Any) -> RunningFit:
    """The `fit` of `model` that the caller is called from, or TrainError."""
    frame = _fit_frame(sys._getframe(1), lambda local: local.get("self") is model)
    if frame is None:
        raise TrainError(
            f"expected to be called by the `fit` of Keras, found another loop (Keras "
            f"{keras.__version__}, model {type(model).__name__}). In a loop of your own use "
            f"`perdure.CheckpointManager`."
        )
    return RunningFit(model, frame.f_locals)


def attached_model(callback: Any) -> Any:
    """The model of a callback. `callback.model` would copy the whole state on JAX."""
    return callback._model


def compiled_metrics(model: Any) -> Any:
    return getattr(model, "_compile_metrics", None)


def compiled_with(model: Any) -> dict[str, Any]:
    """What `compile` was given as the loss and the metrics, in the containers of the program."""
    loss, metrics = getattr(model, "_compile_loss", None), compiled_metrics(model)
    return {
        "loss": getattr(loss, "_user_loss", None),
        "metrics": getattr(metrics, "_user_metrics", None),
        "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
    }


def layers_of(model: Any) -> list[Any]:
    """The layers of a model and those inside of them, in Keras's order."""
    return model._flatten_layers(include_self=False)


def seeds_of(model: Any) -> list[Any]:
    """The seeds of a model, and the one from which layers and functions without a seed draw."""
    shared = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seeds = [variable for variable in model.variables if variable.name == SEED]
    return seeds if shared is None else [*seeds, shared.state]


def has_direction(callback: Any) -> bool:
    return isinstance(callback, MonitorCallback) and callback.monitor_op is not None


def set_direction(callback: Any) -> None:
    """Let the callback decide that, once: it changes the sign of `min_delta`; or ValueError."""
    callback._set_monitor_op()


def direction(callback: MonitorCallback) -> Literal["min", "max"] | None:
    if callback.monitor_op is None:
        return None
    return "min" if callback.monitor_op is keras.ops.less else "max"


def is_improvement(callback: MonitorCallback, value: Any) -> bool:
    return bool(callback._is_improvement(value, callback.best))


def torch_device() -> str:
    from keras.src.backend.torch.core import get_device

    return get_device()


def _fit_frame(
    frame: FrameType | None, matches: Callable[[dict[str, Any]], bool]
) -> FrameType | None:
    while frame is not None:
        code = frame.f_code
        is_fit = code.co_name == "fit" and "epoch_iterator" in code.co_varnames
        if is_fit and matches(frame.f_locals):
            return frame
        frame = frame.f_back
    return None


def _nothing(*_: Any, **named: Any) -> None:
    pass
