"""The global random generators of a process: of Python, NumPy, PyTorch and Keras.

Nothing here imports a framework: a generator is included once its framework is imported, and the
generator of a device once the device is in use.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from perdure.errors import CorruptionError
from perdure.runtime.process_group import Rank
from perdure.state.extra_members import ExtraMember, Restoring, Saving
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf
from perdure.text import counted

_LOCAL = re.compile(r"process/([0-9]+)/random")
_NAMES = {"python": "Python's random", "numpy": "numpy.random", "torch": "PyTorch's CPU generator"}


class SavedGenerator(msgspec.Struct, frozen=True, array_like=True):
    """One generator in a checkpoint: its state, and whether this run has drawn from it."""

    drawn: bool
    state: bytes


_decoder = msgspec.msgpack.Decoder(dict[str, SavedGenerator])


class ProcessRandom(ExtraMember):
    """Stores the states of the global random generators of this process. Refuses nothing."""

    def __init__(self) -> None:
        self._drawn: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """From now on, a generator whose state changes counts as drawn from."""
        self._before = capture()

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        return self.leaves(capture(), saving.process)

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        return self.put_back(restoring.leaves, restoring.group, restoring.where)

    def leaves(self, captured: Mapping[str, bytes], process: int) -> dict[str, Leaf]:
        """The leaf that holds the captured states in the checkpoint of process number `process`."""
        # A generator without an earlier state (PyTorch was imported since) may have been drawn from.
        self._drawn |= {name for name in captured if captured[name] != self._before.get(name)}
        self._before = captured
        by_name = {
            name: SavedGenerator(name in self._drawn, captured[name]) for name in sorted(captured)
        }
        data = msgspec.msgpack.encode(by_name)
        return {f"process/{process}/random": Leaf("uint8", (len(data),), memoryview(data), True)}

    def put_back(self, process_leaves: Mapping[str, Leaf], group: Rank, where: str) -> list[str]:
        """Restore the generators of this process; returns a warning about generators that the run has
        drawn from and that could not be restored. In a group of another size, only generators that
        were equal in all processes are restored."""
        try:
            saved = saved_generators(process_leaves)
        except ValueError as error:  # of msgspec
            raise CorruptionError(
                f"{where}: its random generators cannot be read: {error}. Restore with "
                f"ManagerOptions(save_random_state=False), or an older step."
            ) from error
        same = saved.keys() == set(range(group.count))
        generators = saved[group.index] if same else _common(list(saved.values()))
        failures = _restore_each({name: each.state for name, each in generators.items()})
        drawn = {name for name, each in generators.items() if each.drawn}
        self._drawn = drawn - failures.keys()
        self.begin()
        reasons = [f"{_label(name)} ({why})" for name, why in failures.items() if name in drawn]
        if not same and group.is_chief:
            drawn = {name for each in saved.values() for name in each if each[name].drawn}
            count = counted(len(saved), "process", "processes")
            why = f"saved by {count}, and this run has {group.count}"
            reasons += [f"{_label(name)} ({why})" for name in sorted(drawn - generators.keys())]
        if not reasons:
            return []
        warning = (
            f"{where}: random generators that this run draws from were not restored: "
            f"{', '.join(reasons)}. Random numbers drawn from them after this resume differ from those "
            f"of an uninterrupted run. Resume on the machine and group where it was saved, or draw "
            f"from generators that are seeded by the step."
        )
        return [warning]


def processes_of(process_leaves: Mapping[str, Leaf]) -> int:
    """How many processes saved their generators in the leaves of a checkpoint."""
    return sum(_LOCAL.fullmatch(path) is not None for path in process_leaves)


def saved_generators(process_leaves: Mapping[str, Leaf]) -> dict[int, dict[str, SavedGenerator]]:
    """The generators in a checkpoint, by process number and name; `ValueError` for damage."""
    return {
        int(match[1]): _decoder.decode(leaf.data)
        for path, leaf in process_leaves.items()
        if (match := _LOCAL.fullmatch(path))
    }


_ONE_AT_A_TIME = threading.RLock()
"""PyTorch locks a generator while it reads its state, and Python may change threads inside of that, to
one that waits for the same lock and holds Python's: neither would ever continue."""


def finish_callbacks() -> None:
    """Wait for callbacks into Python of programs that JAX computes in the background: they belong
    to steps that the program has made, and may draw from these generators."""
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "effects_barrier"):  # it is not being imported right now
        jax.effects_barrier()


def capture() -> dict[str, bytes]:
    """The present states by name; equal states have equal bytes."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 (the generator that user code shares)
    states = {
        "python": msgspec.msgpack.encode(random.getstate()),
        "numpy": msgspec.json.encode(numpy, enc_hook=np.ndarray.tolist),
    }
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):  # it is not being imported right now
        found: dict[str, Any] = {}
        with _ONE_AT_A_TIME:
            found["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                found[f"torch cuda:{device}"] = torch.cuda.get_rng_state(device)
        if torch.backends.mps.is_available():
            found["torch mps"] = torch.mps.get_rng_state()
        states |= {name: state.numpy().tobytes() for name, state in found.items()}
    if (shared := _keras_generator()) is not None:
        states["keras"] = shared.astype("<u8").tobytes()
    return states


def restore_generator(name: str, state: bytes) -> str | None:
    """Restore one generator. If that fails, it is unchanged, and the reason is returned."""
    torch = sys.modules.get("torch")
    try:
        if name == "python":
            version, words, gauss = msgspec.msgpack.decode(state)
            random.setstate((version, tuple(words), gauss))
        elif name == "numpy":
            np.random.set_state(json.loads(state))  # noqa: NPY002
        elif name == "keras":
            return _set_keras_generator(np.frombuffer(state, "<u8").astype(np.uint64))
        elif not name.startswith("torch"):
            return "this release of perdure does not support it"
        elif torch is None:
            return "PyTorch is not imported; import it before the restore"
        else:
            words = torch.from_numpy(np.frombuffer(bytearray(state), np.uint8))
            kind, _, device = name.removeprefix("torch").strip().partition(":")
            if kind == "cuda":
                if int(device) >= torch.cuda.device_count():
                    return f"this process has {torch.cuda.device_count()} CUDA devices"
                torch.cuda.set_rng_state(words, int(device))
            elif kind == "mps":
                torch.mps.set_rng_state(words)
            else:
                torch.set_rng_state(words)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"its state was refused: {error}"
    return None


def restore_all(states: Mapping[str, bytes]) -> list[str]:
    """Restore generators by name; returns a sentence about each that could not be restored."""
    return [
        f"the random generator {_label(name)} was not restored: {reason}."
        for name, reason in _restore_each(states).items()
    ]


def _restore_each(states: Mapping[str, bytes]) -> dict[str, str]:
    """Restore generators by name; returns the reason for each that could not be restored."""
    reasons = {name: restore_generator(name, state) for name, state in states.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _common(saved: Sequence[Mapping[str, SavedGenerator]]) -> dict[str, SavedGenerator]:
    """The generators with the same state in several processes. The generator of a single process is not
    given to several processes: all would draw the same numbers."""
    if len(saved) < 2:
        return {}
    first, *others = saved
    return {
        name: SavedGenerator(any(by_name[name].drawn for by_name in saved), generator.state)
        for name, generator in first.items()
        if all(name in other and other[name].state == generator.state for other in others)
    }


def _label(name: str) -> str:
    return _NAMES.get(name, f"the generator of {name}")


def _keras_generator() -> Any:
    """The state of the generator that layers without a seed draw from; None if there is none."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    from perdure.state.keras_state import seed_words

    shared = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if shared is None else seed_words(shared.state)


def _set_keras_generator(words: np.ndarray[Any, Any]) -> str | None:
    if "keras" not in sys.modules:
        return "Keras is not imported; import it before the restore"
    import keras
    from keras.src.random import seed_generator

    from perdure.state.keras_state import write_variables

    variable = seed_generator.global_seed_generator().state
    if keras.backend.standardize_dtype(variable.dtype) != "int64":
        if (words >> np.uint64(32)).any():
            return "its seed has more than 32 bits, which only TensorFlow supports"
        words = words.astype(np.uint32)
    write_variables({"": variable}, {"": words})
    return None
