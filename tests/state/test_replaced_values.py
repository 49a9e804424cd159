"""What a run puts in the place of another value comes back as what it was, or its save is refused."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import MismatchError, UnsupportedLeafError
from perdure.state import snapshot

State = dict[str, Any]
Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    value: Any = None


def forms(value: Any) -> Any:
    """The classes and the bits of a value and of all in it."""
    if isinstance(value, dict):
        return type(value), [(key, forms(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [forms(part) for part in value]
    if dataclasses.is_dataclass(value):
        return type(value), forms(vars(value))
    if hasattr(value, "dtype"):
        return type(value), value.dtype, value.shape, np.asarray(value).tobytes()
    return type(value), value


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 1,
    "text": lambda: "a",
    "bytes": lambda: b"ab",
    "bytearray": lambda: bytearray(b"abc"),
    "list": lambda: [1, bytearray(b"x")],
    "longer list": lambda: [1, 2.5, None],
    "tuple": lambda: (1, 2),
    "dict": lambda: {"a": 1, "b": np.ones(2)},
    "ordered": lambda: collections.OrderedDict(a=1, b=2),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset([1]),
    "deque": lambda: collections.deque([1, np.zeros(1)], maxlen=3),
    "named tuple": lambda: Pair(1, np.ones(2)),
    "dataclass": lambda: Record([1, Pair(2, None)]),
}
MULTI = optax.MultiSteps(optax.adam(0.1), 2)


@pytest.mark.parametrize("first", VALUES)
def test_a_value_takes_the_place_of_any_other(first: str) -> None:
    """Beside others of its type, which are looked at together."""
    for now, make in VALUES.items():

        def fresh() -> State:
            return {name: VALUES[first]() for name in ("before", "x", "after")}

        with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
            state, _ = manager.restore_or_initialize(fresh())
            state["x"] = make()
            manager.save(1, state)
        with CheckpointManager(where, recipe={}) as manager:
            restored, _ = manager.restore_or_initialize(fresh())
        assert forms(restored) == forms(state), now


def train(where: MemoryStorage, stop: int) -> dict[str, bytes]:
    """Makes the state of the optimizer in the first step, and drops it in the fourth."""
    with CheckpointManager(where, recipe={}) as manager:
        state, start = manager.restore_or_initialize({"w": {"w": jnp.ones(3)}, "opt": None})
        for step in range(start, stop):
            opt = MULTI.init(state["w"]) if state["opt"] is None else state["opt"]
            grads = {"w": jnp.sin(state["w"]["w"] * step)}
            changes, opt = MULTI.update(grads, opt, state["w"])
            state = {"w": optax.apply_updates(state["w"], changes), "opt": opt}
            if step == 3:
                state["opt"] = None
            manager.save(step + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_state_of_optax_takes_the_place_of_none(stop: int) -> None:
    whole = train(MemoryStorage(), 7)
    train(where := MemoryStorage(), stop)
    assert train(where, 7) == whole


class Trials:
    """A plain object of the program."""

    def __init__(self) -> None:
        self.scores = trials()


def trials() -> State:
    keys = {"key": jax.random.key(3), "weak": jnp.asarray(2.0), "worst": np.inf}
    return {f"{n}": {"x": jnp.full(3, n / 3), **keys} for n in range(3)}


def search(where: MemoryStorage, stop: int) -> dict[str, bytes]:
    """Drops one of the arrays of JAX in two dicts in the second step, and adds one in the third."""
    with CheckpointManager(where, recipe={}) as manager:
        fresh = {"member": trials(), "owner": Trials()}
        state, start = manager.restore_or_initialize(fresh)
        for step in range(start, stop):
            for scores in (state["member"], state["owner"].scores):
                if step == 1:
                    del scores["1"]
                if step == 2:
                    scores["7"] = {"x": jnp.arange(4)}
                for trial in scores.values():
                    trial["x"] = jnp.sin(trial["x"] * step)
            manager.save(step + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_arrays_of_jax_in_a_dict_come_and_go(stop: int) -> None:
    whole = search(MemoryStorage(), 4)
    search(where := MemoryStorage(), stop)
    assert search(where, 4) == whole


def local_record() -> Any:
    @dataclasses.dataclass
    class Local:
        value: int = 0

    return Local(3)


def local_object() -> Any:
    class Local:
        pass

    return Local()


OBJECTS: dict[str, Callable[[], Any]] = {
    "generator": lambda: np.random.default_rng(3),
    "object": local_object,
    "local": local_record,
    "frozen": lambda: flax.core.freeze({"a": jnp.ones(2)}),
    "masked": lambda: np.ma.masked_array([1, 2], [False, True]),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("first", [None, 0, {}, {"a": 1}, [], [1], (1, 2), set()])
def test_an_object_in_the_place_of_a_value_is_refused(first: Any, name: str) -> None:
    value = OBJECTS[name]()
    places: list[Any] = [value, [value], {"b": value}]
    for place in places[first == {"a": 1} and name == "frozen" :]:
        with CheckpointManager(MemoryStorage(), recipe={}) as manager:
            state, _ = manager.restore_or_initialize({"x": first})
            state["x"] = place
            with pytest.raises(UnsupportedLeafError, match=r"x.*: there was no "):
                manager.save(1, state)


def test_a_wrapper_of_a_value_is_no_other_value() -> None:
    """Negative control: a generator and the dict in it, which has its path, were both there."""
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"x": np.random.default_rng(0), "y": bytearray(2)})
        drawn = state["x"].random()
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"x": np.random.default_rng(0), "y": bytearray(2)})
    assert state["x"].random() != drawn
    assert state["y"] == bytearray(2)


@pytest.mark.parametrize(("now", "is_dict"), [({1, 2}, False), ({"a": 1}, True)])
def test_the_advice_on_dicts_is_for_dicts(now: Any, is_dict: bool) -> None:
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"x": np.ones(2)})
        state["x"] = now
        with pytest.raises(MismatchError) as caught:
            manager.save(1, state)
    assert ("A dict that gains keys" in str(caught.value)) == is_dict
