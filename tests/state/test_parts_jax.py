"""Restores of parts on JAX: abstract targets, optax states as a whole or not at all, NNX, Equinox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from perdure import CheckpointManager
from perdure.errors import MismatchError

TX = optax.chain(optax.clip(1.0), optax.adam(1e-3))


def params(k: float, out: int = 2) -> Any:
    return {
        "enc": {"w": jnp.full((4, 3), k, jnp.float32), "b": jnp.full((4,), k, jnp.float32)},
        "head": {"w": jnp.full((3, out), k, jnp.float32)},
    }


def make(k: int, out: int = 2) -> Any:
    weights = params(k, out)
    state = TX.init(weights)
    for _ in range(k):
        _, state = TX.update(weights, state)
    return {"params": weights, "opt": state, "key": jax.random.key(k), "step": jnp.int32(k)}


def assert_equal(one: Any, other: Any) -> None:
    first, second = (jax.tree_util.tree_leaves_with_path(tree) for tree in (one, other))
    assert [path for path, _ in first] == [path for path, _ in second]
    for (path, a), (_, b) in zip(first, second, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def test_abstract_targets_with_and_without_a_sharding(manager: CheckpointManager) -> None:
    saved = make(1)
    abstract = jax.eval_shape(lambda: make(0))
    assert_equal(manager.restore(like=abstract).state, saved)
    assert_equal(manager.restore(like=manager.metadata()).state["params"], saved["params"])
    mesh = jax.make_mesh((len(jax.devices()),), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract
    )
    state = manager.restore(like=placed).state
    assert_equal(state, saved)
    assert state["params"]["enc"]["w"].sharding == sharding
    assert state["opt"][1][0].mu["head"]["w"].sharding == sharding


def test_a_sharding_that_does_not_divide_a_leaf_is_a_mismatch(manager: CheckpointManager) -> None:
    sharding = NamedSharding(AbstractMesh((3,), ("d",)), PartitionSpec("d"))
    target = jax.eval_shape(lambda: make(0))
    for name, size in (("b", 4), ("w", (4, 3))):
        target["params"]["enc"][name] = jax.ShapeDtypeStruct(
            np.zeros(size).shape, jnp.float32, sharding=sharding
        )
    expected = r"differ in 2 leaves(.*\n)*  params/enc/b: .* divides the shape \[4\], found Named"
    with pytest.raises(MismatchError, match=expected):
        manager.restore(like=target)


def test_parts_of_an_abstract_target_leave_the_rest_abstract(manager: CheckpointManager) -> None:
    abstract = jax.eval_shape(lambda: make(0))
    state, _ = manager.restore(like=abstract, leaves=["params/**", "opt/1/0/mu/enc"])
    assert_equal(state["params"], make(1)["params"])
    assert_equal(state["opt"][1][0].mu["enc"], make(1)["opt"][1][0].mu["enc"])
    assert state["opt"][1][0].nu is abstract["opt"][1][0].nu
    assert isinstance(state["key"], jax.ShapeDtypeStruct)
    assert manager.restore(leaves="params").state["params"]["enc"]["w"].tolist() == [[1.0] * 3] * 4


def test_an_abstract_leaf_has_no_value_to_keep(manager: CheckpointManager) -> None:
    abstract = jax.eval_shape(lambda: make(0, out=5))
    with pytest.raises(MismatchError, match="params/head/w: is abstract"):
        manager.restore(like=abstract, strict=False)


def test_an_optimizer_state_of_optax_is_never_half_restored(manager: CheckpointManager) -> None:
    like = make(3, out=5)
    with pytest.warns(UserWarning, match="opt: keeps its whole state") as caught:
        restored = manager.restore(like=like, strict=False)
    assert len(caught) == 1
    state, _ = restored
    assert_equal(state["params"]["enc"], make(1)["params"]["enc"])
    assert state["params"]["head"]["w"] is like["params"]["head"]["w"]
    assert state["opt"] is like["opt"]
    assert restored.report.kept_whole == ("opt",)
    assert restored.report.mismatched == (
        "opt/1/0/mu/head/w", "opt/1/0/nu/head/w", "params/head/w",
    )  # fmt: skip
    assert int(state["step"]) == 1
    wide = {**like, "opt": jax.tree.map(lambda x: x.astype(jnp.bfloat16), like["opt"])}
    with pytest.warns(UserWarning, match="opt: keeps its whole state"):
        restored = manager.restore(like=wide, strict=False, cast=True)
    assert restored.report.cast == (), "what is kept is not cast"


def test_a_cast_and_a_rename(manager: CheckpointManager) -> None:
    saved = make(1)["params"]
    half = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(0)))
    like = {"encoder": half["enc"], "head": half["head"]}
    rename = {"params": "", "params/enc": "encoder"}
    with pytest.raises(MismatchError, match="cast=True"):
        manager.restore(like=like, leaves=["encoder", "head"], rename=rename)
    restored = manager.restore(like=like, leaves=["encoder", "head"], rename=rename, cast=True)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), saved)
    assert_equal(restored.state, {"encoder": expected["enc"], "head": expected["head"]})
    assert restored.report.cast == ("encoder/b", "encoder/w", "head/w")
    assert restored.report.renamed == restored.report.cast


def test_metadata_is_a_tree_of_shape_dtype_structs(tmp_path: Path) -> None:
    weak = jnp.asarray(2.0) * 1
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"key": jax.random.key(3), "weak": weak, "w": np.ones(2, np.int64), "n": 5})
        manager.wait_until_finished()
        tree = manager.metadata()
        assert tree["n"] == 5
        assert tree["w"] == jax.ShapeDtypeStruct((2,), np.dtype("int64"))
        assert tree["weak"].weak_type
        assert tree["key"].dtype == jax.random.key(0).dtype
        like = {name: tree[name] for name in ("key", "weak", "n")}
        state, _ = manager.restore(like=like, leaves=["key", "weak", "n"])
        assert state["weak"].weak_type
        assert_equal(state["key"], jax.random.key(3))


class Net(nnx.Module):
    def __init__(self, seed: int, out: int = 2) -> None:
        rngs = nnx.Rngs(seed)
        self.enc = nnx.Linear(3, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(4, out, rngs=rngs)


def test_nnx_abstract_modules_and_states(tmp_path: Path) -> None:
    saved = Net(1)
    optimizer = nnx.Optimizer(saved, optax.adam(1e-3), wrt=nnx.Param)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": saved, "opt": optimizer})
        manager.wait_until_finished()
        module = nnx.eval_shape(lambda: Net(2))
        state, _ = manager.restore(like={"model": module}, leaves="model")
        assert state["model"] is module
        assert_equal(nnx.to_pure_dict(nnx.state(module)), nnx.to_pure_dict(nnx.state(saved)))
        abstract = nnx.state(nnx.eval_shape(lambda: Net(2)))
        state, _ = manager.restore(like={"model": abstract}, leaves="model")
        assert_equal(nnx.to_pure_dict(state["model"]), nnx.to_pure_dict(nnx.state(saved)))

        live, other = Net(2), Net(2)
        before = np.asarray(live.head.kernel[...])
        manager.restore(like={"model": live}, leaves="model/enc/**")
        assert np.array_equal(live.enc.kernel[...], saved.enc.kernel[...])
        assert np.array_equal(live.head.kernel[...], before)

        wide = Net(2, out=5)
        like = {"model": wide, "opt": nnx.Optimizer(wide, optax.adam(1e-3), wrt=nnx.Param)}
        like["opt"].step[...] = 7
        with pytest.warns(UserWarning, match="opt: keeps its whole state"):
            report = manager.restore(like=like, strict=False).report
        assert report.kept_whole == ("opt",)
        assert int(like["opt"].step[...]) == 7
        assert np.array_equal(wide.enc.kernel[...], saved.enc.kernel[...])
        assert not np.array_equal(other.enc.kernel[...], saved.enc.kernel[...])


def test_equinox_abstract_modules_and_parts(tmp_path: Path) -> None:
    def mlp(seed: int, out: int = 2) -> Any:
        return eqx.nn.MLP(3, out, 4, 1, key=jax.random.key(seed))

    saved = mlp(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": saved})
        manager.wait_until_finished()
        abstract = eqx.filter_eval_shape(mlp, 2)
        state, _ = manager.restore(like={"model": abstract})
        assert_equal(eqx.filter(state["model"], eqx.is_array), eqx.filter(saved, eqx.is_array))
        like = {"model": mlp(2, out=5)}
        with pytest.warns(UserWarning, match="model/layers/1"):
            state, _ = manager.restore(like=like, strict=False)
        assert_equal(state["model"].layers[0].weight, saved.layers[0].weight)
        assert state["model"].layers[1].weight is like["model"].layers[1].weight
        state, _ = manager.restore(like={"model": mlp(2)}, leaves="**/bias")
        assert_equal(state["model"].layers[1].bias, saved.layers[1].bias)
        assert_equal(state["model"].layers[1].weight, mlp(2).layers[1].weight)
