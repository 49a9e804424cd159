"""The random generators that all code of a process shares: Python's, NumPy's, PyTorch's, Keras's.

Code that draws from them (dropout in PyTorch, `random.shuffle`, `np.random.permutation`) makes them a
part of the training state. Nothing here imports a framework: a generator counts once its framework is
imported, and that of a device once the device is in use.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from perdure.errors import CorruptionError, UnsupportedLeafError
from perdure.store.leaf import Leaf

_LOCAL = re.compile(r"process/([0-9]+)/random")
_NAMES = {"python": "Python's random", "numpy": "numpy.random", "torch": "PyTorch's CPU generator"}


class _GeneratorGroup(Protocol):
    """What is asked of the processes of a group."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def is_chief(self) -> bool: ...


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One generator in a checkpoint: its state, and whether anything was drawn from it in this run."""

    drawn: bool
    state: bytes


_decoder = msgspec.msgpack.Decoder(dict[str, Record])


class ProcessRandom:
    """The shared generators of this process, for the manager that saves and restores them."""

    def __init__(self) -> None:
        self._drawn: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """What is drawn from here on belongs to the run."""
        self._before = encoded(capture())

    def capture(self) -> dict[str, Any]:
        """The generators as they are now, for `leaves`. Takes some 50 microseconds."""
        return capture()

    def leaves(self, captured: Mapping[str, Any], process: int) -> dict[str, Leaf]:
        """The local leaf of a checkpoint that holds them."""
        states = encoded(captured)
        # One that was not there before (PyTorch was imported since) may have been drawn from.
        self._drawn |= {name for name in states if states[name] != self._before.get(name)}
        self._before = states
        by_name = {name: Record(name in self._drawn, states[name]) for name in sorted(states)}
        data = msgspec.msgpack.encode(by_name)
        return {f"process/{process}/random": Leaf("uint8", (len(data),), memoryview(data), True)}

    def restore(self, local: Mapping[str, Leaf], group: _GeneratorGroup, where: str) -> list[str]:
        """Put the generators back, as far as `local` has those of this process.

        Returns warnings: at most one, for generators that were drawn from and could not be put back.
        Raises `CorruptionError` for leaves that this did not write.
        """
        try:
            saved = records(local)
        except ValueError as error:  # of msgspec
            raise CorruptionError(
                f"{where}: its random generators cannot be read: {error}. Restore with "
                f"ManagerOptions(save_random_state=False), or an older step."
            ) from error
        same = saved.keys() == set(range(group.count))
        own = saved[group.index] if same else _common(list(saved.values()))
        lost = {name: why for name, record in own.items() if (why := put_back(name, record.state))}
        self._drawn = {name for name, record in own.items() if record.drawn and name not in lost}
        self.begin()
        reasons = [f"{_text(name)} ({why})" for name, why in lost.items() if own[name].drawn]
        if not same and group.is_chief:
            drawn = {name for each in saved.values() for name in each if each[name].drawn}
            why = f"saved by {len(saved)} processes, and this run has {group.count}"
            reasons += [f"{_text(name)} ({why})" for name in sorted(drawn - own.keys())]
        if not reasons:
            return []
        text = (
            f"{where}: random generators that this run draws from were not restored: "
            f"{', '.join(reasons)}. Random numbers drawn from them after this resume differ from those "
            f"of an uninterrupted run. Resume where it was saved, or draw from generators that are "
            f"seeded by the step."
        )
        return [text]


def records(local: Mapping[str, Leaf]) -> dict[int, dict[str, Record]]:
    """What the local leaves of a checkpoint say of the generators of each process."""
    return {
        int(found[1]): _decoder.decode(leaf.data)
        for path, leaf in local.items()
        if (found := _LOCAL.fullmatch(path))
    }


def capture() -> dict[str, Any]:
    """The shared generators by name, as copies that `encoded` turns into bytes later."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (the generator that user code shares)
    }
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):  # not in the middle of its import
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                found[f"torch cuda:{device}"] = torch.cuda.get_rng_state(device)
        if torch.backends.mps.is_available():
            found["torch mps"] = torch.mps.get_rng_state()
    if (shared := _keras_generator()) is not None:
        found["keras"] = shared
    return found


def encoded(captured: Mapping[str, Any]) -> dict[str, bytes]:
    """The bytes of each generator: equal for equal states."""
    states: dict[str, bytes] = {}
    for name, state in captured.items():
        if name == "python":
            version, words, gauss = state
            states[name] = msgspec.msgpack.encode(
                (version, np.array(words, "<u4").tobytes(), gauss)
            )
        elif name == "numpy":
            states[name] = msgspec.msgpack.encode(_packed(state))
        elif name == "keras":
            states[name] = state.astype("<u8").tobytes()
        else:
            states[name] = state.numpy().tobytes()
    return states


def put_back(name: str, state: bytes) -> str | None:
    """Put one generator back; gives the reason where it cannot be, and leaves it as it is."""
    torch = sys.modules.get("torch")
    if name.startswith("torch") and torch is None:
        return "PyTorch is not imported; import it before the restore"
    try:
        if name == "python":
            version, words, gauss = msgspec.msgpack.decode(state)
            random.setstate((version, tuple(np.frombuffer(words, "<u4").tolist()), gauss))
        elif name == "numpy":
            np.random.set_state(_unpacked(msgspec.msgpack.decode(state)))  # noqa: NPY002
        elif name == "keras":
            return _set_keras_generator(np.frombuffer(state, "<u8").astype(np.uint64))
        elif name.startswith("torch"):
            assert torch is not None
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
        else:
            return "this release of perdure does not know it"
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"its state was refused: {error}"
    return None


def _common(saved: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    """Generators that went the same way in all of several processes, so that any number can continue
    them. That of one process alone is not given to several: they would all draw the same numbers."""
    if len(saved) < 2:
        return {}
    first, *others = saved
    return {
        name: Record(any(each[name].drawn for each in saved), record.state)
        for name, record in first.items()
        if all(name in other and other[name].state == record.state for other in others)
    }


def _text(name: str) -> str:
    return _NAMES.get(name, f"the generator of {name}")


def _keras_generator() -> Any:
    """The state of the generator that layers without a seed draw from; None where there is none."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    from perdure.state.keras_state import read

    shared = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if shared is None:
        return None
    try:
        return np.array(read(shared.state), np.uint64)
    except UnsupportedLeafError:  # a seed of more than 32 bits, which TensorFlow alone takes
        return np.asarray(shared.state.value).astype(np.uint64)


def _set_keras_generator(words: np.ndarray[Any, Any]) -> str | None:
    if "keras" not in sys.modules:
        return "Keras is not imported; import it before the restore"
    import keras
    from keras.src.random import seed_generator

    from perdure.state.keras_state import write

    variable = seed_generator.global_seed_generator().state
    if (words >> np.uint64(32)).any():
        if keras.backend.standardize_dtype(variable.dtype) != "int64":
            return "its seed has more than 32 bits, which only TensorFlow takes"
        variable.assign(words.astype(np.int64))
    else:
        write({"": variable}, {"": words.astype(np.uint32)})
    return None


def _packed(value: Any) -> Any:
    """A state of NumPy's with plain values: integers of any size as text, arrays as their bytes."""
    if isinstance(value, dict):
        return {name: _packed(value[name]) for name in sorted(value)}
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"dtype": little.dtype.str, "data": little.tobytes()}
    return {"integer": str(value)} if isinstance(value, int) else value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"integer"}:
        return int(value["integer"])
    if value.keys() == {"dtype", "data"}:
        array = np.frombuffer(value["data"], value["dtype"])
        return array.astype(array.dtype.newbyteorder("="))
    return {name: _unpacked(item) for name, item in value.items()}
