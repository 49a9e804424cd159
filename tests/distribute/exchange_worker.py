"""Adds known contributions over a group with both exchanges and writes the digests as JSON."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from worker_program import answer, arguments, listening

from perdure.distribute import SimpleClusterResolver, pytree
from perdure.distribute.reduction import reduction_of
from perdure.distribute.reduction_tree import TreeNode, merge

REPLICAS = 5


def contribution(replica: int) -> dict[str, Any]:
    """Dtypes of three widths, sizes that no number of processes divides, an empty leaf and -0.0."""
    rng = np.random.default_rng(replica)
    return {
        "a": rng.normal(size=(13, 7)).astype(np.float32),
        "b": rng.normal(size=5).astype(np.float16),
        "empty": np.zeros((0, 3), np.float32),
        "n": rng.integers(0, 9, 3, dtype=np.int32),
        "zero": np.full((), -0.0, np.float32),
    }


def digest(value: Any) -> str:
    total = hashlib.sha256()
    for path, leaf in pytree.flatten(value):
        array = np.asarray(leaf)
        total.update(f"{path} {array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()[:16]


def add(left: Any, right: Any) -> Any:
    pairs = zip(pytree.flatten(left), pytree.flatten(right), strict=True)
    return pytree.rebuild(left, iter([a + b for (_, a), (_, b) in pairs]))


def add_with_positive_zeros(left: Any, right: Any) -> Any:
    total = add(left, right)
    return pytree.rebuild(total, iter([leaf + 0 for _, leaf in pytree.flatten(total)]))


def main() -> None:
    args = arguments(engine=str)
    cluster = SimpleClusterResolver(args.coordinator, args.processes, args.process)
    moved: list[str] = []
    if args.engine == "jax":
        from perdure.distribute.jax import group
        from perdure.jax import MultiWorkerMirroredStrategy

        move: Any = group._move
        group._move = lambda how, *rest: moved.append(how) or move(how, *rest)
    else:
        import torch.distributed as dist

        from perdure.distribute.torch import group
        from perdure.torch import MultiWorkerMirroredStrategy

        for name, how in (("all_gather", "gather"), ("all_to_all_single", "scatter")):
            real = getattr(dist, name)
            recorded = lambda *a, real=real, how=how: moved.append(how) or real(*a)  # noqa: E731
            setattr(dist, name, recorded)
    strategy: Any = MultiWorkerMirroredStrategy(cluster, REPLICAS)
    engine, plan = strategy._engine, strategy._plan
    every = [contribution(replica) for replica in range(REPLICAS)]
    nodes = [(TreeNode(0, replica), value) for replica, value in enumerate(every)]
    backwards = [(TreeNode(0, r), value) for r, value in enumerate(every[::-1])]
    plus = add_with_positive_zeros if args.engine == "jax" else add
    ((_, expected),) = merge(nodes, REPLICAS, plus)
    ((_, other),) = merge(backwards, REPLICAS, plus)
    out: dict[str, Any] = {"expected": digest(expected), "reversed": digest(other), "moved": {}}
    for how in ("wholes", "slices"):
        choice: Any = lambda *_, how=how: how == "slices"  # noqa: E731
        module: Any = group
        module.sliced = choice
        reduction = reduction_of(plan)
        for replica in strategy.local_replicas:
            value = engine.put(every[replica], engine.devices[0])
            reduction.push(0, replica, value)
        moved.clear()
        out[how] = digest(reduction.total())
        out["moved"][how] = list(moved)
    out["listening"] = listening()
    answer(out)


if __name__ == "__main__":
    main()
