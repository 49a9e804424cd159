"""The versions and settings of JAX that can change bits, for the recipe. Changes nothing."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax

from perdure.distribute.engine import Scalar
from perdure.distribute.hardware import instruction_set, settings


def environment(device: Any, threads: int | str, deterministic: bool) -> dict[str, Scalar]:
    """The recipe's fields of the framework, for computing on `device`.

    `threads` and `deterministic` come from `perdure.distribute.jax.threads` and `flags`.
    """
    config: Any = jax.config
    on_cpu = device.platform == "cpu"
    return {
        "engine": "jax",
        "engine_version": f"jax {jax.__version__}, jaxlib {metadata.version('jaxlib')}"
        + ("" if on_cpu else f", {' '.join(device.client.platform_version.split())}"),
        "platform": device.platform,
        "instruction_set": instruction_set() if on_cpu else device.device_kind,
        "settings": settings("cpu" if on_cpu else "gpu"),
        "deterministic": deterministic,
        "threads": threads,
        "x64": bool(config.jax_enable_x64),
        "matmul_precision": str(config.jax_default_matmul_precision),
        "threefry_partitionable": bool(config.jax_threefry_partitionable),
    }
