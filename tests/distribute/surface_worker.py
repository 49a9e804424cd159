"""Calls the public methods of a strategy in one process of a group and writes the results as JSON."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from worker_program import answer, arguments

from perdure.data import ArrayDataset
from perdure.distribute import (
    Cluster,
    compute_average_loss,
    get_replica_context,
    metrics,
)
from perdure.errors import NonFiniteError, PerdureError

REPLICAS = 6


def digest(value: Any) -> str:
    leaves = value if isinstance(value, (list, tuple)) else [value]
    total = hashlib.sha256()
    for leaf in leaves:
        array = np.asarray(leaf)
        total.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()[:16]


def dataset() -> ArrayDataset:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(70, 5)).astype(np.float32)
    return ArrayDataset({"x": x, "y": rng.integers(0, 4, 70).astype(np.int32)}, 18)


def number() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def refused(call: Any) -> str:
    try:
        call()
    except PerdureError as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
    return "nothing"


def use(strategy: Any, xp: Any, forward: Any) -> dict[str, Any]:
    """Results that must not depend on the topology, and errors that every process must raise."""
    out: dict[str, Any] = {}
    batches = strategy.distribute_dataset(dataset())
    with strategy.scope():
        accuracy = metrics.SparseCategoricalAccuracy()
        loss = metrics.Mean()

    def evaluate(batch: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        scores = forward(batch["x"])
        accuracy.update_state(batch["y"], scores, batch["weight"])
        loss.update_state(scores[:, 0], batch["weight"])
        mean = context.all_reduce("mean", {"m": scores.mean(0)})
        again = forward(batch["x"] - mean["m"].sum())
        rows = context.all_gather(again[: 1 + number() % 2], 0)
        # If the engine has a generator, the merge draws from it.
        merged = context.merge_call(lambda _: forward(xp(np.ones((2, 5), np.float32))))
        return scores, mean["m"], again, rows, compute_average_loss(again.sum(1)), merged

    values = [strategy.run(evaluate, (batch,)) for batch in batches][-1]
    for position, name in enumerate(("scores", "mean", "again", "rows")):
        part = type(values)(tuple(v[position] for v in values.values), values.replicas)
        out[name] = digest(strategy.gather(part, 0))
    out["losses"] = digest(
        strategy.reduce("sum", type(values)(tuple(v[4] for v in values.values), values.replicas))
    )
    out["merged"] = digest(values.values[0][5])
    out["accuracy"] = accuracy.result()
    out["metrics"] = [digest(list(m.state_dict().values())) for m in (accuracy, loss)]

    def uneven() -> None:
        context = get_replica_context()
        assert context is not None
        for _ in range(2 if number() == REPLICAS - 1 else 1):
            context.all_reduce("sum", xp(np.ones(1, np.float32)))

    def failing() -> None:
        context = get_replica_context()
        assert context is not None
        context.all_reduce("sum", xp(np.ones(1, np.float32)))
        if number() == REPLICAS - 1:
            raise NonFiniteError("on purpose")
        context.all_reduce("sum", xp(np.ones(1, np.float32)))

    out["uneven"] = refused(lambda: strategy.run(uneven))
    out["failing"] = refused(lambda: strategy.run(failing))

    def grad(state: Any, batch: Any, key: Any) -> Any:
        # 0 / 0 in the rows that pad the last batch, which are in the last replicas.
        return {"bad": (batch["x"][:, 0] * 0 / batch["weight"]).sum() + 0 * state["w"]}

    watched = strategy.step(grad, lambda state, total: (state, total), check_finite=True)
    out["finite"] = refused(lambda: watched({"w": xp(np.float32(1))}, strategy.batch(dataset(), 3)))
    return out


def use_torch(cluster: Cluster | None) -> tuple[Any, dict[str, Any]]:
    import torch

    import perdure.torch as engine

    weight = torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_()

    def forward(x: Any) -> Any:
        # Numbers of the global generator, and a mode of the caller's thread.
        assert not torch.is_grad_enabled()
        return torch.dropout(x, 0.3, True) @ weight + torch.rand(4)

    torch.manual_seed(0 if cluster is None else cluster.process_id)
    before = torch.get_rng_state()
    strategy: Any = (
        engine.OneDeviceStrategy(replicas=REPLICAS)
        if cluster is None
        else engine.MultiWorkerMirroredStrategy(cluster, REPLICAS)
    )
    with torch.no_grad():
        out = use(strategy, torch.as_tensor, forward)
    assert (torch.get_rng_state() == before).all(), "the caller's random numbers are left alone"
    return strategy, out


def use_jax(cluster: Cluster | None) -> tuple[Any, dict[str, Any]]:
    import perdure.jax as engine

    strategy: Any = (
        engine.OneDeviceStrategy(replicas=REPLICAS)
        if cluster is None
        else engine.MultiWorkerMirroredStrategy(cluster, REPLICAS)
    )
    import jax
    import jax.numpy as jnp

    config: Any = jax.config
    weight = jnp.linspace(-1, 1, 20).reshape(5, 4)

    def forward(x: Any) -> Any:
        # A setting of the caller's thread.
        assert config.jax_default_matmul_precision == "highest"
        return jnp.tanh(x @ weight)

    with jax.default_matmul_precision("highest"):
        return strategy, use(strategy, jnp.asarray, forward)


ENGINES = {"jax": use_jax, "torch": use_torch}


def main() -> None:
    args = arguments(engine=str)
    cluster = Cluster(args.coordinator, args.processes, args.process)
    strategy, out = ENGINES[args.engine](cluster)
    assert strategy.cluster_resolver.cluster() == cluster
    answer(out)


if __name__ == "__main__":
    main()
