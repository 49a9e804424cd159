"""Input pipelines of other libraries, whose `batch(n)` sets a batch size instead of returning a batch.

tf.data, Grain and Hugging Face datasets have a method with the same name as the datasets here. They are
recognized by their method `map`.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from perdure.errors import DataError


def gives_batch_of_step(data: Any) -> bool:
    """Whether `data.batch(step)` returns the batch of a step."""
    return callable(getattr(data, "batch", None)) and not is_pipeline(data)


def is_pipeline(data: Any) -> bool:
    """Whether `data` is an input pipeline of tf.data, Grain, Hugging Face datasets or the like."""
    return callable(getattr(data, "batch", None)) and callable(getattr(data, "map", None))


def is_grain(data: Any, kind: Literal["MapDataset", "IterDataset"]) -> bool:
    """Whether `data` is a Grain dataset of the class `kind`. Does not import Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(data, getattr(grain, kind))


def refuse_pipeline(data: Any) -> None:
    """Raises `DataError` if `data` is a pipeline."""
    if is_pipeline(data):
        raise pipeline_error(data)


def pipeline_error(data: Any) -> DataError:
    """The error for a pipeline in place of a dataset, with advice for its library."""
    name = f"{type(data).__module__}.{type(data).__qualname__}"
    if is_grain(data, "MapDataset"):
        advice = (
            "Give the examples instead, without Grain's batch() and repeat(): "
            "perdure.data.Dataset(map_dataset, batch_size=128)."
        )
    elif is_grain(data, "IterDataset"):
        advice = (
            "Use the grain.MapDataset that it was made from: perdure.data.Dataset(map_dataset, "
            "batch_size=128). A Trainer without a strategy takes the IterDataset itself."
        )
    elif callable(getattr(data, "__getitem__", None)):
        advice = "It is read by index, so wrap it: perdure.data.Dataset(data, batch_size=128)."
    else:
        advice = (
            "It can only be read from its start (strategy.distribute_dataset and a Trainer take a "
            "tf.data pipeline that has an index: docs/DATA.md). Read its examples into arrays for "
            "perdure.ArrayDataset, read shards of it through perdure.data.StreamDataset, or pass a "
            "function of the step. (`fit` of Keras takes it, with perdure.keras.BackupAndRestore.)"
        )
    return DataError(
        f"expected a dataset with the batch of every step, found a pipeline of type {name}, whose "
        f"batch(n) sets a batch size. {advice}"
    )
