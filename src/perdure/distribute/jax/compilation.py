"""JAX's cache of compiled programs, in a group of processes of one machine.

JAX lets only process 0 write, because object stores handle many writers badly. But on CPU its keys name
the devices, so no other process would find its programs, and each restart of a group would wait for
compilers. If `perdure run` has set the cache, on a local disk, every process writes its own entries.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

VARIABLE = "PERDURE_SHARED_CACHE"
_KNOWN = (
    "cache_key",
    "compile_time_secs",
    "module_name",
    "backend",
    "executable",
    "host_callbacks",
)


def write_from_all(process_id: int, environ: Mapping[str, str] | None = None) -> bool:
    """Let this process write too, if `perdure run` asked for it; False if nothing was changed.

    JAX has no setting for it. With a release whose function is different, nothing is changed.
    """
    environ = os.environ if environ is None else environ
    if process_id == 0 or not environ.get(VARIABLE):
        return False
    from jax._src import compilation_cache, compiler

    original: Any = getattr(compiler, "_cache_write", None)
    if original is None or tuple(inspect.signature(original).parameters) != _KNOWN:
        return False

    def write(
        cache_key: str,
        compile_time_secs: float,
        module_name: str,
        backend: Any,
        executable: Any,
        host_callbacks: Any,
    ) -> None:
        if host_callbacks or backend.platform != "cpu":
            return
        try:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(compile_time_secs)
            )
        except Exception as error:  # noqa: BLE001 (as in JAX: a full disk ends no training)
            warnings.warn(f"{module_name} was not kept in the cache: {error!r}", stacklevel=2)

    compiler._cache_write = write
    return True
