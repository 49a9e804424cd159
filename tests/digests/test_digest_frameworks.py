"""The same digest from NumPy, JAX and PyTorch: on the host, in compiled programs, on other devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from golden_states import array, arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import run_forked
from perdure.digests import digest, jax_arrays, leaf_digests, torch_arrays
from perdure.digests.memory_sums import byte_sums
from perdure.errors import StateError
from perdure.state import snapshot

SHARED = ("bool", "uint8", "int16", "int32", "float16", "bfloat16", "float32", "complex64")


def torch_tensor(values: np.ndarray) -> torch.Tensor:
    """A tensor with the bits of an array, from its bytes."""
    dtype = getattr(torch, values.dtype.name)
    if not values.size:
        return torch.empty(values.shape, dtype=dtype)
    octets = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
    return octets.view(dtype).reshape(values.shape)


@st.composite
def some_arrays(draw: st.DrawFn) -> np.ndarray:
    name = draw(st.sampled_from(SHARED))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (data & 1 if name == "bool" else data).view(dtype).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(some_arrays())
def test_equal_bits_have_equal_digests_in_all_three(values: np.ndarray) -> None:
    expected = digest({"w": values})
    assert digest({"w": jnp.asarray(values)}) == expected
    tensor = torch_tensor(values)
    assert digest({"w": tensor}) == expected
    place = tuple((0, size) for size in values.shape)
    sums = torch_arrays.tensor_sums(tensor, place, values.shape)
    octets = np.frombuffer(values.tobytes(), np.uint8)
    assert np.array_equal(sums.numpy().view(np.uint64), byte_sums(octets)), "as on other devices"


def test_a_compiled_program_and_other_devices_compute_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = arrays(wide=False)
    expected = leaf_digests(plain)
    state = {name: jnp.asarray(values) for name, values in plain.items()}
    words = jax.jit(lambda state: jax.tree.map(jax_arrays.words_in_place, state))(state)
    for name, values in plain.items():
        sums = byte_sums(np.frombuffer(values.tobytes(), np.uint8))
        assert np.array_equal(np.asarray(words[name]).view(np.uint64), sums), name
    # Each is a program of its own there; those above have the arithmetic of every dtype and shape.
    for name in state.keys() - {"bool", "float4", "float16", "rows", "empty"}:
        del state[name], expected[name]
    received = []
    monkeypatch.setattr(jax_arrays, "_is_in_memory", lambda _: False)
    monkeypatch.setattr(jax_arrays, "_is_on_cpu", lambda place: received.append(place) is not None)
    assert leaf_digests(state) == expected
    assert len(received) == len(state)


def test_arrays_of_64_bits_need_no_setting() -> None:
    plain = {"a": array(np.float64, (5, 7)), "b": array(np.complex128, (3,))}
    with jax.enable_x64(True):
        state = jax.tree.map(jnp.asarray, plain)
    assert state["a"].dtype == np.float64
    assert digest(state) == digest(plain)


def test_typed_keys_and_weak_types() -> None:
    state = {"key": jax.random.split(jax.random.key(3), 5), "weak": jnp.asarray(2.0)}
    digests = leaf_digests(state)
    words = np.asarray(jax.random.key_data(state["key"]))
    assert leaf_digests({"key": words})["key"] != digests["key"]
    assert leaf_digests({"weak": np.float32(2.0)})["weak"] != digests["weak"]


def test_a_digest_is_not_taken_of_what_has_no_bits() -> None:
    deleted = jnp.arange(3.0)
    deleted.delete()
    cases: dict[str, Any] = {
        "deleted": lambda: digest({"w": deleted}),
        "abstract": lambda: digest({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}),
        "traced": lambda: jax.jit(lambda x: digest({"w": x}) and x)(jnp.zeros(3)),
        "meta device": lambda: digest({"w": torch.zeros(3, device="meta")}),
        "sparse": lambda: digest({"w": torch.zeros(3, 3).to_sparse()}),
    }
    for name, call in cases.items():
        with pytest.raises(StateError) as refused:
            call()
        assert str(refused.value).startswith("w: "), name


def test_tensors_of_every_layout_and_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch_tensor(array(np.float32, (400, 1001)))
    state: dict[str, Any] = {
        name: torch_tensor(values)
        for name, values in arrays().items()
        if values.dtype.name in {*SHARED, "float64", "int64", "complex128", "float8_e4m3fn"}
    }
    state |= {
        "transposed": matrix.T,
        "expanded": torch.ones(3, 1).expand(3, 4),
        "conjugated": torch_tensor(array(np.complex64, (3, 5))).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3, 4)),
        "shifted": torch_tensor(array(np.uint8, (10_001,)))[3:],
    }
    expected = leaf_digests(state)
    plain = {"transposed": matrix.T.numpy(), "parameter": np.ones((3, 4), np.float32)}
    assert leaf_digests(plain) == {name: expected[name] for name in sorted(plain)}
    monkeypatch.setattr(torch_arrays, "_is_in_memory", lambda _: False)
    assert leaf_digests(state) == expected


def test_a_model_with_its_optimizer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = leaf_digests(state)
    assert list(before) == sorted(snapshot(state))
    optimizer.step()
    changed = {path for path, value in leaf_digests(state).items() if before[path] != value}
    assert {"model/weight", "optimizer/state/0/exp_avg"} <= changed
    assert "step" not in changed


def test_every_sharding_has_the_same_digest_and_no_leaf_is_gathered() -> None:
    program = Path(__file__).with_name("digest_mesh_worker.py")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    [(status, out, err)] = run_forked("jax", program, [[]], [environment])
    assert status == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert len(answer["equal"]) == 11
    assert all(answer["equal"].values()), answer
    assert answer["control"] == "gathered"


def test_every_process_of_a_mesh_has_the_digest_of_the_whole_tensors(tmp_path: Path) -> None:
    program = Path(__file__).with_name("digest_dtensor_worker.py")
    arguments = [[str(tmp_path / "store"), str(rank), "4"] for rank in range(4)]
    ended = run_forked("torch", program, arguments, [dict(os.environ)] * 4)
    for status, out, err in ended:
        assert status == 0, err
        answer = json.loads(out[out.index("{") :].splitlines()[0])
        assert answer == {"line": True, "grid": True, "control": True, "partial": "w: "}
