"""Every leaf is restored with its exact type, or the save refuses it by path."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import math
import pathlib
import struct
import types
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from perdure import Checkpoint, CheckpointManager, load_checkpoint
from perdure.errors import MismatchError, StateError, StepNotFoundError, UnsupportedLeafError
from perdure.state import PositionedIterator, flatten, restore, snapshot, unflatten
from perdure.train import ReduceLROnPlateau

T = TypeVar("T")


def round_trip(make: Callable[[int], Any]) -> tuple[Any, Any]:
    """A saved state, and the restored one, whose target was made in the same way."""
    saved, target = make(1), make(2)
    leaves = snapshot({"state": saved})
    assert {path: bytes(leaf.data) for path, leaf in leaves.items()} != {
        path: bytes(leaf.data) for path, leaf in flatten({"state": target}).items()
    }, "the control: the target differs before"
    return saved, restore({"state": target}, leaves)["state"]


# ---------------------------------------------------------------- dataclasses


@dataclasses.dataclass
class Counted:
    rate: float
    scale: dataclasses.InitVar[int] = 3
    total: Any = dataclasses.field(init=False)
    seen: list[int] = dataclasses.field(default_factory=list)
    default: int = dataclasses.field(default=7, init=False)

    def __post_init__(self, scale: int) -> None:
        self.total = self.rate * scale
        self.beside = [self.rate]

    @functools.cached_property
    def twice(self) -> float:
        return self.rate * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", 100)


@dataclasses.dataclass
class Child(Counted):
    last: int = 0


@dataclasses.dataclass
class Box(Generic[T]):
    value: T


@dataclasses.dataclass
class Needs:
    x: int
    how: dataclasses.InitVar[int]

    def __post_init__(self, how: int) -> None:
        self.x += how


def test_fields_with_init_false_are_saved_and_post_init_does_not_run_again() -> None:
    def make(k: int) -> Counted:
        state = Counted(float(k))
        if k == 1:
            state.total, state.default, state.beside = 50.0, 8, [51.0]
            assert state.twice == 2.0
        else:
            assert state.twice == 4.0
        return state

    saved, restored = round_trip(make)
    assert restored == saved
    assert (restored.total, restored.default, restored.beside) == (50.0, 8, [51.0])
    assert restored.twice == 2.0, "not what the target had computed from its own value"


def test_frozen_slotted_inherited_and_generic_dataclasses_are_restored() -> None:
    def frozen(k: int) -> Frozen:
        state = Frozen(k)
        object.__setattr__(state, "y", 10 * k)
        return state

    def child(k: int) -> Child:
        state = Child(float(k), last=k)
        state.total = 5.0 * k
        return state

    for make in (frozen, child, Box[int], lambda k: Needs(k, how=5)):
        saved, restored = round_trip(make)
        assert restored == saved
        assert type(restored) is type(saved)
    assert restored.x == 6, "an InitVar has no value left to save, and is not asked for again"


def test_an_attribute_that_is_no_field_is_refused_by_path_if_it_has_no_exact_form() -> None:
    state = Counted(1.0)
    state.beside = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedLeafError, match=r"^a/beside: a value of type builtins.object"):
        flatten({"a": state})


@dataclasses.dataclass
class Items(dict):  # type: ignore[type-arg]
    size: int = 0


# ---------------------------------------------------------------- containers and scalars


class Colour(enum.IntEnum):
    RED = 1
    GREEN = 2


class Text(str):
    __slots__ = ()


class Named(NamedTuple):
    a: Any
    b: Any


class Tagged(list):  # type: ignore[type-arg]
    tag = ""


class Defaults(collections.UserDict):  # type: ignore[type-arg]
    pass


class Clever(tuple):
    __slots__ = ()

    def __new__(cls, *parts: Any) -> Clever:
        return super().__new__(cls, parts)


def tagged() -> Tagged:
    value = Tagged([1])
    value.tag = "kept nowhere"
    return value


def record() -> Any:
    return np.zeros(2, [("a", "f4")]).view(np.recarray)


EXACT: dict[str, Callable[[int], Any]] = {
    "int keys": lambda k: {1: k, -3: [k]},
    "set": lambda k: {k, 7},
    "frozenset": lambda k: frozenset([k]),
    "deque": lambda k: collections.deque([k], maxlen=2),
    "OrderedDict": lambda k: collections.OrderedDict(b=k, a=k),
    "defaultdict": lambda k: collections.defaultdict(list, a=[k]),
    "Counter": lambda k: collections.Counter(a=k),
    "MappingProxyType": lambda k: types.MappingProxyType({"a": k}),
    "UserDict": lambda k: Defaults(a=k),
    "namedtuple": lambda k: Named(k, (k, [k])),
    "list subclass": lambda k: Tagged([k]),
    "torch.Size": lambda k: torch.Size([k, 2]),
    "bytearray": lambda k: bytearray([k, 255]),
    "int of 10,000 digits": lambda k: 10**10_000 - k,
    "negative int of 10,000 digits": lambda k: k - 10**10_000,
    "zero-dimensional": lambda k: np.array(k, np.float32),
    "np.float64": np.float64,
    "np.bool_": lambda k: np.bool_(k == 1),
    "float": float,
    "-0j": lambda k: complex(-0.0, -0.0 if k == 1 else 1.0),
    "inf": lambda k: complex(-math.inf, k),
    "range": range,
    "IntEnum": Colour,
    "Fraction": lambda k: fractions.Fraction(k, 3),
    "Decimal": lambda k: decimal.Decimal(f"0.{k}"),
    "datetime": lambda k: dt.datetime(2020, 1, k),
    "Path": lambda k: pathlib.Path(f"{k}"),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "partial": lambda: functools.partial(max, 1),
    "str subclass": lambda: Text("a"),
    "np.str_": lambda: np.str_("a"),
    "np.bytes_": lambda: np.bytes_(b"a"),
    "datetime64": lambda: np.datetime64("2020-01-01"),
    "list with an attribute": tagged,
    "tuple of another constructor": lambda: Clever(1, 2),
    "dataclass that is a dict": lambda: Items(3),
    "np.matrix": lambda: np.zeros((1, 1)).view(np.matrix),
    "np.recarray": record,
    "structured": lambda: np.zeros(2, [("a", "f4")]),
    "structured scalar": lambda: np.zeros(2, [("a", "f4")])[0],
    "np.ma.masked": lambda: np.ma.masked,
}


def same(one: Any, other: Any) -> bool:
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return all(map(same, one, other))
    if isinstance(one, (dict, types.MappingProxyType, collections.UserDict)):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, complex):
        return struct.pack("dd", one.real, one.imag) == struct.pack("dd", other.real, other.imag)
    return bool(one == other)


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT.keys())
def test_a_value_is_restored_with_its_type(make: Callable[[int], Any]) -> None:
    saved, restored = round_trip(make)
    assert same(restored, saved)


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_a_value_that_would_change_its_type_is_refused_by_path(
    make: Callable[[], Any],
) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^outer/inner: "):
        flatten({"outer": {"inner": make()}})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": 1}
    state["again"] = [state]
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        flatten(state)


def test_a_memory_mapped_file_is_refused_by_path(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(3,))
    with pytest.raises(UnsupportedLeafError, match=r"^a: a numpy.memmap would come back as"):
        flatten({"a": mapped})


def test_a_registered_subclass_of_dict_is_flattened_as_registered() -> None:
    class Config(dict):  # type: ignore[type-arg]
        pass

    def make(k: int) -> Config:
        config = Config(a=k)
        config.name = "aux"  # type: ignore[attr-defined]
        return config

    def unflattened(name: str, children: Any) -> Config:
        config = make(children[0])
        config.name = name  # type: ignore[attr-defined]
        return config

    jax.tree_util.register_pytree_node(Config, lambda c: ((c["a"],), vars(c)["name"]), unflattened)
    saved, restored = round_trip(make)
    assert (type(restored), restored, vars(restored)) == (Config, saved, {"name": "aux"})


# ---------------------------------------------------------------- NumPy


def masked(mask: Any, fill: float, hard: bool = False) -> Any:
    return np.ma.MaskedArray(np.arange(3.0) + fill, mask, fill_value=fill, hard_mask=hard)


@pytest.mark.parametrize("target_mask", [np.ma.nomask, [True, True, False]])
@pytest.mark.parametrize("mask", [np.ma.nomask, [False, True, False], [False] * 3])
def test_a_masked_array_keeps_its_mask_and_fill_value(mask: Any, target_mask: Any) -> None:
    saved = masked(mask, 5.0, hard=True)
    restored = restore({"a": masked(target_mask, 9.0)}, snapshot({"a": saved}))["a"]
    assert type(restored) is np.ma.MaskedArray
    assert restored.data.tolist() == saved.data.tolist(), "also below the mask"
    assert (restored.mask is np.ma.nomask) == (saved.mask is np.ma.nomask)
    assert np.ma.getmaskarray(restored).tolist() == np.ma.getmaskarray(saved).tolist()
    assert (restored.fill_value, restored.hardmask) == (5.0, True)
    restored[0] = 1.0  # it is writable, as the saved one was


def test_numpy_keeps_64_bits_and_the_memory_order_of_the_target() -> None:
    def make(k: int) -> Any:
        return {
            "wide": np.array([2**60 + k, 1]),
            "double": np.array([1 / 3 + k]),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3) + k),
        }

    saved, restored = round_trip(make)
    for name in saved:
        assert restored[name].dtype == saved[name].dtype
        assert restored[name].tolist() == saved[name].tolist()
    assert restored["fortran"].flags.f_contiguous


# ---------------------------------------------------------------- JAX


def test_64_bits_are_refused_by_jax_without_x64_and_nothing_is_changed() -> None:
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    for dtype in ("int64", "uint64", "float64", "complex128"):
        leaves = snapshot({"b": torch.ones(2), "a": np.full(2, 1 / 3).astype(dtype)})
        target = {"b": torch.zeros(2), "a": jax.ShapeDtypeStruct((2,), np.dtype(dtype))}
        with pytest.raises(StateError, match=rf"^a: expected {dtype}\[2\].*without x64"):
            restore(target, leaves)
        assert not target["b"].any()
        with pytest.raises(MismatchError, match=rf"a: expected float32\[2\], found {dtype}\[2\]"):
            restore({**target, "a": jnp.zeros(2)}, leaves)


def test_64_bits_are_restored_with_x64_and_into_arrays_of_64_bits() -> None:
    with jax.enable_x64(True):
        saved = {"a": jnp.full(3, 1 / 3), "n": jnp.asarray(2**40), "z": jnp.ones(2) * 1j}
        target = jax.tree.map(lambda x: x * 0, saved)
        abstract = jax.eval_shape(lambda: target)
        inside = restore(abstract, snapshot(saved))
    for restored in (inside, restore(target, snapshot(saved))):
        for name, array in saved.items():
            assert restored[name].dtype == array.dtype
            assert np.asarray(restored[name]).tobytes() == np.asarray(array).tobytes()
            assert restored[name].weak_type == array.weak_type
    assert saved["n"].weak_type, "a case of a weak type of 64 bits"


WEAK = [
    lambda: jnp.asarray(0.1),
    lambda: jnp.asarray(-0.0),
    lambda: jnp.asarray(7),
    lambda: jnp.asarray(1 - 2j),
    lambda: jnp.full((2, 3), 0.3),
    lambda: jnp.full((0, 3), 1),
    lambda: jnp.full(2, 1.0) * float("nan"),
]


@pytest.mark.parametrize("make", WEAK)
@pytest.mark.parametrize("strong_target", [True, False])
def test_the_weak_type_of_the_saved_array_is_restored(make: Any, strong_target: bool) -> None:
    saved = make()
    assert saved.weak_type, "the control"
    like = jnp.zeros(saved.shape, saved.dtype) if strong_target else saved * 0
    assert like.weak_type != strong_target
    restored = restore({"a": like}, snapshot({"a": saved}))["a"]
    assert (restored.weak_type, restored.dtype) == (True, saved.dtype)
    assert np.asarray(restored).tobytes() == np.asarray(saved).tobytes()
    strong = saved.astype(saved.dtype)
    assert not restore({"a": saved}, snapshot({"a": strong}))["a"].weak_type
    assert snapshot({"a": strong})["a"].dtype == saved.dtype.name


def test_a_weak_type_survives_placement_and_is_a_plain_dtype_in_numpy_and_torch() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    like = jax.device_put(jnp.zeros(4), NamedSharding(mesh, PartitionSpec("x")))
    leaves = snapshot({"a": jnp.full(4, 0.1)})
    restored = restore({"a": like}, leaves)["a"]
    assert (restored.weak_type, restored.sharding) == (True, like.sharding)
    for target in (np.zeros(4, np.float32), torch.zeros(4)):
        other = restore({"a": target}, leaves)["a"]
        assert (type(other), str(other.dtype)) == (type(target), str(target.dtype))
        assert other.tolist() == np.full(4, 0.1, np.float32).tolist()
    assert unflatten(leaves)["a"].dtype == np.float32


def test_a_weak_type_of_64_bits_is_not_given_to_a_number_without_x64() -> None:
    with jax.enable_x64(True):
        leaves = snapshot({"n": jnp.asarray(2**40)})
        assert restore({"n": 0}, leaves)["n"].aval == jnp.asarray(0).aval
    with pytest.raises(StateError, match=r"^n: expected int64\[\].*without x64"):
        restore({"n": 0}, leaves)


def test_a_weak_type_is_restored_under_strict_promotion_and_debug_nans() -> None:
    leaves = snapshot({"a": jnp.full(3, 0.1) * float("nan"), "b": jnp.asarray(0.1)})
    with (
        jax.debug_nans(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        restored = restore({"a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": 0.0}, leaves)
    assert restored["a"].weak_type
    assert restored["b"].weak_type
    assert snapshot(restored)["a"].data == leaves["a"].data


def test_a_learning_rate_that_a_hook_lowers_stays_weakly_typed() -> None:
    state = {"rate": jnp.asarray(0.5)}
    trainer: Any = types.SimpleNamespace(state=state)
    ReduceLROnPlateau("rate", factor=0.5).patience_over(trainer)
    assert trainer.state["rate"].aval == state["rate"].aval
    assert float(trainer.state["rate"]) == 0.25


def test_a_loop_with_weakly_typed_numbers_ends_with_the_same_bits(tmp_path: Any) -> None:
    traces = []

    @jax.jit
    def step(state: Any) -> Any:
        traces.append(0)
        w = state["w"] - state["lr"] * state["w"]
        return {"w": w, "lr": state["lr"] * 0.9, "n": state["n"] + 1}

    def fresh() -> Any:
        return {"w": jnp.ones(5, jnp.bfloat16), "lr": jnp.asarray(0.1), "n": 0}

    expected = fresh()
    for _ in range(4):
        expected = step(expected)
    count = len(traces)
    for stop in range(4):
        state = fresh()
        for _ in range(stop):
            state = step(state)
        with CheckpointManager(tmp_path / str(stop)) as manager:
            manager.save(stop, state)
        with CheckpointManager(tmp_path / str(stop)) as manager:
            state, start = manager.restore(like=fresh())
        for _ in range(start, 4):
            state = step(state)
        assert jax.tree.map(lambda a, b: (a.aval == b.aval, a.tobytes() == b.tobytes()),
                            state, expected) == jax.tree.map(lambda _: (True, True), state)  # fmt: skip
    assert len(traces) == count, "a restored state is traced again"
    assert load_checkpoint(tmp_path / "3", leaves="lr")["lr"].dtype == np.float32


def test_an_empty_array_of_typed_keys_is_restored(tmp_path: Any) -> None:
    def make(k: int) -> Any:
        return {
            "none": jax.random.split(jax.random.key(k), 0),
            "rbg": jax.random.split(jax.random.key(k, impl="rbg"), (3, 0)),
            "some": jax.random.split(jax.random.key(k), (2, 3)),
        }

    Checkpoint(**make(1)).save(tmp_path, 5)
    target = Checkpoint(**make(2))
    assert target.restore(tmp_path) == 5
    for name, saved in make(1).items():
        restored = getattr(target, name)
        assert (restored.dtype, restored.shape) == (saved.dtype, saved.shape)
        assert jax.random.key_data(restored).tolist() == jax.random.key_data(saved).tolist()
    plain = load_checkpoint(tmp_path)
    assert plain["some"].shape == (2, 3, 2)
    assert plain["none"].size == plain["rbg"].size == 0


def test_a_key_is_restored_onto_a_mesh_of_one_device() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    words = jax.device_put(jnp.zeros(2, jnp.uint32), NamedSharding(mesh, PartitionSpec(None)))
    like = jax.random.wrap_key_data(words)
    assert len(like.sharding.spec) > like.ndim, "the case: the spec of the words"
    restored = restore({"key": like}, snapshot({"key": jax.random.key(7)}))["key"]
    assert jax.random.key_data(restored).tolist() == [0, 7]
    assert restored.sharding.mesh == mesh


def test_a_donated_array_is_refused_by_path_and_serves_as_a_target() -> None:
    step = jax.jit(lambda state: {"w": state["w"] + 1}, donate_argnums=0)
    state = {"w": jnp.zeros(1000)}
    new = step(state)
    assert state["w"].is_deleted()
    with pytest.raises(StateError, match=r"^model/w: .*donates") as caught:
        flatten({"model": state})
    assert "Save the state that the step returned" in str(caught.value)
    assert restore(state, snapshot(new))["w"].tolist() == [1.0] * 1000


def test_a_dtype_that_changed_since_the_target_is_refused_with_the_remedy() -> None:
    like = {"w": jnp.zeros(3), "n": jnp.int32(0)}
    leaves = snapshot({"w": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(1)})
    with pytest.raises(MismatchError, match=r"w: expected float32\[3\], found bfloat16") as caught:
        restore(like, leaves)
    assert "jax.eval_shape" in str(caught.value)
    drifted = jax.eval_shape(lambda s: {"w": s["w"].astype(jnp.bfloat16), "n": s["n"]}, like)
    assert restore(drifted, leaves)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("number", [3, 0.1, True, 1 - 2j])
def test_the_abstract_value_of_a_number_takes_what_the_number_takes(number: Any) -> None:
    like = jax.eval_shape(lambda: {"n": number, "w": jnp.ones(2)})
    restored = restore(like, snapshot({"n": number, "w": jnp.ones(2)}))["n"]
    assert (type(restored), restored) == (type(number), number)
    array = jnp.asarray(number)  # what it is after the first compiled step
    assert restore(like, snapshot({"n": array, "w": jnp.ones(2)}))["n"].aval == array.aval
    strong = jnp.zeros((), jnp.float32 if isinstance(number, int) else jnp.int32)
    with pytest.raises(MismatchError, match="n: expected"):  # the control: another kind
        restore(like, snapshot({"n": strong, "w": jnp.ones(2)}))
    like["n"] = jax.ShapeDtypeStruct((2,), array.dtype)
    with pytest.raises(MismatchError, match="n: expected"):  # and an array
        restore(like, snapshot({"n": number, "w": jnp.ones(2)}))


# ---------------------------------------------------------------- Equinox


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, k: int) -> None:
        one, two = jax.random.split(jax.random.key(k))
        pair = (
            eqx.nn.Embedding(4, 3, key=one),
            eqx.nn.Linear(3, 4, use_bias=False, key=two),
        )
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def test_tied_weights_of_equinox_are_saved_once_and_stay_tied() -> None:
    assert list(flatten(Tied(1))) == ["shared/pytree/0/weight"]
    saved, restored = round_trip(Tied)
    embedding, linear = restored.shared()
    assert embedding.weight is linear.weight
    assert embedding.weight.tolist() == saved.shared()[0].weight.tolist()
    assert jax.tree.structure(eqx.filter(restored, eqx.is_array)) == jax.tree.structure(
        eqx.filter(saved, eqx.is_array)
    )


def test_keys_of_a_dict_in_a_module_that_share_a_path_are_refused() -> None:
    class Holder(eqx.Module):
        parts: dict[Any, Any]

    with pytest.raises(UnsupportedLeafError, match="several keys that are '1'"):
        flatten({"model": Holder(collections.OrderedDict({1: jnp.zeros(1), "1": jnp.ones(1)}))})


# ---------------------------------------------------------------- positions of iterators


class Iterator:
    def __init__(self, place: Any) -> None:
        self.at = place

    def __next__(self) -> Any:
        raise StopIteration

    def get_state(self) -> Any:
        return self.at

    def set_state(self, place: Any) -> None:
        self.at = place


@pytest.mark.parametrize(
    "place",
    [
        {1: (2, 3)},
        {"1": [2, 3], "nested": {"a": (1, [b"\xff", None]), 2: {}}},
        {(1, b"a"): {True: 1.5, 2.5: ()}},
        {"!listed": [1], "in": {}},
        {"!listed": {}, 1: {"in": "00"}},
        (-0.0, math.inf, 2**80, "größe", True, None, {1, 2}),
        b"grain",
        b"\xff\x00",
        [],
        7,
    ],
)
def test_the_position_of_an_iterator_is_restored_exactly(place: Any) -> None:
    iterator = Iterator(place)
    target = Iterator(None)
    PositionedIterator(target).load(PositionedIterator(iterator).read())
    restored = target.at
    assert restored == place
    assert repr(restored) == repr(place) or isinstance(place, dict)
    assert restore({"it": Iterator(None)}, snapshot({"it": iterator}))["it"].at == place


def test_a_position_without_an_exact_form_is_refused_by_path() -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    for place in (object(), {"a": [object()]}, "\ud800", deep):
        with pytest.raises(StateError, match=r"^data[:/]"):
            flatten({"data": Iterator(place)})


# ---------------------------------------------------------------- a target of NumPy arrays and numbers


def ended(
    directory: Any, init: Callable[[], Any], step: Callable[[Any], Any], stops: set[int]
) -> Any:
    """The state after four steps of a run that is restarted after each step in `stops`."""
    state: Any = None
    for step_number in range(1, 5):
        if state is None or step_number - 1 in stops:
            with CheckpointManager(directory) as manager:
                state, start = manager.restore_or_initialize(init)
                assert start == step_number - 1
                while True:
                    state = step(state)
                    start += 1
                    manager.save(start, state)
                    if start in stops or start == 4:
                        break
    return state


def bits(value: Any) -> bytes:
    return np.asarray(value).tobytes()


def eager_product(state: Any) -> Any:
    rows = np.random.default_rng(0).normal(size=(64, 337)).astype(np.float32)
    residual = rows @ state["w"] - 1  # NumPy adds in another order than XLA
    return {"w": state["w"] - 1e-3 * jnp.asarray(rows).T @ residual}


def eager_rate(state: Any) -> Any:
    rate = 0.05 / (
        1 + 0.037 * state["step"]
    )  # float64 from an int32 of NumPy, float32 from one of JAX
    return {"step": state["step"] + jnp.int32(1), "sum": state["sum"] * 0.9 + rate * jnp.float32(3)}


@pytest.mark.parametrize(
    ("init", "step"),
    [
        (lambda: {"w": np.full(337, 0.1, np.float32)}, eager_product),
        (lambda: {"step": 0, "sum": 0.0}, eager_rate),
    ],
    ids=["array", "numbers"],
)
def test_a_run_that_began_with_numpy_resumes_with_the_arrays_that_it_had(
    tmp_path: Any, init: Callable[[], Any], step: Callable[[Any], Any]
) -> None:
    undisturbed = ended(tmp_path / "undisturbed", init, step, set())
    resumed = ended(tmp_path / "resumed", init, step, {1, 2, 3})
    assert jax.tree.map(type, resumed) == jax.tree.map(type, undisturbed)
    assert jax.tree.map(bits, resumed) == jax.tree.map(bits, undisturbed)
    assert flatten(load_checkpoint(tmp_path / "resumed")).keys() == flatten(init()).keys()


def test_a_program_that_catches_no_checkpoint_resumes_with_the_same_arrays(tmp_path: Any) -> None:
    target = {"w": np.zeros(3, np.float32)}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StepNotFoundError):
            manager.restore(like=target)
        manager.save(1, {"w": jnp.ones(3)})
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore(like=target)
    assert isinstance(state["w"], jax.Array)


def test_a_number_that_became_a_tensor_is_restored_as_a_tensor(tmp_path: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"mean": 0.0})
        manager.save(1, {"mean": torch.tensor(0.1)})
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore_or_initialize({"mean": 0.0})
    assert torch.equal(state["mean"], torch.tensor(0.1))


def test_a_target_of_another_framework_keeps_its_class(tmp_path: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"w": np.zeros(3, np.float32)})
        manager.save(1, {"w": jnp.ones(3)})
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore(like={"w": torch.zeros(3)})
    assert torch.equal(state["w"], torch.ones(3))


def test_a_64_bit_array_of_jax_is_restored_as_numpy_if_jax_would_truncate_it(tmp_path: Any) -> None:
    wide = np.array([0.1, 0.2])
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"w": np.zeros(2)})
        with jax.enable_x64(True):
            manager.save(1, {"w": jnp.asarray(wide)})
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore_or_initialize({"w": np.zeros(2)})
        assert type(state["w"]) is np.ndarray
        assert state["w"].tobytes() == wide.tobytes()
        with jax.enable_x64(True):
            state, _ = manager.restore(like={"w": np.zeros(2)})
            assert isinstance(state["w"], jax.Array)
            assert bits(state["w"]) == wide.tobytes()


def test_a_host_copy_of_the_state_does_not_replace_the_arrays_of_the_target(tmp_path: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"w": jnp.zeros(3)})
        manager.save(1, jax.device_get({"w": jnp.ones(3)}))
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore_or_initialize({"w": jnp.zeros(3)})
    assert isinstance(state["w"], jax.Array)


def test_a_dtype_of_ml_dtypes_is_not_confused_with_the_numpy_dtype_of_its_letter() -> None:
    value = np.arange(-4, 5).astype(
        ml_dtypes.float8_e4m3b11fnuz
    )  # its letter is "L", as that of uint64
    leaves = snapshot({"a": value})
    assert leaves["a"].dtype == "float8_e4m3b11fnuz"
    assert restore({"a": value[::-1]}, leaves)["a"].tobytes() == value.tobytes()


class Tables(eqx.Module):
    tables: dict[str, Any]


@pytest.mark.parametrize("container", [dict, collections.OrderedDict, Tables])
def test_a_dict_key_that_is_not_valid_unicode_is_refused_by_path(container: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^outer.*: .*'\\ud800'.*not valid Unicode"):
        snapshot({"outer": container({"\ud800": 1, "é": 2})})


def test_a_target_that_contains_itself_is_refused(tmp_path: Any) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        restore(loop, snapshot([1]))
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UnsupportedLeafError, match="contains itself"),
    ):
        manager.restore_or_initialize(loop)
