"""XLA's deterministic operations on GPU.

Owns `--xla_gpu_deterministic_ops` in XLA_FLAGS. Invariant: it is there before a GPU backend starts,
or the recipe and a warning say that it is not. Without it XLA takes atomic additions and kernels
chosen by how fast they were, and no two runs need to be alike.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import MutableMapping

from perdure.distribute.hardware import xla_flags
from perdure.distribute.jax.threads import backend_started

FLAG = "--xla_gpu_deterministic_ops"


def ask_for_determinism(
    environ: MutableMapping[str, str] | None = None,
    started: bool | None = None,
    plugin: bool | None = None,
) -> bool:
    """Set the flag while there is time; True where a GPU backend will have it, or has it.

    A flag that stands in XLA_FLAGS already is left as it is. `plugin`: whether JAX could start
    anything but a CPU; by default, whether a plugin is installed.
    """
    environ = os.environ if environ is None else environ
    flags = xla_flags(environ)
    if FLAG in flags:
        return flags[FLAG].lower() in ("", "1", "true")
    if plugin is None:
        plugin = importlib.util.find_spec("jax_plugins") is not None
    if not plugin:
        return True
    started = backend_started() if started is None else started
    if started:
        return False
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {FLAG}=true".strip()
    return True


def check_determinism(asked: bool, platform: str) -> bool:
    """What the recipe says; warns where the operations of this backend need not be deterministic."""
    if asked or platform not in ("gpu", "cuda", "rocm"):
        return True
    warnings.warn(
        f"JAX runs on {platform} without {FLAG}=true, so that no two runs need to give the same bits. "
        f"Make the strategy before anything else that uses JAX, or set XLA_FLAGS={FLAG}=true",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
