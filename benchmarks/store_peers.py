"""Every compared format as four methods: make, change, save (durable on return), load.

Run as a program it measures one of them and prints the figures as JSON. Every subject has its own
process, so that frameworks do not disturb each other.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from store_probe import MIB, fresh, sync_tree, timed

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "jax")

FLIPS = 24


class Subject(Protocol):
    """`change` gives a state with other bytes in every 4 MiB, `save` the seconds that a loop waits."""

    def make(self, leaves: int, nbytes: int) -> Any: ...
    def change(self, state: Any) -> Any: ...
    def save(self, path: Path, step: int, state: Any) -> float | None: ...
    def load(self, path: Path, step: int, like: Any) -> Any: ...


class Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def make(self, leaves: int, nbytes: int) -> Any:
        return {f"layer{i}": self.torch.rand(nbytes // 4) for i in range(leaves)}

    def change(self, state: Any) -> Any:
        for leaf in state.values():
            leaf += 1
        return state

    def save(self, path: Path, step: int, state: Any) -> float | None:
        self.torch.save(state, path / f"{step}.pt")
        sync_tree(path)

    def load(self, path: Path, step: int, like: Any) -> Any:
        return self.torch.load(path / f"{step}.pt")


class Safetensors(Torch):
    def save(self, path: Path, step: int, state: Any) -> float | None:
        from safetensors.torch import save_file

        save_file(state, path / f"{step}.safetensors")
        sync_tree(path)

    def load(self, path: Path, step: int, like: Any) -> Any:
        from safetensors.torch import load_file

        return load_file(path / f"{step}.safetensors")


class Dcp(Torch):
    def save(self, path: Path, step: int, state: Any) -> float | None:
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")

        dcp.save(state, checkpoint_id=path / str(step), no_dist=True)
        sync_tree(path)

    def load(self, path: Path, step: int, like: Any) -> Any:
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")

        target = {name: self.torch.empty_like(leaf) for name, leaf in like.items()}
        dcp.load(target, checkpoint_id=path / str(step), no_dist=True)
        return target


class DcpAsync(Dcp):
    def __init__(self) -> None:
        super().__init__()
        import torch.distributed as dist

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
        dist.init_process_group("gloo", rank=0, world_size=1)

    def save(self, path: Path, step: int, state: Any) -> float | None:
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")

        done: list[Any] = []
        stall = timed(
            lambda: done.append(dcp.async_save(state, checkpoint_id=path / str(step))),
            warm_memory=False,
        )
        done[0].result()
        sync_tree(path)
        return stall


class Jax:
    def make(self, leaves: int, nbytes: int) -> Any:
        import jax

        keys = jax.random.split(jax.random.key(0), leaves)
        return jax.block_until_ready(
            {f"layer{i}": jax.random.uniform(k, (nbytes // 4,)) for i, k in enumerate(keys)}
        )

    def change(self, state: Any) -> Any:
        import jax

        return jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 1, state))


class Orbax(Jax):
    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self.ocp = ocp
        self.manager: Any = None

    def save(self, path: Path, step: int, state: Any) -> float | None:
        if self.manager is None or Path(self.manager.directory) != path or step == 1:
            self.manager = self.ocp.CheckpointManager(path)
        stall = timed(
            lambda: self.manager.save(step, args=self.ocp.args.StandardSave(state)),
            warm_memory=False,
        )
        self.manager.wait_until_finished()
        sync_tree(path / str(step))
        return stall

    def load(self, path: Path, step: int, like: Any) -> Any:
        import jax

        target = jax.tree.map(self.ocp.utils.to_shape_dtype_struct, like)
        return jax.block_until_ready(
            self.manager.restore(step, args=self.ocp.args.StandardRestore(target))
        )


class Perdure(Jax):
    manager: Any = None

    def save(self, path: Path, step: int, state: Any) -> float | None:
        from perdure import CheckpointManager

        if self.manager is None or self.manager.directory != str(path) or step == 1:
            if self.manager is not None:
                self.manager.close()
            self.manager = CheckpointManager(str(path), max_to_keep=None)
        stall = timed(lambda: self.manager.save(step, state), warm_memory=False)
        self.manager.wait_until_finished()
        return stall

    def load(self, path: Path, step: int, like: Any) -> Any:
        from perdure import load_checkpoint

        return load_checkpoint(path, step)


class PerdureTorch(Torch):
    def __init__(self) -> None:
        super().__init__()
        self._perdure = Perdure()

    def save(self, path: Path, step: int, state: Any) -> float | None:
        return self._perdure.save(path, step, state)

    def load(self, path: Path, step: int, like: Any) -> Any:
        return self._perdure.load(path, step, like)


class Tensorflow:
    def make(self, leaves: int, nbytes: int) -> Any:
        import tensorflow as tf

        return {f"layer{i}": tf.Variable(tf.random.uniform((nbytes // 4,))) for i in range(leaves)}

    def change(self, state: Any) -> Any:
        for leaf in state.values():
            leaf.assign_add(leaf * 0 + 1)
        return state

    def save(self, path: Path, step: int, state: Any) -> float | None:
        import tensorflow as tf

        checkpoint = tf.train.Checkpoint(**state)
        tf.train.CheckpointManager(checkpoint, str(path), max_to_keep=None).save(step)
        sync_tree(path)

    def load(self, path: Path, step: int, like: Any) -> Any:
        import tensorflow as tf

        tf.train.Checkpoint(**like).restore(f"{path}/ckpt-{step}").assert_consumed()
        return like


class Keras:
    def make(self, leaves: int, nbytes: int) -> Any:
        import keras

        class Weight(keras.layers.Layer):
            def build(self, input_shape: Any) -> None:
                self.w = self.add_weight(shape=(nbytes // 4,), initializer="random_uniform")

            def call(self, x: Any) -> Any:
                return x

        model = keras.Sequential([Weight() for _ in range(leaves)])
        model.build((1, 1))
        return model

    def change(self, state: Any) -> Any:
        for weight in state.weights:
            weight.assign(weight + 1)
        return state

    def save(self, path: Path, step: int, state: Any) -> float | None:
        state.save_weights(path / f"{step}.weights.h5")
        sync_tree(path)

    def load(self, path: Path, step: int, like: Any) -> Any:
        like.load_weights(path / f"{step}.weights.h5")
        return like


SUBJECTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "perdure": (Perdure, ("jax",)),
    "perdure (torch)": (PerdureTorch, ("torch",)),
    "torch.save": (Torch, ("torch",)),
    "safetensors": (Safetensors, ("safetensors", "torch")),
    "torch DCP": (Dcp, ("torch",)),
    "torch DCP async": (DcpAsync, ("torch",)),
    "Orbax": (Orbax, ("orbax.checkpoint",)),
    "tf.train": (Tensorflow, ("tensorflow",)),
    "Keras .weights.h5": (Keras, ("keras", "h5py")),
}
"""Every subject, and the modules without which it is not installed."""


def _touch(loaded: Any) -> None:
    """Read every page of a loaded state, because a memory-mapped file is not read before."""
    for leaf in loaded.values() if isinstance(loaded, dict) else ():
        if hasattr(leaf, "numpy") and not hasattr(leaf, "read_value"):  # a torch tensor
            leaf[::1024].sum()


def _arrays(state: Any) -> list[np.ndarray]:
    """Copies of all values of a state, in a dict by name."""
    if not isinstance(state, dict):
        return state.get_weights()
    return [np.array(state[name]) for name in sorted(state)]


def flips_returned(subject: Subject, path: Path, state: Any) -> int:
    """How many of FLIPS loads return wrong values, each after one bit was flipped in the largest file
    of the checkpoint. A load that raises does not count."""
    subject.save(path, 1, state)
    saved = _arrays(state)

    def differs() -> bool:
        loaded = _arrays(subject.load(path, 1, state))
        return not all(map(np.array_equal, loaded, saved))

    if differs():
        raise RuntimeError("an undamaged checkpoint was loaded with other values")
    files = [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    random = np.random.default_rng(0)
    returned = 0
    for place in random.integers(len(whole) // 10, len(whole) * 9 // 10, FLIPS):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(8))
        largest.write_bytes(damaged)
        with suppress(Exception):  # every format has its own error
            returned += differs()
    largest.write_bytes(whole)
    return returned


def measure(name: str, path: Path, nbytes: int, rounds: int) -> dict[str, Any]:
    """GB/s of durable saves and cold loads of `nbytes` in 64 MiB leaves, ms of 5 MB in 12 leaves, and
    how many of FLIPS flipped bits a load returns as data."""
    subject: Subject = SUBJECTS[name][0]()
    out: dict[str, Any] = {"write": [], "load": [], "stall": [], "small": [], "flips": []}
    small = subject.make(12, 5_000_000 // 12 // 4 * 4)
    target = fresh(path / "small")
    for step in range(1, 9):
        small = subject.change(small)
        ms = 1e3 * timed(lambda s=small, n=step: subject.save(target, n, s), warm_memory=False)
        out["small"] += [ms] if step > 2 else []
    out["flips"].append(flips_returned(subject, fresh(path / "flips"), small))
    state = subject.make(nbytes // (64 * MIB), 64 * MIB)
    for step in range(1, rounds + 1):
        state = subject.change(state)
        shutil.rmtree(path / f"large{step - 1}", ignore_errors=True)
        target = fresh(path / f"large{step}")
        stall: list[float | None] = []
        seconds = timed(
            partial(
                lambda into, *given: into.append(subject.save(*given)), stall, target, step, state
            )
        )
        out["write"].append(nbytes / seconds / 1e9)
        out["stall"] += [1e3 * s for s in stall if s is not None]
        seconds = timed(
            partial(lambda *given: _touch(subject.load(*given)), target, step, state), cold=True
        )
        out["load"].append(nbytes / seconds / 1e9)
    return out


if __name__ == "__main__":
    np.random.default_rng()  # import NumPy's parts before any measurement, for every subject alike
    figures = measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print("\n" + json.dumps(figures))
