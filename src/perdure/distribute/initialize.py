"""`initialize_distributed`: joins the group of processes, for training loops without a strategy."""

from __future__ import annotations

import sys
from importlib import import_module

from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.errors import ClusterError, missing_extra
from perdure.runtime.process_group import Processes

ENGINES = ("jax", "torch")


def initialize_distributed(
    engine: str | None = None,
    resolver: ClusterResolver | str | None = None,
    options: ClusterOptions | None = None,
) -> Processes:
    """Join the group of processes that the environment describes.

    If the program has already called `jax.distributed.initialize` or
    `torch.distributed.init_process_group` (with any backend), this joins that group. Otherwise it reads
    the variables of `perdure run`, another launcher or a scheduler (see `resolve`), waits for the other
    processes, and calls that function with every argument, so that the framework detects nothing by
    itself. A process that is alone gets a process group of one on PyTorch, so that
    `DistributedDataParallel` works there too, and nothing on JAX. May be called twice.

    `MultiWorkerMirroredStrategy` joins its group without this call.

    Args:
        engine: "jax" or "torch"; by default the one that the program has imported.
        resolver: The group, or the name of a source, instead of the environment.
        options: Time limits.

    Returns:
        The group. Pass it on: `CheckpointManager(..., processes=perdure.initialize_distributed())`.

    Raises:
        ClusterError: The description contradicts itself or the group of the framework, or a process did
            not come in time.
    """
    if engine is None:
        imported = [name for name in ENGINES if name in sys.modules]
        if len(imported) != 1:
            state = "both" if imported else "neither"
            raise ClusterError(
                f"initialize_distributed: expected the program to have imported jax or torch, found "
                f'{state}; name the one that trains: perdure.initialize_distributed("jax")'
            )
        (engine,) = imported
    if engine not in ENGINES:
        raise ClusterError(f"initialize_distributed: expected 'jax' or 'torch', found {engine!r}")
    cluster = resolve_for(engine, resolver)
    try:
        group = import_module(f"perdure.distribute.{engine}.group")
    except ModuleNotFoundError as error:
        raise missing_extra(engine, error) from error
    return group.initialize(cluster, options)
