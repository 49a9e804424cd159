"""Saves arrays that are sharded over four devices of one process: run by `test_local_mesh.py`.

Arguments: an empty directory.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from perdure import CheckpointManager, ManagerOptions
from perdure.store import LocalStorage, Run, verify_run
from perdure.store.codec import CODECS

MESH = jax.make_mesh((2, 2), ("a", "b"))
SPECS = {
    "both": PartitionSpec("a", "b"),  # chunks of this one are put together from all shards
    "rows": PartitionSpec(("a", "b")),
    "copied": PartitionSpec("a"),
    "columns": PartitionSpec(None, "b"),
    "small": PartitionSpec("a"),
    "everywhere": PartitionSpec(),
}
SHAPES = dict.fromkeys(SPECS, (1024, 1200)) | {"small": (4, 3), "everywhere": (5, 7)}


def value(name: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng([*name.encode()]).standard_normal(SHAPES[name], dtype=np.float32)


def arrays(step: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value(name) * np.float32(step) for name in SPECS}


def on_mesh(state: dict[str, np.ndarray[Any, Any]]) -> dict[str, jax.Array]:
    placed = {
        name: jax.device_put(array, NamedSharding(MESH, SPECS[name]))
        for name, array in state.items()
    }
    keys = jax.random.split(jax.random.key(3), 4)
    return placed | {"keys": jax.device_put(keys, NamedSharding(MESH, PartitionSpec("a")))}


def gathers(save: Any) -> int:
    """How often arrays of several devices were put together in this thread."""
    kind: Any = type(jnp.zeros(1))
    found: list[Any] = []
    real = kind.__array__

    def counted(array: Any, *args: Any, **kwargs: Any) -> Any:
        if len(array.sharding.device_set) > 1 and not array.is_fully_replicated:
            found.append(array)
        return real(array, *args, **kwargs)

    kind.__array__ = counted
    try:
        save()
    finally:
        kind.__array__ = real
    return len(found)


def main() -> None:
    warnings.simplefilter("error")
    root = Path(sys.argv[1])
    assert gathers(lambda: np.asarray(on_mesh(arrays(1))["both"])) == 1, "the control"
    for codec in (None, CODECS[0]):
        where = root / str(codec)
        with CheckpointManager(
            where, max_to_keep=None, options=ManagerOptions(codec=codec)
        ) as manager:
            state = on_mesh(arrays(1))
            assert gathers(partial(manager.save, 1, state)) == 0
            # A step that is given the arrays leaves the bytes alone that the save still reads.
            twice = jax.jit(
                lambda state: {
                    name: array if name == "keys" else array * 2 for name, array in state.items()
                },
                donate_argnums=0,
            )
            state = twice(state)
            manager.save(2, state)
            state = twice(state)
            manager.wait_until_finished()
            restored = manager.restore(2, like=on_mesh(arrays(0))).state
        for step in (1, 2):
            plain = root / f"plain-{codec}-{step}"
            with CheckpointManager(plain) as manager:
                manager.save(1, arrays(step) | {"keys": jax.random.split(jax.random.key(3), 4)})
            found = Run(where).manifest(step).fingerprint
            assert found == Run(plain).manifest(1).fingerprint, (codec, step)
        for name, array in arrays(2).items():
            assert np.asarray(restored[name]).tobytes() == array.tobytes(), name
            assert restored[name].sharding.spec == SPECS[name]
        assert verify_run(Run(where)).good == (1, 2)
    repaired(root / "repaired")
    sys.stdout.write("same bits\n")


def repaired(where: Path) -> None:
    """Damaged chunks of an earlier save are written again from the shards."""
    from perdure.store import damage

    damage.PASS_SAVES = 1
    with CheckpointManager(LocalStorage(where), max_to_keep=None) as manager:
        manager.save(1, on_mesh(arrays(1)))
        manager.wait_until_finished()
        pack = next((where / "packs").iterdir())
        pack.write_bytes(b"\1" + pack.read_bytes()[1:])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            manager.save(2, on_mesh(arrays(1)))
            manager.wait_until_finished()
            manager.save(3, on_mesh(arrays(1)))
        assert any("written again" in str(warning.message) for warning in said), said
    assert verify_run(Run(where)).good == (1, 2, 3)


if __name__ == "__main__":
    main()
