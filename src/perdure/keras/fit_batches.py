"""How `fit` comes to its batches: where it is in the data, and how it gets back there.

The position is the state of the random generators at the begin of a pass over the data, and the
number of batches taken since. Going back makes the pass again and drops what was trained on. A pass
begins twice: when it is made, and when its first batch is asked for. Keras may validate in between, and
both draw from the generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras

from perdure.errors import DataError
from perdure.keras import fit_inputs, randomness
from perdure.keras.fit_internals import RunningFit

# A shuffled tf.data.Dataset counts its iterators, and draws another order for each.
_iterators_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class FitBatches:
    """Follows the epoch iterator of one call of `fit`, or brings it back to a position."""

    def __init__(self, fit: RunningFit) -> None:
        self._iterator = fit.iterator
        self._class = type(fit.iterator)
        self._tensorflow = keras.backend.backend() == "tensorflow"
        self._generators = fit_inputs.loader_generators(fit.iterator.data_adapter)
        self._reshuffled = fit_inputs.reshuffled(fit.iterator.data_adapter)
        self._steering = fit_inputs.steer(fit.iterator)
        self._back: dict[str, Any] | None = None
        self._ready: Callable[[], Any] = lambda: None
        # The pass that the epoch begins with: how it was made and begun, and what is to be dropped.
        self._first: tuple[dict[str, Any], dict[str, Any] | None, int] | None = None
        self._begin: dict[str, Any] = {}
        self._started: dict[str, Any] | None = None
        self._behind: dict[str, Any] | None = None  # the position behind the last batch, where kept
        self._made = self._taken = self._drop = 0
        self.executions = self.batch = 0  # of this epoch
        fit.iterator._enumerate_iterator = self._enumerate
        fit.iterator._get_iterator = self._pass

    def position(self) -> dict[str, Any]:
        """Where the data are, as plain values: behind the last batch, until the epoch has ended."""
        if self._behind is not None:
            return self._behind
        random = self.random()
        # With `steps_per_epoch` an epoch goes on in the pass of the one before it.
        carried = self._carries and self._iterator._current_iterator is not None
        inside = carried or self.executions > 0
        return {
            "executions": self.executions,
            "batch": self.batch,
            "inside": inside,
            "made": self._made,
            "taken": self._taken if inside else 0,
            "begin": self._begin if inside else random,
            "started": self._started if inside else None,
            "random": random,
            "batches": self._iterator._num_batches,
        }

    def random(self) -> dict[str, Any]:
        """The state of the random generators now."""
        return randomness.state(self._generators)

    def keep(self) -> None:
        """Remember the position: this batch may be the last one of its epoch, and a resume repeats
        what comes behind it, with whatever is drawn there."""
        if self._behind is None:
            self._behind = self.position()

    def go_back(self, position: dict[str, Any], ready: Callable[[], Any]) -> None:
        """The next epoch begins at `position`; `ready` is called before its first batch, and gives
        what the loop is to see before it, or None."""
        self._back, self._ready = position, ready
        self.executions, self.batch = position["executions"], position["batch"]
        self._made, self._taken = position["made"], position["taken"]
        self._begin = position["begin"]
        randomness.restore(position["random"], self._generators)
        if self._iterator._num_batches is None:
            self._iterator._num_batches = position["batches"]

    def next_epoch(self) -> None:
        """An epoch has ended."""
        self.executions = self.batch = 0
        self._behind = None

    def executed(self, end_step: int) -> int:
        """One execution has ended with step `end_step` of its epoch; gives how many steps it had."""
        known = self._iterator.num_batches
        batch = end_step + 1 if known is None else min(end_step + 1, known)
        steps = batch - self.batch
        self.batch, self.executions = batch, self.executions + 1
        self._taken += steps
        self._behind = None
        return steps

    @property
    def at_end(self) -> bool | None:
        """Whether the epoch has no batch left; None where that is not known."""
        known = self._iterator.num_batches
        return None if known is None else self.batch >= known

    @property
    def unknown(self) -> bool:
        """Whether nobody knows how many batches a pass has, until one is missing."""
        return self._iterator.data_adapter.num_batches is None

    @property
    def _carries(self) -> bool:
        return self._iterator.steps_per_epoch is not None

    def _enumerate(self) -> Iterator[Any]:
        """In place of the epoch iterator's own."""
        iterator = self._iterator
        steps = self._class._enumerate_iterator(iterator)
        back, self._back = self._back, None
        drawn: dict[str, Any] = {}
        played = started = None
        if back is not None:
            # Between epochs, callbacks have begun this one as they would have without the interruption,
            # and what they drew counts. Inside one they have begun it a second time.
            drawn = back["random"] if back["executions"] else self.random()
            played = self._ready()
            if back["inside"]:
                started = back.get("started")  # older backups have none
                randomness.restore(back["begin"], self._generators)
            self._made = back["made"] - back["inside"]  # the pass that it is in is made again
            self._drop = back["taken"]
            self._count_up()
        if back is not None or not (self._carries and iterator._current_iterator is not None):
            # Before Keras makes the pass: a PyDataset with workers begins to read earlier.
            begin = self.random()
            self._first = (begin, started, self._steering.start(self._drop))
        if back is not None and self._carries and back["inside"]:
            iterator._current_iterator = iter(self._pass())
            iterator._steps_seen = back["taken"] - back["batch"]
        if back is not None and back["inside"]:
            for _ in range(back["executions"]):
                next(steps, None)
            randomness.restore(drawn, self._generators)
        if played is not None:  # when all is back: the loop may ask for nothing more in this epoch
            yield played
        yield from steps

    def _pass(self) -> Any:
        """In place of the epoch iterator's own: what the next batches come from."""
        first, self._first = self._first, None
        if first is None:
            self.keep()  # the epoch has ended, and this pass is made again behind its last batch
            if not self._carries:
                return self._unused()
            first = self.random(), None, self._steering.start(0)
        self._begin, self._started, drop = first
        self._taken, self._drop = self._drop, 0
        self._made += 1
        if self._reshuffled is not None:
            _iterators_of[self._reshuffled] = self._made
        source = self._class._get_iterator(self._iterator)
        if self._tensorflow:
            return source.skip(drop) if drop else source
        source = iter(source)
        if self._started is not None:
            randomness.restore(self._started, self._generators)
        elif not drop:
            return self._noting(source)
        for number in range(drop):
            try:
                next(source)
            except StopIteration:
                raise DataError(
                    f"the data have shrunk: expected to go on behind batch {drop} of the pass, found "
                    f"{number} batches."
                ) from None
        return source

    def _noting(self, source: Iterator[Any]) -> Iterator[Any]:
        """`source`; its order may be drawn only now, as its first batch is asked for."""
        self._started = self.random()
        yield from source

    def _unused(self) -> Any:
        """Keras makes a pass at the end of an epoch, and does not use it."""
        if not self._tensorflow:
            return self._class._get_iterator(self._iterator)
        if self._reshuffled is None:
            return ()
        self._made += 1  # which another order follows from
        _iterators_of[self._reshuffled] = self._made
        return self._iterator._distributed_dataset

    def _count_up(self) -> None:
        """Bring the iterators that a shuffled dataset counts to their number of then."""
        if self._reshuffled is None:
            return
        made = _iterators_of.get(self._reshuffled, 0)
        if made > self._made:
            warnings.warn(
                "the data are a tf.data.Dataset with another order for each epoch, and this process "
                "has iterated it before, so its order cannot be put back. Resume in a new process.",
                stacklevel=2,
            )
        for _ in range(made, self._made):
            iter(self._reshuffled)
