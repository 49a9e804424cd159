"""What a `tf.data` pipeline keeps and draws: its shuffles, and the functions that it maps.

TensorFlow starts the draws of a seeded shuffle and of a seeded random operation anew with each
iterator, so that reading again returns the same batches. A variable that a function assigns, such as
the seed of a Keras layer or a `tf.random.Generator`, goes on from iterator to iterator: its value at
the start of a pass is a part of the position. What Python draws in a function is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_CHANGES = ("Assign", "Rng", "Stateful")
"""How the names of operations begin that change a variable."""


def nodes(dataset: Any) -> Iterator[Any]:
    """The datasets of a pipeline, the last one first."""
    yield dataset
    for source in dataset._inputs():
        yield from nodes(source)


def shuffles(dataset: Any) -> list[Any]:
    """The nodes of a pipeline that shuffle."""
    return [node for node in nodes(dataset) if _is(node, "Shuffle")]


def reordering(dataset: Any) -> list[Any]:
    """The shuffles that each iterator counts. What lies behind a cache is iterated once."""
    if _is(dataset, "Cache"):
        return []
    found = [dataset] if _is(dataset, "Shuffle") else []
    return found + [node for source in dataset._inputs() for node in reordering(source)]


def variables(dataset: Any) -> list[Any]:
    """The variables that functions of a pipeline may change, each one once, in the order in which the
    functions use them first."""
    found = {}
    for graph in _graphs(dataset):
        if any(node.op.startswith(_CHANGES) for node in _operations(graph)):
            # TensorFlow keeps the variables of a graph in the order of their addresses in memory.
            by_handle = {id(variable.handle): variable for variable in graph.variables}
            handles = [id(value) for value in graph.external_captures if id(value) in by_handle]
            found |= {id(by_handle[each]): by_handle[each] for each in handles}
    return list(found.values())


def capture(held: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [np.array(variable.numpy()) for variable in held]


def restore(held: list[Any], saved: list[Any]) -> None:
    for variable, value in zip(held, saved, strict=True):
        variable.assign(value)


def warning(dataset: Any, validation: Any, others: list[Any]) -> str | None:
    """Why a pipeline may return other batches when it is read again, and what to do; None if not.
    `others` are the seeds of all else."""
    import tensorflow as tf

    for node in shuffles(dataset):
        seeds = getattr(node, "_seed", None), getattr(node, "_seed2", None)
        if all(seed is not None and int(seed) == 0 for seed in seeds):
            return (
                "the data are a tf.data.Dataset that shuffles without a seed: a resumed run gets "
                "another order. Pass one: `dataset.shuffle(n, seed=0)`."
            )
    if reordering(dataset) and any(_is(n, "Cache") and shuffles(n) for n in nodes(dataset)):
        return (
            "the data are a tf.data.Dataset with a shuffle before and one after its cache: a resumed "
            "run gets another order. Shuffle after the cache only."
        )
    if isinstance(validation, tf.data.Dataset):
        mine = {id(node) for node in shuffles(dataset) if _reshuffles(node)}
        if any(id(node) in mine for node in shuffles(validation)):
            return (
                "the data and the validation data are parts of one shuffled tf.data.Dataset, whose "
                "order each of them changes: a resumed run gets another one, and examples move between "
                "the two. Divide it first, or shuffle with `reshuffle_each_iteration=False`."
            )
    if dataset.options().deterministic is False:
        return (
            "the data are a tf.data.Dataset with `deterministic=False`: a resumed run gets "
            "another order."
        )
    if not {id(seed.value) for seed in others}.isdisjoint(map(id, variables(dataset))):
        return (
            "the data are a tf.data.Dataset that draws from a seed from which the model draws, too: a "
            "resumed run draws other numbers. Give the pipeline layers of its own, and a "
            "`keras.random.SeedGenerator` to each function of `keras.random`."
        )
    for node in (each for graph in _graphs(dataset) for each in _operations(graph)):
        if node.op in _PYTHON:
            return (
                "the data are a tf.data.Dataset that calls Python (`from_generator`, `py_function`, "
                "`numpy_function`): a resumed run calls it again from the first batch of the pass, and "
                "gets the same batches only if it draws no random numbers and changes nothing."
            )
        if "seed2" in node.attr and node.attr["seed"].i == node.attr["seed2"].i == 0:
            return (
                f"the data are a tf.data.Dataset that draws without a seed ({node.op}): a resumed run "
                f"draws other numbers. Call `keras.utils.set_random_seed` before it is made."
            )
    return None


def _is(node: Any, kind: str) -> bool:
    return kind in type(node).__name__


def _reshuffles(node: Any) -> bool:
    return getattr(node, "_reshuffle_each_iteration", True) is not False


def _graphs(dataset: Any) -> Iterator[Any]:
    """The graphs of the functions that a pipeline calls."""
    for node in nodes(dataset):
        for function in node._functions():
            yield function.function.graph


def _operations(graph: Any) -> Iterator[Any]:
    """The operations of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def
