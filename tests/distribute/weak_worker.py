"""Steps with weakly typed numbers in state, contributions and logs, on one topology.

Prints the bits of all leaves with their types, and what `strategy.explain` says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from worker_program import answer, arguments

from perdure.distribute import SimpleClusterResolver
from perdure.distribute.values import PerReplica
from perdure.errors import StateError
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy
from perdure.state import restore, snapshot


def first_state() -> dict[str, Any]:
    return {
        "w": jnp.asarray(np.linspace(0.1, 2.9, 7), jnp.bfloat16),
        "lr": 0.3,
        "temp": jnp.asarray(0.7),  # weakly typed
        "rows": jnp.full(7, 0.01),  # an array may be weakly typed, too
        "strong": np.float32(0.7),
        "steps": 0,
        "turns": 1.0,  # becomes a strong type in the first step
        "key": jax.random.key(5),  # has no weak type
    }


def shares(step: int, replicas: int) -> PerReplica:
    values = [np.linspace(r, step + 1, 7).astype(np.float32) for r in range(replicas)]
    return PerReplica(tuple(values), tuple(range(replicas)), step)


def grad(state: Any, batch: Any, key: Any) -> Any:
    x = batch.astype(jnp.bfloat16)
    g = x * state["temp"] - state["w"] * state["rows"]
    return {
        "g": g.astype(jnp.float32),
        "weight": 1.0,
        "scaled": state["temp"] * 3,
    }


def update(state: Any, total: Any) -> Any:
    g = total["g"].astype(jnp.bfloat16) * total["scaled"] / total["weight"]
    new = {
        **state,
        "w": state["w"] - state["lr"] * g,
        "temp": state["temp"] * 0.9,
        "rows": state["rows"] * 1.1,
        "steps": state["steps"] + 1,
        "turns": state["turns"] * jnp.float32(1.5),
        "key": jax.random.split(state["key"])[0],
    }
    logs = {"weight": total["weight"], "g": g, "wide": g * state["strong"], "constant": 2.5}
    return new, logs


def described(tree: Any) -> list[str]:
    def described_one(leaf: Any) -> str:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return f"{leaf.dtype} {np.asarray(jax.random.key_data(leaf)).tobytes().hex()}"
        return f"{leaf.dtype}{list(leaf.shape)} {leaf.weak_type} {np.asarray(leaf).tobytes().hex()}"

    return [described_one(leaf) for leaf in jax.tree.leaves(tree)]


def trained(step: Any, replicas: int, local: Any, *, interrupted: bool = False) -> list[str]:
    state, all_logs = first_state(), []
    for number in range(3):
        batch = shares(number, replicas)
        mine = PerReplica(tuple(batch.values[r] for r in local), tuple(local), number)
        state, logs = step(state, mine)
        all_logs.append(logs)
        if interrupted and number == 0:
            state = restore(first_state(), snapshot(state))
    return described((state, all_logs))


def error_of_a_mesh(*, explicit: bool) -> str:
    strategy = MirroredStrategy(4, 4)
    devices = np.array(jax.devices())
    mesh = jax.make_mesh((4,), ("rows",)) if explicit else jax.sharding.Mesh(devices, ("rows",))
    rows = jax.sharding.PartitionSpec("rows")
    spread = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=rows, out_specs=rows)
    batch = PerReplica((np.ones(2, np.float32),) * 4, tuple(range(4)), 0)
    try:
        strategy.step(
            lambda state, *_: {"x": spread(state["x"])}, lambda state, total: (state, total)
        )({"x": jnp.ones(8)}, batch)
    except StateError as error:
        return str(error)
    return ""


def main() -> None:
    options = arguments(devices=1, replicas=4, mesh=0)
    if options.mesh:
        answer({"errors": [error_of_a_mesh(explicit=explicit) for explicit in (True, False)]})
        return
    if options.processes > 1:
        resolver = SimpleClusterResolver(options.coordinator, options.processes, options.process)
        strategy: Any = MultiWorkerMirroredStrategy(resolver, options.replicas)
    else:
        strategy = MirroredStrategy(options.devices, options.replicas)
    results = {}
    for name in ("fast", "slow", "resumed"):
        step = strategy.step(grad, update, check_finite=name == "slow")
        local = strategy.local_replicas
        results[name] = trained(step, options.replicas, local, interrupted=name == "resumed")
        results[f"{name} explained"] = strategy.explain(step)
    answer(results)


if __name__ == "__main__":
    main()
