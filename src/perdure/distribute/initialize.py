"""`initialize_distributed`: joins the group of processes, for training loops without a strategy."""

from __future__ import annotations

import sys
from importlib import import_module

from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.errors import ClusterError
from perdure.process_group import Processes

ENGINES = ("jax", "torch")


def initialize_distributed(
    engine: str | None = None,
    resolver: ClusterResolver | str | None = None,
    options: ClusterOptions | None = None,
) -> Processes:
    """Join the group of processes that the environment describes, and return it.

    Pass the result on: `CheckpointManager(..., processes=perdure.initialize_distributed())`.

    Where the program has called `jax.distributed.initialize` or
    `torch.distributed.init_process_group` (with any backend) already, that group is joined. Otherwise
    this reads what `perdure run`, another launcher or a scheduler wrote (see `resolve`), meets the
    others, and passes every argument to that function, so that the framework does not look for itself.
    `engine` is "jax" or "torch"; by default the one that the program has imported. A process that is
    alone gets a process group of one on PyTorch, so that `DistributedDataParallel` works there too, and
    nothing on JAX. `MultiWorkerMirroredStrategy` joins its group by itself. May be called twice.

    Raises `ClusterError` when the description contradicts itself or the group of the framework, or
    when not all came in time.
    """
    if engine is None:
        found = [name for name in ENGINES if name in sys.modules]
        if len(found) != 1:
            state = "both" if found else "neither"
            raise ClusterError(
                f"initialize_distributed: expected the program to have imported jax or torch, found "
                f'{state}; name the one that trains: perdure.initialize_distributed("jax")'
            )
        (engine,) = found
    if engine not in ENGINES:
        raise ClusterError(f"initialize_distributed: expected 'jax' or 'torch', found {engine!r}")
    cluster = resolve_for(engine, resolver)
    return import_module(f"perdure.distribute.{engine}.group").initialize(cluster, options)
