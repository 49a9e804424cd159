"""Input pipelines of other libraries, whose `batch(n)` sets a batch size and returns no batch.

They are refused, but for a `tf.data` pipeline over arrays: a dataset by index, read from its arrays and
the arguments of `shuffle`, `batch` and `repeat`.
"""

from __future__ import annotations

import re
from typing import Any

from perdure.data.dataset import ArrayDataset
from perdure.data.permutation import fold
from perdure.data.sources import is_grain
from perdure.errors import DataError

_FORM = "tf.data.Dataset.from_tensor_slices(arrays).shuffle(n, seed=0).batch(size).repeat(epochs)"
_KNOWN = re.compile(r"TensorSlice( Cache)?( Shuffle)? (Parallel)?Batch( Repeat)?")
_NEUTRAL = ("Prefetch", "Options")  # they change no batch
_NO_GRAPH_SEED = 87654321  # in place of that of `tf.random.set_seed`, if only `shuffle` has a seed


def gives_batch_of_step(data: Any) -> bool:
    return callable(getattr(data, "batch", None)) and not is_pipeline(data)


def is_pipeline(data: Any) -> bool:
    """Whether `data` is an input pipeline of tf.data, Grain, Hugging Face datasets or the like."""
    return callable(getattr(data, "batch", None)) and callable(getattr(data, "map", None))


def refuse_pipeline(data: Any) -> None:
    if not is_pipeline(data):
        return
    if is_grain(data, "MapDataset") or is_grain(data, "IterDataset"):
        advice = (
            "perdure.data.Dataset(map_dataset, batch_size=128), without Grain's batch() and repeat(); "
            "a Trainer without a strategy takes batches"
        )
    elif callable(getattr(data, "__getitem__", None)):
        advice = "perdure.data.Dataset(data, batch_size=128), which reads it by index"
    else:
        advice = (
            "arrays in perdure.ArrayDataset, shards in perdure.data.StreamDataset, a function of the "
            "step, or a tf.data pipeline that has an index (docs/DATA.md); `fit` of Keras takes it"
        )
    raise DataError(
        f"expected a dataset with the batch of every step, found a pipeline of type "
        f"{type(data).__module__}.{type(data).__qualname__}, whose batch(n) sets a batch size. Give "
        f"{advice}."
    )


def by_index(data: Any) -> Any:
    """The dataset by index of a `tf.data` pipeline, or DataError; other data as they are."""
    if not type(data).__module__.startswith("tensorflow.python.data."):
        return data
    nodes: dict[str, Any] = {}
    kinds: list[str] = []
    todo = [data]
    while todo:
        node = todo.pop()
        kind = re.sub(r"^_|(V\d)?Dataset(V\d)?$", "", type(node).__name__)
        if kind not in _NEUTRAL:
            kinds.insert(0, kind)
            nodes[kind.removeprefix("Parallel")] = node
        todo += node._inputs()
    if not _KNOWN.fullmatch(found := " ".join(kinds)):
        raise DataError(
            f"expected a tf.data pipeline of the form {_FORM}, whose batches have an index, found "
            f"{found}. Put the rest into the step or into `augment` of a perdure.ArrayDataset."
        )
    batch, shuffle, repeat = nodes["Batch"], nodes.get("Shuffle"), nodes.get("Repeat")
    seed = 0
    if shuffle is not None:
        graph, own = (int(value) for value in (shuffle._seed, shuffle._seed2))
        if not (graph or own) or not shuffle._reshuffle_each_iteration:
            raise DataError(
                "tf.data: expected `shuffle(n, seed=...)`, found a shuffle without a seed, or with "
                "reshuffle_each_iteration=False."
            )
        seed = own if graph == _NO_GRAPH_SEED else fold((graph, own)) >> 1
    made = ArrayDataset(
        _arrays(nodes["TensorSlice"]),
        int(batch._batch_size),
        seed=seed,
        shuffle=shuffle is not None,
        drop_remainder=bool(batch._drop_remainder),
    )
    count = 1 if repeat is None else int(repeat._count)
    made.epochs = None if count < 0 else count
    return made


def _arrays(source: Any) -> Any:
    """The arrays, in the structure that the program gave them; TensorFlow sorts the names of a dict."""
    structure, arrays = source._structure, [tensor.numpy() for tensor in source._tensors]
    parts = [*structure.values()] if isinstance(structure, dict) else structure
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    if len(parts) != len(arrays) or any(isinstance(part, (dict, list, tuple)) for part in parts):
        raise DataError(
            "tf.data: expected an array, a tuple or a dict of arrays in `from_tensor_slices`, found "
            "nested ones. Take them apart: {'image': ..., 'label': ...}."
        )
    if isinstance(structure, dict):
        return dict(zip(sorted(structure), arrays, strict=True))
    return tuple(arrays) if isinstance(structure, (list, tuple)) else arrays[0]
