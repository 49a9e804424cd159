"""A checkpoint of one strategy restores under another, on the other engine, and without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import perdure.jax
import perdure.torch
from perdure import ArrayDataset, CheckpointManager
from perdure.errors import MismatchError
from perdure.state import flatten

REPLICAS = 4


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 6)).astype(np.float32)
    return ArrayDataset({"x": x, "y": x.sum(1, keepdims=True)}, 16)


# Linear regression with momentum, in operators that JAX arrays and torch tensors share.


def grad(state: Any, batch: Any, key: Any) -> Any:
    error = (batch["x"] @ state["w"] - batch["y"]) * batch["weight"][:, None]
    return {"w": batch["x"].T @ error, "weight": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    momentum = state["momentum"] * 0.9 + total["w"] / total["weight"]
    return {
        "w": state["w"] - momentum * 0.05,
        "momentum": momentum,
        "step": state["step"] + 1,
    }, None


def make(engine: str) -> tuple[Any, Any]:
    if engine == "jax":
        tree = {"w": jnp.zeros((6, 1)), "momentum": jnp.zeros((6, 1)), "step": 0}
        return perdure.jax.MirroredStrategy(1, REPLICAS), tree
    tree = {"w": torch.zeros(6, 1), "momentum": torch.zeros(6, 1), "step": 0}
    return perdure.torch.MirroredStrategy(replicas=REPLICAS), tree


def run(engine: str, where: Path, until: int) -> Any:
    strategy, first = make(engine)
    train_step = strategy.step(grad, update)
    # No recipe: a checkpoint of one engine continues on the other.
    with CheckpointManager(where, recipe={}) as manager:
        state, start = manager.restore_or_initialize(first)
        for step in range(start, until):
            state, _ = train_step(state, strategy.batch(data(), step))
            manager.save(step + 1, state)
    return state


def values(state: Any) -> dict[str, Any]:
    """Kind and bits of each leaf but the step, which is a number on PyTorch and an array on JAX."""
    return {
        path: (leaf.dtype, leaf.shape, bytes(leaf.data))
        for path, leaf in flatten(state).items()
        if path != "step"
    }


@pytest.mark.parametrize(("first", "second"), [("jax", "torch"), ("torch", "jax")])
def test_the_other_engine_continues_a_checkpoint(tmp_path: Path, first: str, second: str) -> None:
    make(second)  # one process runs both: the first checkpoint has PyTorch's settings, too
    written = run(first, tmp_path, 3)
    taken = run(second, tmp_path, 3)
    assert values(taken) == values(written)
    assert int(taken["step"]) == 3
    kind = jax.Array if second == "jax" else torch.Tensor
    assert isinstance(taken["w"], kind)
    continued = run(second, tmp_path, 5)
    assert int(continued["step"]) == 5
    assert values(continued) != values(written)


def test_a_state_of_another_structure_is_refused_by_path(tmp_path: Path) -> None:
    run("jax", tmp_path, 1)
    with CheckpointManager(tmp_path) as manager, pytest.raises(MismatchError) as caught:
        manager.restore(like={"w": torch.zeros(7, 1), "momentum": torch.zeros(6, 1), "step": 0})
    assert "w: expected float32[7,1], found float32[6,1]" in str(caught.value)


def test_an_evaluation_script_needs_no_strategy_and_no_framework(tmp_path: Path) -> None:
    state = run("jax", tmp_path / "run", 2)
    script = """
import sys, perdure
w = perdure.load_checkpoint(sys.argv[1], leaves="w")["w"]
assert not {"jax", "torch"} & sys.modules.keys()
print(w.tobytes().hex())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == np.asarray(state["w"]).tobytes().hex()


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_another_strategy_continues_with_the_same_bits(tmp_path: Path, engine: str) -> None:
    straight = run(engine, tmp_path / "straight", 4)
    run(engine, tmp_path / "changed", 2)
    facade: Any = perdure.jax if engine == "jax" else perdure.torch
    strategy, first = facade.OneDeviceStrategy(replicas=REPLICAS), make(engine)[1]
    train_step = strategy.step(grad, update)
    with CheckpointManager(tmp_path / "changed") as manager:
        state, start = manager.restore(like=first)
    assert start == 2
    for step in range(start, 4):
        state, _ = train_step(state, strategy.batch(data(), step))
    assert values(state) == values(straight)
