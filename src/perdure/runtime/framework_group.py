"""The group of processes that a framework has initialized. Imports no framework."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FrameworkGroup:
    """This process is number `index` of `count`, according to `engine` ("jax" or "torch").

    `address` is the host:port of the group's rendezvous; None if the framework does not know it.
    """

    engine: str
    index: int
    count: int
    address: str | None

    @property
    def source(self) -> str:
        """The module of the framework that initialized the group."""
        return f"{self.engine}.distributed"


def framework_group(engine: str | None = None) -> FrameworkGroup | None:
    """The group that the program or its launcher has initialized (the larger of two); None for
    none.
    """
    groups = [
        group
        for name, find in (("jax", _jax_group), ("torch", _torch_group))
        if engine in (None, name) and name in sys.modules and (group := find()) is not None
    ]
    return max(groups, key=lambda group: group.count, default=None)


def innermost_store(store: Any) -> Any:
    """The store of a torch process group without its wrappers. It may have a `host` and a `port`."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _jax_group() -> FrameworkGroup | None:
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    # `jax.process_count()` would initialize the devices.
    if state is None or state.client is None:
        return None
    address = getattr(state, "coordinator_address", None)
    return FrameworkGroup("jax", state.process_id or 0, state.num_processes or 1, address)


def _torch_group() -> FrameworkGroup | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    store = innermost_store(dist.distributed_c10d._get_default_store())
    host = getattr(store, "host", None)  # a file store has none
    address = None if host is None else f"{host}:{store.port}"
    return FrameworkGroup("torch", dist.get_rank(), dist.get_world_size(), address)
