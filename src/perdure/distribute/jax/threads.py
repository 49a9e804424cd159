"""The size of XLA's intra-op thread pool on CPU: `PJRT_NPROC`.

The pool decides how convolutions and attention are divided, and so their bits; by default its size
follows the numbers of cores and devices, which are topology. So it is fixed before the CPU backend
starts, or the recipe records that it is not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import MutableMapping

from perdure.errors import TopologyError

VARIABLE = "PJRT_NPROC"
# Divides work finely enough for eight cores, and runs on fewer.
DEFAULT = 8


def pin(
    threads: int | None = None,
    environ: MutableMapping[str, str] | None = None,
    started: bool | None = None,
) -> int | str:
    """Fix the size of the pool, and return its entry for the recipe.

    `threads` is the wanted size: by default PJRT_NPROC if it is set, else 8. If the backend has started
    without it, this warns and returns "unpinned:<cores>". Raises TopologyError if `threads` contradicts
    a size that is fixed already.
    """
    environ = os.environ if environ is None else environ
    started = backend_started() if started is None else started
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
    cores = _cores()
    if threads is not None:
        raise TopologyError(
            f"threads={threads} comes too late: JAX has started its CPU backend with a pool that "
            f"follows the {cores} cores. Make the strategy before the first JAX computation, or set "
            f"{VARIABLE}={threads} in the environment"
        )
    warnings.warn(
        "JAX had started its CPU backend before the strategy was made, so the size of its thread pool "
        f"follows the {cores} cores, and the bits of convolutions may differ on another machine. "
        f"Make the strategy first, or set {VARIABLE}={DEFAULT} in the environment.",
        RuntimeWarning,
        stacklevel=2,
    )
    return unpinned()


def unpinned() -> str:
    """The recipe's entry for a pool that is not fixed: "unpinned:<cores>"."""
    return f"unpinned:{_cores()}"


def backend_started() -> bool:
    """Whether JAX has started a backend. True if this JAX cannot tell."""
    from jax._src import xla_bridge

    initialized = getattr(xla_bridge, "backends_are_initialized", None)
    return True if initialized is None else bool(initialized())


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
