"""The versions and settings of JAX that can change bits, for the recipe. Changes nothing."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax

from perdure.distribute.engine import Scalar
from perdure.distribute.hardware import instruction_set, settings

_USUAL = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_disable_most_optimizations": False,
    "jax_softmax_custom_jvp": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_enable_custom_prng": False,
}
"""Settings of JAX that can change bits, and that hardly a program changes, with their defaults."""


def _changed(config: Any) -> list[str]:
    """The settings that are not those of a fresh JAX."""
    found = {name: getattr(config, name, usual) for name, usual in _USUAL.items()}
    return [f"{name}={value}" for name, value in found.items() if value != _USUAL[name]]


def environment(device: Any, threads: int | str, deterministic: bool) -> dict[str, Scalar]:
    """The recipe's fields of the framework, for computing on `device`.

    `threads` and `deterministic` come from `perdure.distribute.jax.xla_settings`.
    """
    config: Any = jax.config
    on_cpu = device.platform == "cpu"
    return {
        "engine": "jax",
        "engine_version": f"jax {jax.__version__}, jaxlib {metadata.version('jaxlib')}"
        + ("" if on_cpu else f", {' '.join(device.client.platform_version.split())}"),
        "platform": device.platform,
        "instruction_set": instruction_set() if on_cpu else device.device_kind,
        "settings": " ".join(
            filter(None, [settings("cpu" if on_cpu else "gpu"), *_changed(config)])
        ),
        "deterministic": deterministic,
        "threads": threads,
        "x64": bool(config.jax_enable_x64),
        "matmul_precision": str(config.jax_default_matmul_precision),
        "threefry_partitionable": bool(config.jax_threefry_partitionable),
    }
