"""Weakly typed numbers are as in `jit` in every program of a step, and what JAX cannot run is named."""
# ruff: noqa: ARG005  grad takes (state, batch, key)

from __future__ import annotations

from typing import Any

import group
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import weak_worker as weak

from perdure.errors import StateError
from perdure.jax import MirroredStrategy


def test_one_replica_computes_what_jit_computes() -> None:
    program = jax.jit(lambda state, x: weak.update(state, weak.grad(state, x, None)))
    expected = weak.trained(
        lambda state, batch: program(state, batch.values[0]), replicas=1, local=[0]
    )
    strategy = MirroredStrategy(1, replicas=1)
    assert weak.trained(strategy.step(weak.grad, weak.update), 1, [0]) == expected

    strong = {
        n: v if isinstance(v, jax.Array) else np.float32(v) for n, v in weak.first_state().items()
    }
    _, logs = program(weak.first_state(), weak.shares(0, 1).values[0])
    with pytest.raises(
        StateError, match="w: bfloat16"
    ):  # the control: other numbers, another program
        strategy.step(weak.grad, weak.update)(strong, weak.shares(0, 1))
    assert logs["g"].dtype == jnp.bfloat16


def test_the_types_and_bits_are_the_same_on_any_topology_and_after_a_restore() -> None:
    env = {"PJRT_NPROC": "8", "JAX_NUM_CPU_DEVICES": "4"}
    runs = [("weak_worker.py", 1, "--devices", str(devices)) for devices in (1, 2, 4)]
    ended = [group.launch(*run, env=env, forked="jax") for run in runs]
    ended.append(
        group.launch("weak_worker.py", 2, env={**env, "JAX_NUM_CPU_DEVICES": "1"}, forked="jax")
    )
    expected: Any = None
    for number, processes in enumerate(ended):
        for status, answer, err in processes:
            assert status == 0, err
            expected = expected or answer["fast"]
            assert any(" True " in line for line in expected), "a leaf that is weakly typed"
            for name in ("fast", "slow", "resumed"):
                assert answer[name] == expected, (name, number)
            assert number == 3 or answer["fast explained"].startswith("Fast"), answer


def test_the_scalar_that_widens_a_leaf_is_named() -> None:
    def update(state: Any, total: Any) -> Any:
        return {**state, "w": state["w"] - state["opt"]["lr"] * total.astype(jnp.bfloat16)}, None

    step = MirroredStrategy(1, 1).step(lambda state, batch, key: batch, update)
    state = {"w": jnp.ones(7, jnp.bfloat16), "opt": {"lr": jnp.float32(0.1)}}
    with pytest.raises(StateError, match=r"w: bfloat16\[7\] became float32\[7\].*opt/lr"):
        step(state, weak.shares(0, 1))
    step({**state, "opt": {"lr": 0.1}}, weak.shares(0, 1))


@pytest.mark.parametrize("inside", ["state", "closure", "grad"])
def test_a_step_inside_of_jit_is_refused(inside: str) -> None:
    step = MirroredStrategy(1, 1).step(weak.grad, weak.update)
    state, batch = weak.first_state(), weak.shares(0, 1)
    calls: dict[str, Any] = {
        "state": lambda: jax.jit(lambda s: step(s, batch)[0])(state),
        "closure": lambda: jax.jit(lambda: step(state, batch)[0])(),
        "grad": lambda: jax.grad(lambda x: step({**state, "turns": x}, batch)[0]["turns"])(1.0),
    }
    with pytest.raises(StateError, match="inside jit"):
        calls[inside]()


def test_a_mesh_inside_of_grad_is_refused() -> None:
    status, answer, err = group.launch(
        "weak_worker.py", 1, "--mesh", "1", env={"JAX_NUM_CPU_DEVICES": "4"}, forked="jax"
    )[0]
    assert status == 0, err
    for error in answer["errors"]:
        assert "one device for each logical replica" in error
