"""The kinds of data that `fit` takes: what is known of their order, and which cannot be put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import keras
import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from perdure.data.sources import ArraySource
from perdure.errors import PerdureError, TrainError


class Steering:
    """What decides the order of a pass over the data. Here: the data themselves."""

    def start(self, drop: int) -> int:
        """A pass begins that goes on behind `drop` batches; gives how many are still to be dropped."""
        return drop


class ByIndex(Steering):
    """Stands in for a `PyDataset`: draws the order where Keras would, and asks for no batch twice."""

    def __init__(self, adapter: PyDatasetAdapter) -> None:
        self._dataset = adapter.py_dataset
        self._shuffle = adapter.shuffle
        self._enqueuer = adapter.enqueuer
        self._order: list[int] | None = None
        self._drop = 0
        adapter.py_dataset, adapter.shuffle = self, False
        if adapter.enqueuer is not None:
            adapter.enqueuer.py_dataset, adapter.enqueuer.shuffle = self, False

    def start(self, drop: int) -> int:
        self._drop, self._order = drop, None
        if self._enqueuer is not None:
            # Keras hands out first what its workers read ahead in the pass before.
            self._enqueuer.ready_queue.queue.clear()
        if self._shuffle and (count := self._dataset.num_batches) is not None:
            self._order = list(range(count))
            random.shuffle(self._order)
        return 0

    @property
    def num_batches(self) -> int | None:
        count = self._dataset.num_batches
        return None if count is None else max(0, count - self._drop)

    def __getitem__(self, index: int) -> Any:
        index += self._drop
        return self._dataset[index if self._order is None else self._order[index]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a pickled one is asked before it has its members
            raise AttributeError(name)
        return getattr(self._dataset, name)


class TensorFlowOrder(Steering):
    """Shuffled arrays on TensorFlow, in an order that NumPy's generator draws.

    `tf.random.shuffle`, which Keras uses there, keeps its state inside a compiled pipeline, where
    nothing can read it. The pipeline is otherwise the one of Keras.
    """

    def __init__(self, iterator: Any) -> None:
        import tensorflow as tf

        own, tf.random.shuffle = tf.random.shuffle, self._shuffled
        try:
            iterator._distributed_dataset = iterator.data_adapter.get_tf_dataset()
        finally:
            tf.random.shuffle = own
        self._generator = np.random.default_rng(0)

    def start(self, drop: int) -> int:
        # Here, and not in the pipeline, which has threads of its own.
        words = np.random.randint(0, 2**32, 4, np.uint64)  # noqa: NPY002 (restored with the rest)
        self._generator = np.random.default_rng(words)
        return drop

    def _shuffled(self, indices: Any, *given: Any, **named: Any) -> Any:
        import tensorflow as tf

        drawn = tf.numpy_function(
            lambda rows: self._generator.permutation(rows), [indices], "int64"
        )
        return tf.ensure_shape(drawn, indices.shape)


def steer(iterator: Any) -> Steering:
    """How the order of the data of an epoch iterator is decided from here on."""
    adapter = iterator.data_adapter
    if isinstance(adapter, PyDatasetAdapter):
        return ByIndex(adapter)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not isinstance(iterator._distributed_dataset, tf.data.Dataset):
            raise TrainError(
                "expected `fit` on the default strategy of TensorFlow, found a tf.distribute strategy, "
                "whose data cannot be brought back to a batch. Use the JAX backend, or the strategies "
                "of perdure."
            )
        if isinstance(adapter, ArrayDataAdapter) and adapter._shuffle:
            return TensorFlowOrder(iterator)
    return Steering()


def loader_generators(adapter: Any) -> list[Any]:
    """The random generators that a torch DataLoader has for itself."""
    if not isinstance(adapter, TorchDataLoaderAdapter):
        return []
    loader = adapter.get_torch_dataloader()
    holders = [
        loader,
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", 0),
    ]
    found = {id(each): each for holder in holders if (each := getattr(holder, "generator", None))}
    return list(found.values())


def reshuffled(adapter: Any) -> Any:
    """The tf.data.Dataset of an adapter whose order depends on how often it was iterated, or None."""
    if not isinstance(adapter, TFDatasetAdapter):
        return None
    dataset = adapter.get_tf_dataset()
    return dataset if any("Shuffle" in type(each).__name__ for each in _nodes(dataset)) else None


def doubts(adapter: Any) -> str | None:
    """Why the data cannot be put back for sure, and what to do; None where they can."""
    if isinstance(adapter, GeneratorDataAdapter):
        return (
            "the data are a generator, which nobody can put back: a resumed run reads it from its "
            "start, so its first process must be gone, and the generator must give the same batches "
            "again. Use arrays, a PyDataset, a tf.data.Dataset or a DataLoader."
        )
    if isinstance(adapter, PyDatasetAdapter):
        kind = type(adapter.py_dataset)
        own = [n for n in ("on_epoch_begin", "on_epoch_end") if getattr(kind, n) is not _plain(n)]
        if own and not is_stateful(adapter.py_dataset):
            return (
                f"the data are a {kind.__name__} with `{own[0]}`: what it changes there is not in the "
                f"backup. Give it `state_dict` and `load_state_dict`, or make a batch a function of "
                f"its index."
            )
    if isinstance(adapter, TFDatasetAdapter):
        for node in _nodes(adapter.get_tf_dataset()):
            seeds = [getattr(node, name, None) for name in ("_seed", "_seed2")]
            if "Shuffle" in type(node).__name__ and all(_is_zero(seed) for seed in seeds):
                return (
                    "the data are a tf.data.Dataset that shuffles without a seed: a resumed run gets "
                    "another order. Name one: `dataset.shuffle(n, seed=0)`, or call "
                    "`keras.utils.set_random_seed(0)` before."
                )
        if adapter.get_tf_dataset().options().deterministic is False:
            return (
                "the data are a tf.data.Dataset with `deterministic=False`: a resumed run gets "
                "another order."
            )
    if isinstance(adapter, TorchDataLoaderAdapter):
        import torch.utils.data as data

        loader = adapter.get_torch_dataloader()
        sampler = getattr(loader, "sampler", None)
        known = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler)
        known += (data.WeightedRandomSampler,)
        if not isinstance(loader.dataset, data.IterableDataset) and type(sampler) not in known:
            return (
                f"the data are a DataLoader with a {type(sampler).__name__}: its order is put back "
                f"only if it draws from torch's, NumPy's or Python's own generator."
            )
    return None


def is_stateful(value: Any) -> bool:
    """Whether a dataset says itself where it is."""
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def describe(adapter: Any) -> dict[str, Any]:
    """What tells these data from others."""
    found: dict[str, Any] = {"kind": type(adapter).__name__, "batches": str(adapter.num_batches)}
    if isinstance(adapter, ArrayDataAdapter):
        arrays = [each for each in tree.flatten(adapter._inputs) if each is not None]
        found["examples"] = adapter._num_samples
        found["batch_size"] = adapter._batch_size
        for number, each in enumerate(arrays):
            found[f"{number}.shape"] = str(tuple(each.shape[1:]))
        with suppress(PerdureError, TypeError, ValueError):  # sparse: told apart by shape only
            found["content"] = ArraySource(tuple(np.asarray(each) for each in arrays)).fingerprint()
    return found


def _plain(name: str) -> Any:
    return getattr(keras.utils.PyDataset, name)


def _nodes(dataset: Any) -> Iterator[Any]:
    yield dataset
    for each in dataset._inputs():
        yield from _nodes(each)


def _is_zero(seed: Any) -> bool:
    return seed is not None and int(seed) == 0
