"""Every kind of state is restored with the same bits; paths are stable; differences are listed."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from perdure.errors import MismatchError, UnsupportedLeafError
from perdure.state import flatten, restore, snapshot, unflatten
from perdure.store import Leaf


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Train:
    step: int
    params: Any


def bits(leaves: dict[str, Leaf]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in leaves.items()}


def plain(k: int) -> Any:
    return {
        "step": k,
        "big": 10**40 + k,
        "loss": [0.1 + k, math.inf, -0.0, 5e-324, 1e308],
        "name": f"größe {k}",
        "raw": bytes([k, 255]),
        "flag": k == 1,
        "nothing": None,
        "z": complex(k, -0.0),
        "train": Train(k, Pair(np.full((2, 3), k, np.float32), (k, [k]))),
        "ordered": OrderedDict(b=k, a=np.int8(k)),
        7: {"a/b%c": k},
    }


def arrays(k: int) -> Any:
    names = ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64"]
    extra = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"]
    return {
        **{name: np.full((3, 2), k, name) for name in names},
        **{name: np.full(5, k, getattr(ml_dtypes, name)) for name in extra},
        "empty": np.zeros((0, 4), np.float32),
        "point": np.array(k, np.float32),
        "scalar": np.float64(k),
        "big_endian": np.full(3, k, ">f8"),
        "big_endian_scalar": np.array(k, ">f8"),
        "strided": np.arange(20 + k, dtype=np.int32)[k::3][:5],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3) + k),
        "generator": np.random.default_rng(k),
    }


def jax_state(k: int) -> Any:
    params = {"w": jnp.full((3, 4), k, jnp.float32), "b": jnp.full(4, k, jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "key": jax.random.key(k),
        "keys": jax.random.split(jax.random.key(k), (2, 3)),
        "raw_key": jax.random.PRNGKey(k),
        "f8": jnp.full(3, k, jnp.float8_e4m3fn),
        "point": jnp.float32(k),
    }


class Net(nnx.Module):
    def __init__(self, k: int) -> None:
        rngs = nnx.Rngs(k)
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def nnx_state(k: int) -> Any:
    module = Net(k)
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    return {"model": module, "optimizer": optimizer, "state": nnx.state(Net(k))}


def torch_state(k: int) -> Any:
    torch.manual_seed(k)
    model = torch.nn.Sequential(
        OrderedDict(
            conv=torch.nn.Conv2d(1, 2, 3), norm=torch.nn.BatchNorm2d(2), out=torch.nn.PReLU()
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(k):
        model(torch.randn(2, 1, 5, 5)).sum().backward()
        optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "generator": torch.Generator().manual_seed(k),
        "bf16": torch.full((3,), k, dtype=torch.bfloat16),
        "f8": torch.full((3,), float(k)).to(torch.float8_e5m2),
        "transposed": torch.arange(6.0).reshape(2, 3).T + k,
        "none": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("make", [plain, arrays, jax_state, nnx_state, torch_state])
def test_every_kind_of_state_is_restored_with_the_same_bits(make: Any) -> None:
    saved = snapshot(make(1))
    target = make(2)
    assert bits(flatten(target)) != bits(saved), "the control: the target differs before"
    restored = restore(target, saved)
    assert bits(flatten(restored)) == bits(saved)
    assert type(restored) is type(target)


@pytest.mark.parametrize("make", [plain, arrays, jax_state, nnx_state, torch_state])
def test_a_snapshot_does_not_see_later_changes(make: Any) -> None:
    state = make(1)
    saved = snapshot(state)
    before = bits(saved)
    restore(state, snapshot(make(2)))
    for array in [
        v for v in (state.values() if isinstance(state, dict) else []) if isinstance(v, np.ndarray)
    ]:
        array[...] = 0
    assert bits(saved) == before


def test_paths_are_readable_and_stable() -> None:
    state = {
        "model": torch_state(1)["model"],
        "jax": jax_state(1)["opt"],
        "nnx": Net(1),
        "p": plain(1),
    }
    paths = set(flatten(state))
    assert {
        "model/conv/weight",
        "model/norm/num_batches_tracked",
        "jax/0/mu/w",
        "nnx/layers/0/kernel",
        "nnx/dropout/rngs/key",
        "p/train/params/second/1/0",
        "p/7/a%2Fb%25c",
    } <= paths


def test_containers_and_types_of_the_target_are_kept() -> None:
    restored = restore(plain(2), snapshot(plain(1)))
    assert isinstance(restored["train"], Train)
    assert isinstance(restored["train"].params, Pair)
    assert isinstance(restored["ordered"], OrderedDict)
    assert math.copysign(1, restored["loss"][2]) == -1
    states = restore(jax_state(2), snapshot(jax_state(1)))
    assert type(states["opt"][0]).__name__ == "ScaleByAdamState"
    assert states["key"].dtype == jax.random.key(0).dtype
    modules = torch_state(2)
    assert restore(modules, snapshot(torch_state(1)))["model"] is modules["model"]


def test_a_fresh_optimizer_takes_the_state_of_one_that_stepped() -> None:
    stepped, fresh = torch_state(2), torch_state(0)
    assert bits(flatten(restore(fresh, snapshot(stepped)))) == bits(flatten(stepped))
    restore(stepped, snapshot(torch_state(0)))
    assert not stepped["optimizer"].state_dict()["state"]


def test_a_restored_array_is_placed_on_the_devices_of_the_target() -> None:
    devices = jax.devices()
    like = {"w": jax.device_put(jnp.zeros(4), devices[-1])}
    restored = restore(like, snapshot({"w": jnp.arange(4.0)}))
    assert restored["w"].sharding == like["w"].sharding
    abstract = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
    assert isinstance(restore(abstract, snapshot({"w": jnp.arange(4.0)}))["w"], jax.Array)


def test_every_difference_is_listed_by_leaf_path_and_nothing_is_changed() -> None:
    saved = snapshot({"model": torch.nn.Linear(3, 4), "a": {"x": 1, "gone": 2}, "k": jnp.zeros(3)})
    model = torch.nn.Linear(3, 5)
    before = bits(flatten(model))
    target = {"model": model, "a": {"x": 1.0, "new": 0}, "k": jnp.zeros(3, jnp.int32)}
    with pytest.raises(MismatchError) as caught:
        restore(target, saved)
    assert bits(flatten(model)) == before
    text = str(caught.value)
    assert "differ in 5 leaves; nothing was changed" in text
    for line in (
        "a/gone: the checkpoint has int, the target no such leaf",
        "a/new: expected int, the checkpoint has no such leaf",
        "k: expected int32[3], found float32[3]",
        "model/bias: expected float32[5], found float32[4]",
        "model/weight: expected float32[5,3], found float32[4,3]",
    ):
        assert line in text


def test_a_python_number_in_the_target_accepts_the_array_of_a_compiled_step() -> None:
    saved = snapshot({"step": jnp.int32(7), "lr": jnp.bfloat16(0.5), "on": jnp.bool_(True)})
    restored = restore({"step": 0, "lr": 0.0, "on": False}, saved)
    assert bits(flatten(restored)) == bits(saved)
    for wrong in ({"step": jnp.float32(7)}, {"step": jnp.ones(1, jnp.int32)}):
        with pytest.raises(MismatchError, match="step: expected int, found"):
            restore({"step": 0}, snapshot(wrong))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    smaller = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(
        MismatchError,
        match=r"opt/param_groups: expected groups of \[1\] parameters, the checkpoint .*\[5\]",
    ):
        restore({"opt": smaller}, snapshot({"opt": torch_state(1)["optimizer"]}))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "a value of type builtins.object has no exact form"),
        (np.array(["a"]), "dtype <U1 has no exact form"),
        (np.array([object()]), "dtype object has no exact form"),
        (np.zeros(2, np.longdouble), "has no exact form"),
        (MappingProxyType({("a", 1): 2}), r"a mapping has the key \('a', 1\)"),
        (MappingProxyType({"": 2}), "a mapping has the key ''"),
        ({torch.zeros(2, 3): 2}, "a dict whose keys are tensors"),
        (MappingProxyType({1: 2, "1": 3}), "several keys that are '1'"),
        ("\ud800", "is not valid Unicode"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "an abstract array has no data"),
        (torch.zeros(2, device="meta"), "meta device has no data"),
        (torch.zeros(2, 2).to_sparse(), "expected a dense one"),
    ],
)
def test_a_value_without_an_exact_form_is_refused_by_path(value: Any, why: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=why) as caught:
        flatten({"outer": {"inner": value}})
    assert "outer/inner" in str(caught.value)


def test_a_traced_value_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="w: a traced value; save outside of jit"):
        jax.jit(lambda w: flatten({"w": w}) and w)(1.0)


def test_without_a_template_a_state_is_nested_dicts() -> None:
    tree = unflatten(
        snapshot({"a": {"b": jnp.arange(3)}, "c/d": [1, "x"], "key": jax.random.key(3)})
    )
    assert tree["a"]["b"].tolist() == [0, 1, 2]
    assert tree["c/d"] == {"0": 1, "1": "x"}
    assert tree["key"].tolist() == [0, 3]
    assert unflatten(snapshot(5)) == 5


def test_saving_a_donated_array_keeps_the_bits_of_that_moment() -> None:
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    w = jnp.zeros(100_000)
    kept = []
    for _ in range(50):
        kept.append(snapshot({"w": w}))
        w = step(w)
    w.block_until_ready()
    for number, leaves in enumerate(kept):
        assert bytes(leaves["w"].data) == np.full(100_000, number, np.float32).tobytes()


def test_small_arrays_are_copied_once_with_the_bits_of_the_moment() -> None:
    source = np.random.default_rng(5)
    fresh = source.integers(0, 256, 4096, np.uint8)
    arrays = {
        "most": fresh[:1024].copy(),
        "more": fresh[:1025].copy(),
        "columns": fresh[:1024].copy().reshape(32, 32).T,
        "strided": fresh[::8],
        "swapped": fresh[:64].copy().view(">f4"),
        "described": np.zeros(4, np.dtype(np.float32, metadata={"unit": "m"})),
        "read_only": np.frombuffer(bytes(64), np.int64),
        "empty": np.zeros((0, 3)),
    }
    values = {path: array.copy() for path, array in arrays.items()}
    flat = flatten(arrays)
    kept = snapshot(arrays)
    assert [path for path, leaf in flat.items() if not leaf.frozen] == ["more"]
    for path in ("most", "columns", "strided"):  # a second pass over them would cost as much again
        assert type(flat[path].data) is type(kept[path].data) is bytes
    for array in arrays.values():
        if array.flags.writeable:
            array[...] = 1
    for path, leaf in kept.items():
        assert leaf.shape == values[path].shape
        assert leaf.dtype == values[path].dtype.newbyteorder("=").name
        little = values[path].astype(values[path].dtype.newbyteorder("<"))
        assert bytes(leaf.data) == little.tobytes(), path
    assert bytes(flat["more"].data) == b"\1" * 1025, "the control: larger ones are shared"
