"""XLA's deterministic operations on GPU: `--xla_gpu_deterministic_ops` in XLA_FLAGS.

The flag is set before a GPU backend starts, or the recipe and a warning report that it is not. Without
it XLA uses atomic additions and kernels that it chooses by their speed, so that two runs may differ.
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
    """Set the flag if no backend has started; True if a GPU backend will have it, or has it.

    A flag that is already in XLA_FLAGS is not changed. `plugin`: whether JAX could start another
    backend than the CPU's; by default, whether a plugin is installed.
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
    """The value for the recipe; warns if the operations of this backend may not be deterministic."""
    if asked or platform not in ("gpu", "cuda", "rocm"):
        return True
    warnings.warn(
        f"JAX runs on {platform} without {FLAG}=true, so that two runs may give different bits. "
        f"Make the strategy before anything else that uses JAX, or set XLA_FLAGS={FLAG}=true",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
