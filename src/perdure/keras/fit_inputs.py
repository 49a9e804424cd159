"""The kinds of data that `fit` takes: who decides their order, and which cannot be resumed exactly."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import keras
import numpy as np

from perdure.data.sources import ArraySource
from perdure.errors import PerdureError, TrainError
from perdure.keras import packing
from perdure.keras.fit_internals import (
    FitData,
    FitIterator,
    tf_dataset_nodes,
    tf_seeds,
    tf_shuffles,
)


class DataOrder:
    """Decides the order of a pass over the data. This class leaves it to the data."""

    def begin_pass(self, skip: int) -> int:
        """A pass begins that resumes after `skip` batches; returns how many the reader must drop."""
        return skip

    def dataset_state(self) -> Any:
        """What the dataset returns as its state, as a plain value; None if it has no state."""
        return None

    def restore_dataset(self, state: Any, *, in_epoch: bool) -> None:
        """Restore what `dataset_state` returned, before the epoch begins that it was called in."""


class PyDatasetOrder(DataOrder):
    """Replaces a `PyDataset`: draws the order when Keras would, and reads no finished batch again."""

    def __init__(self, data: FitData) -> None:
        self._data = data
        self._dataset = data.py_dataset
        self._shuffle = data.shuffles
        self._order: list[int] | None = None
        self._skip = 0
        self._has_begun_epoch = False
        data.replace_py_dataset(self)

    def begin_pass(self, skip: int) -> int:
        self._skip, self._order = skip, None
        self._data.discard_batches_read_ahead()
        if self._shuffle and (count := self._dataset.num_batches) is not None:
            self._order = list(range(count))
            random.shuffle(self._order)
        return 0

    def dataset_state(self) -> Any:
        if not is_stateful(self._dataset):
            return None
        return packing.copy_plain(
            self._dataset.state_dict(), f"{type(self._dataset).__name__}.state_dict()"
        )

    def restore_dataset(self, state: Any, *, in_epoch: bool) -> None:
        if is_stateful(self._dataset) and state is not None:
            self._dataset.load_state_dict(state)
            self._has_begun_epoch = in_epoch

    def on_epoch_begin(self) -> None:
        """The dataset has begun the epoch already if its state is one from inside of it."""
        if not self._has_begun_epoch:
            self._dataset.on_epoch_begin()
        self._has_begun_epoch = False

    @property
    def num_batches(self) -> int | None:
        count = self._dataset.num_batches
        return None if count is None else max(0, count - self._skip)

    def __getitem__(self, index: int) -> Any:
        index += self._skip
        return self._dataset[index if self._order is None else self._order[index]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # unpickling asks for these before there are members
            raise AttributeError(name)
        return getattr(self._dataset, name)


class TensorFlowShuffle(DataOrder):
    """Shuffles arrays on TensorFlow in an order that NumPy's generator draws.

    `tf.random.shuffle`, which Keras uses, keeps its state inside a compiled pipeline, where nothing can
    read it. The rest of the pipeline is Keras's.
    """

    def __init__(self, iterator: FitIterator) -> None:
        import tensorflow as tf

        original, tf.random.shuffle = tf.random.shuffle, self._shuffled
        try:
            iterator.tf_pipeline = iterator.data.tf_dataset()
        finally:
            tf.random.shuffle = original
        self._generator = np.random.default_rng(0)

    def begin_pass(self, skip: int) -> int:
        # Here, because the pipeline has threads of its own.
        words = np.random.randint(0, 2**32, 4, np.uint64)  # noqa: NPY002 (the generator is restored)
        self._generator = np.random.default_rng(words)
        return skip

    def _shuffled(self, indices: Any, *_: Any, **named: Any) -> Any:
        import tensorflow as tf

        drawn = tf.numpy_function(
            lambda rows: self._generator.permutation(rows), [indices], "int64"
        )
        return tf.ensure_shape(drawn, indices.shape)


def control_order(iterator: FitIterator) -> DataOrder:
    """Take control of the order of the data where that is needed to resume in the middle of a pass."""
    data = iterator.data
    if data.kind == "PyDataset":
        return PyDatasetOrder(data)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not isinstance(iterator.tf_pipeline, tf.data.Dataset):
            raise TrainError(
                "expected `fit` on the default strategy of TensorFlow, found a tf.distribute strategy, "
                "whose data cannot be resumed at a batch. Use the JAX backend, or the strategies of "
                "perdure."
            )
        if data.kind == "arrays" and data.shuffles:
            return TensorFlowShuffle(iterator)
    return DataOrder()


def loader_generators(data: FitData) -> list[Any]:
    """The random generators that belong to a torch DataLoader."""
    if data.kind != "DataLoader":
        return []
    loader = data.torch_loader()
    owners = [loader, loader.sampler, loader.batch_sampler]
    owners.append(getattr(loader.batch_sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(generator): generator for generator in generators if generator}.values())


def reshuffling_dataset(data: FitData) -> Any:
    """The tf.data.Dataset whose order depends on how often it was iterated, or None."""
    if data.kind != "tf.data":
        return None
    dataset = data.tf_dataset()
    return dataset if any(map(tf_shuffles, tf_dataset_nodes(dataset))) else None


def position_warning(data: FitData) -> str | None:
    """Why the position in the data may not be restored exactly, and what to do; None if it is."""
    if data.kind == "generator":
        return (
            "the data are a generator, whose position cannot be restored: a resumed run reads it from "
            "its start, so it needs a new process and a generator that yields the same batches again. "
            "Use arrays, a PyDataset, a tf.data.Dataset or a DataLoader."
        )
    if data.kind == "PyDataset":
        return _py_dataset_warning(data.py_dataset)
    if data.kind == "tf.data":
        return _tf_dataset_warning(data.tf_dataset())
    if data.kind == "DataLoader":
        return _loader_warning(data.torch_loader())
    return None


def is_stateful(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def describe(data: FitData) -> dict[str, Any]:
    """Fields of the recipe that distinguish these data from others."""
    fields: dict[str, Any] = {"kind": data.adapter_name, "batches": str(data.num_batches)}
    if data.kind == "arrays":
        arrays, fields["examples"], fields["batch_size"] = data.arrays()
        for number, array in enumerate(arrays):
            fields[f"{number}.shape"] = str(tuple(array.shape[1:]))
        with suppress(PerdureError, TypeError, ValueError):  # sparse arrays have only their shape
            fields["content"] = ArraySource(
                tuple(np.asarray(array) for array in arrays)
            ).fingerprint()
    return fields


def _py_dataset_warning(dataset: Any) -> str | None:
    kind, base = type(dataset), keras.utils.PyDataset
    methods = ("on_epoch_begin", "on_epoch_end")
    overridden = [name for name in methods if getattr(kind, name) is not getattr(base, name)]
    if not overridden or is_stateful(dataset):
        return None
    return (
        f"the data are a {kind.__name__} with `{overridden[0]}`: what that changes is not in the "
        f"backup. Give it `state_dict` and `load_state_dict`, or make a batch a function of its index."
    )


def _tf_dataset_warning(dataset: Any) -> str | None:
    for node in filter(tf_shuffles, tf_dataset_nodes(dataset)):
        if all(seed is not None and int(seed) == 0 for seed in tf_seeds(node)):
            return (
                "the data are a tf.data.Dataset that shuffles without a seed: a resumed run gets "
                "another order. Pass one: `dataset.shuffle(n, seed=0)`, or call "
                "`keras.utils.set_random_seed(0)` before."
            )
    if dataset.options().deterministic is False:
        return (
            "the data are a tf.data.Dataset with `deterministic=False`: a resumed run gets another "
            "order."
        )
    return None


def _loader_warning(loader: Any) -> str | None:
    import torch.utils.data as data

    sampler = getattr(loader, "sampler", None)
    known = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler)
    known += (data.WeightedRandomSampler,)
    if isinstance(loader.dataset, data.IterableDataset) or type(sampler) in known:
        return None
    return (
        f"the data are a DataLoader with a {type(sampler).__name__}: its order is restored only if it "
        f"draws from the generators of torch, NumPy or Python."
    )
