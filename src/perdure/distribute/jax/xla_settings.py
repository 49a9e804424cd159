"""The settings of XLA that decide bits and are read once, as a backend starts. Imports no JAX.

`PJRT_NPROC`, the size of the thread pool on CPU, decides how convolutions and attention are
divided; by default it follows cores and devices, which are topology. Without
`--xla_gpu_deterministic_ops` XLA uses atomic additions and kernels chosen by speed. The recipe and
a warning say where one is not set.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import MutableMapping

from perdure.errors import TopologyError
from perdure.runtime.environment import JAX_THREADS as VARIABLE
from perdure.runtime.environment import XLA_DETERMINISTIC as FLAG
from perdure.runtime.environment import (
    cores,
    jax_backend_started,
    unpinned,
    xla_flags,
)

# Divides work finely enough for eight cores, and runs on fewer.
DEFAULT = 8


def pin(
    threads: int | None = None,
    environ: MutableMapping[str, str] | None = None,
    started: bool | None = None,
) -> int | str:
    """Fix the size of the pool (by default PJRT_NPROC, else 8); returns its entry for the recipe.

    A backend that has started is "unpinned:<cores>", with a warning. TopologyError for another
    fixed size.
    """
    environ = os.environ if environ is None else environ
    started = jax_backend_started() if started is None else started
    if threads is not None and threads < 1:
        raise TopologyError(f"threads: expected at least 1, found {threads}")
    text = environ.get(VARIABLE)
    if text is not None:
        if not text.isdigit() or int(text) < 1:
            raise TopologyError(f"{VARIABLE}: expected a positive integer, found {text!r}")
        if threads is not None and threads != int(text):
            raise TopologyError(
                f"threads={threads} contradicts {VARIABLE}={text}, which is set already. The size of "
                "the thread pool changes the bits: use the one of the run that you continue"
            )
        return int(text)
    if not started:
        environ[VARIABLE] = str(threads or DEFAULT)
        return threads or DEFAULT
    count = cores()
    if threads is not None:
        raise TopologyError(
            f"threads={threads} comes too late: JAX has started its CPU backend with a pool that "
            f"follows the {count} cores. Make the strategy before the first JAX computation, or set "
            f"{VARIABLE}={threads} in the environment"
        )
    warnings.warn(
        "JAX had started its CPU backend before the strategy was made, so the size of its thread pool "
        f"follows the {count} cores, and the bits of convolutions may differ on another machine. "
        f"Make the strategy first, or set {VARIABLE}={DEFAULT} in the environment.",
        RuntimeWarning,
        stacklevel=2,
    )
    return unpinned()


def ask_for_determinism(
    environ: MutableMapping[str, str] | None = None,
    started: bool | None = None,
    plugin: bool | None = None,
) -> bool:
    """Set the flag if no backend has started; True if a GPU backend will have it, or has it.

    `plugin`: whether JAX could start another backend than the CPU's.
    """
    environ = os.environ if environ is None else environ
    flags = xla_flags(environ)
    if FLAG in flags:
        return flags[FLAG].lower() in ("", "1", "true")
    if plugin is None:
        plugin = importlib.util.find_spec("jax_plugins") is not None
    if not plugin:
        return True
    started = jax_backend_started() if started is None else started
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
