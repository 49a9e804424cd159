"""JAX inside `strategy.run`: functions on a device, and a thread's settings in another thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.experimental as jax_experimental

from perdure.distribute.engine import EagerRun, Stream
from perdure.distribute.jax.programs import SETTINGS


class JaxEagerRun(EagerRun):
    """See EagerRun. JAX has no global generator, and its arrays cannot be changed in place."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices

    def call(
        self,
        fn: Callable[..., Any],
        device: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> Any:
        if len(self._devices) > 1:
            args, kwargs = jax.tree.map(
                functools.partial(_on, device=device), (list(args), dict(kwargs))
            )
        with jax.default_device(device):
            return fn(*args, **kwargs)

    def thread_settings(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return thread_settings()


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Remembers JAX's settings of this thread; the result applies them in another thread."""
    config: Any = jax.config
    values = {name: getattr(config, f"jax_{name}") for name in SETTINGS}

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                # A new thread has the global settings, which most often are these.
                if getattr(config, f"jax_{name}") != value:
                    # enable_x64 has not always been a name of jax itself.
                    home = jax if hasattr(jax, name) else jax_experimental
                    stack.enter_context(getattr(home, name)(value))
            yield

    return enter


def _on(leaf: Any, device: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    for shard in leaf.addressable_shards:
        if shard.device == device and leaf.is_fully_replicated:
            return shard.data
    return jax.device_put(leaf, device)
