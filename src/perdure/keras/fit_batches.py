"""How `fit` gets its batches: the position in the data, and how to return to it.

The position is the state of the random generators when a pass over the data was begun, and the number
of batches taken since. To return, the pass is begun again, and the batches that were trained on are
dropped. A pass begins twice: when it is made, and when its first batch is read. Keras may validate in
between, and both draw from the generators.

`FitBatches.position` is stored with the checkpoint, so its keys are a format and stay:

| key | value |
|---|---|
| `executions`, `batch` | executions of this epoch that have ended, and the batches in them |
| `inside` | whether a pass is under way; between passes `taken` is 0 and `started` None |
| `made` | passes that were made so far, the current one included |
| `taken` | batches taken from the current pass |
| `begin` | the generators when the current pass was made; between passes the present ones |
| `started` | the generators at its first batch; None if they were not recorded then |
| `random` | the generators now |
| `batches` | batches of a whole pass; None if that is not known |
| `dataset` | what `state_dict` of a `PyDataset` returned; None if it has none |
| `variables` | variables that functions of a `tf.data` pipeline change, at the same time as `begin` |
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from perdure.data.sources import ArraySource
from perdure.errors import DataError, PerdureError, TrainError
from perdure.keras import fit_internals, tf_pipeline
from perdure.keras.callback_state import copy_plain, is_stateful
from perdure.state import process_random
from perdure.state.program_code import held_generators

# A shuffled tf.data.Dataset counts its iterators, and draws another order for each.
_iterator_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


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

    def __init__(self, data: fit_internals.FitData) -> None:
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
        return copy_plain(
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
    """Shuffles arrays on TensorFlow by NumPy: nothing can read the state of `tf.random.shuffle`."""

    def __init__(self, iterator: fit_internals.FitIterator) -> None:
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


def control_order(iterator: fit_internals.FitIterator) -> DataOrder:
    """Take control of the order of the data where that is needed to resume in the middle of a pass."""
    data = iterator.data
    if data.kind == "PyDataset":
        return PyDatasetOrder(data)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not isinstance(iterator.tf_pipeline, tf.data.Dataset):
            raise TrainError(
                "expected `fit` on the default strategy of TensorFlow, found a tf.distribute strategy, "
                "whose data cannot be resumed at a batch. Use the strategies of perdure."
            )
        if data.kind == "arrays" and data.shuffles:
            return TensorFlowShuffle(iterator)
    return DataOrder()


class FitBatches:
    """Follows one `fit`: `executions` of this epoch have ended, with `batch` batches."""

    def __init__(self, iterator: fit_internals.FitIterator) -> None:
        self._iterator = iterator
        self._tensorflow = keras.backend.backend() == "tensorflow"
        self._generators = loader_generators(iterator.data)
        dataset = iterator.data.tf_dataset() if iterator.data.kind == "tf.data" else None
        # Its order depends on how often it was iterated.
        changes = dataset is not None and bool(tf_pipeline.reordering(dataset))
        self._reshuffling = dataset if changes else None
        self._variables = [] if dataset is None else tf_pipeline.variables(dataset)
        self._variables_when_made = tf_pipeline.capture(self._variables)
        self._order = control_order(iterator)
        self._resume_position: dict[str, Any] | None = None
        self._before_first_batch: Callable[[], Any] = lambda: None
        # The pass that the epoch begins with: the generators when it is made and at its first batch
        # (None: not recorded), and the batches to drop.
        self._next_pass: tuple[dict[str, Any], dict[str, Any] | None, int] | None = None
        self._random_when_made: dict[str, Any] = {}
        self._random_when_started: dict[str, Any] | None = None
        self._kept_position: dict[str, Any] | None = None
        self._passes = self._taken = self._skip = 0
        self.executions = self.batch = 0
        iterator.replace_methods(self._enumerate_steps, self._make_pass)

    def position(self) -> dict[str, Any]:
        if self._kept_position is not None:
            return self._kept_position
        random = self.random()
        # With `steps_per_epoch` an epoch continues the pass of the epoch before.
        in_pass = self.executions > 0 or (
            self._iterator.has_steps_per_epoch and self._iterator.is_in_pass
        )
        return {
            "executions": self.executions,
            "batch": self.batch,
            "inside": in_pass,
            "made": self._passes,
            "taken": self._taken if in_pass else 0,
            "begin": self._random_when_made if in_pass else random,
            "started": self._random_when_started if in_pass else None,
            "random": random,
            "batches": self._iterator.batches_per_pass,
            "dataset": self._order.dataset_state(),
            "variables": self._variables_when_made
            if in_pass
            else tf_pipeline.capture(self._variables),
        }

    def random(self) -> dict[str, Any]:
        return random_state(self._generators)

    def keep_position(self) -> None:
        """Keep this position for the next save. This may be the last batch of its epoch, and a resume
        repeats what follows it, with whatever that draws."""
        if self._kept_position is None:
            self._kept_position = self.position()

    def restore(self, position: dict[str, Any], before_first_batch: Callable[[], Any]) -> None:
        """Begin the next epoch at `position`; `before_first_batch` may return a step to run first."""
        self._resume_position, self._before_first_batch = position, before_first_batch
        self.executions, self.batch = position["executions"], position["batch"]
        self._passes, self._taken = position["made"], position["taken"]
        self._random_when_made = position["begin"]
        restore_random(position["random"], self._generators)
        tf_pipeline.restore(self._variables, position["variables"])
        self._order.restore_dataset(position["dataset"], in_epoch=position["executions"] > 0)
        if self._iterator.batches_per_pass is None:
            self._iterator.batches_per_pass = position["batches"]

    def next_epoch(self) -> None:
        self.executions = self.batch = 0
        self._kept_position = None

    def count_execution(self, end_step: int) -> int:
        """An execution has ended with step `end_step` of its epoch; returns its number of steps."""
        known = self._iterator.batches_per_epoch
        batch = end_step + 1 if known is None else min(end_step + 1, known)
        steps = batch - self.batch
        self.batch, self.executions = batch, self.executions + 1
        self._taken += steps
        self._kept_position = None
        return steps

    @property
    def at_end(self) -> bool | None:
        """Whether the epoch has no batch left; None if that is not known."""
        known = self._iterator.batches_per_epoch
        return None if known is None else self.batch >= known

    @property
    def length_is_unknown(self) -> bool:
        return self._iterator.data.num_batches is None

    def _enumerate_steps(self) -> Iterator[Any]:
        iterator = self._iterator
        steps = iterator.enumerate_steps()
        position, self._resume_position = self._resume_position, None
        drawn: dict[str, Any] = {}
        replayed = started = None
        if position is not None:
            # Between epochs, callbacks have begun this epoch as without the interruption, and what they
            # drew counts. Inside an epoch they have begun it for the second time.
            drawn = position["random"] if position["executions"] else self.random()
            replayed = self._before_first_batch()
            if position["inside"]:
                started = position["started"]
                restore_random(position["begin"], self._generators)
            self._passes = position["made"] - position["inside"]  # the current pass is made again
            self._skip = position["taken"]
            self._restore_iterator_count()
        continues_pass = iterator.has_steps_per_epoch and iterator.is_in_pass
        if position is not None or not continues_pass:
            # Before Keras makes the pass: workers of a PyDataset begin to read earlier.
            random = self.random()
            self._next_pass = random, started, self._order.begin_pass(self._skip)
        if position is not None and position["inside"]:
            if iterator.has_steps_per_epoch:
                batches = iter(self._make_pass())
                iterator.continue_pass(batches, position["taken"] - position["batch"])
            for _ in range(position["executions"]):
                next(steps, None)
            restore_random(drawn, self._generators)
        if replayed is not None:  # last, because the loop may read nothing more in this epoch
            yield replayed
        yield from steps

    def _make_pass(self) -> Any:
        next_pass, self._next_pass = self._next_pass, None
        if next_pass is None:
            self.keep_position()  # the epoch has ended; a resume makes this pass again
            if not self._iterator.has_steps_per_epoch:
                return self._make_unused_pass()
            next_pass = self.random(), None, self._order.begin_pass(0)
        self._random_when_made, self._random_when_started, drop = next_pass
        self._taken, self._skip = self._skip, 0
        self._count_iterator()
        self._variables_when_made = tf_pipeline.capture(self._variables)
        source = self._iterator.make_pass()
        if self._tensorflow:
            return source.skip(drop) if drop else source
        source = iter(source)
        if self._random_when_started is not None:
            restore_random(self._random_when_started, self._generators)
        elif not drop:
            return self._recording_start(source)
        for number in range(drop):
            try:
                next(source)
            except StopIteration:
                raise DataError(
                    f"the data have shrunk: expected to resume after batch {drop} of the pass, found "
                    f"{number} batches."
                ) from None
        return source

    def _recording_start(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yields from `source`, whose order may be drawn only when its first batch is read."""
        self._random_when_started = self.random()
        yield from source

    def _make_unused_pass(self) -> Any:
        """Keras makes a pass at the end of an epoch, and does not use it."""
        if not self._tensorflow:
            return self._iterator.make_pass()
        if self._reshuffling is None:
            return ()
        self._count_iterator()
        return self._iterator.tf_pipeline

    def _count_iterator(self) -> None:
        self._passes += 1
        if self._reshuffling is not None:
            _iterator_counts[self._reshuffling] = self._passes

    def _restore_iterator_count(self) -> None:
        """Iterate a shuffled dataset as often as it had been then."""
        if self._reshuffling is None:
            return
        count = _iterator_counts.get(self._reshuffling, 0)
        if count > self._passes:
            warnings.warn(
                "the data are a tf.data.Dataset with another order for each epoch, and this process "
                "has iterated it before, so its order cannot be restored. Resume in a new process.",
                stacklevel=2,
            )
        for _ in range(count, self._passes):
            iter(self._reshuffling)


def random_state(generators: Sequence[Any] = ()) -> dict[str, Any]:
    """The generators of the process and of a DataLoader, from which the order is drawn."""
    shared = process_random.capture()
    return {
        "shared": {name: np.frombuffer(data, np.uint8) for name, data in shared.items()},
        "generators": [generator.get_state().numpy().copy() for generator in generators],
    }


def restore_random(saved: dict[str, Any], generators: Sequence[Any] = ()) -> None:
    for name, data in saved["shared"].items():
        process_random.restore_generator(name, bytes(data))
    if generators:
        torch = sys.modules["torch"]
        for generator, words in zip(generators, saved["generators"], strict=True):
            generator.set_state(torch.from_numpy(words.copy()))


def loader_generators(data: fit_internals.FitData) -> list[Any]:
    """The random generators that belong to a torch DataLoader."""
    if data.kind != "DataLoader":
        return []
    loader = data.torch_loader()
    owners = [loader, loader.sampler, loader.batch_sampler]
    owners.append(getattr(loader.batch_sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(generator): generator for generator in generators if generator}.values())


def position_warning(data: fit_internals.FitData, validation: Any, model: Any) -> str | None:
    """Why the position in the data may not be restored exactly, and what to do; None if it is."""
    if data.kind == "generator":
        return (
            "the data are a generator, whose position cannot be restored: a resumed run reads it from "
            "its start. Use arrays, a PyDataset, a tf.data.Dataset or a DataLoader."
        )
    if data.kind == "PyDataset" and not is_stateful(data.py_dataset):
        kind, base = type(data.py_dataset), keras.utils.PyDataset
        if any(True for _ in held_generators(data.py_dataset, (keras.random.SeedGenerator,))):
            return (
                f"the data are a {kind.__name__} that holds a random generator (or a layer with one), "
                f"which is not in the backup. Give it `state_dict` and `load_state_dict`, or draw "
                f"from the index."
            )
        for name in ("on_epoch_begin", "on_epoch_end"):
            if getattr(kind, name) is not getattr(base, name):
                return (
                    f"the data are a {kind.__name__} with `{name}`: what that changes is not in the "
                    f"backup. Give it `state_dict` and `load_state_dict`."
                )
    if data.kind == "tf.data":
        return tf_pipeline.warning(data.tf_dataset(), validation, fit_internals.seeds_of(model))
    if data.kind == "DataLoader":
        from torch.utils import data as torch_data

        loader = data.torch_loader()
        sampler = getattr(loader, "sampler", None)
        known = (torch_data.SequentialSampler, torch_data.RandomSampler)
        known += (torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
        is_iterable = isinstance(loader.dataset, torch_data.IterableDataset)
        if not is_iterable and type(sampler) not in known:
            return (
                f"the data are a DataLoader with a {type(sampler).__name__}: its order is restored "
                f"only if it draws from the generators of torch, NumPy or Python."
            )
    return None


def describe(data: fit_internals.FitData) -> dict[str, Any]:
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
