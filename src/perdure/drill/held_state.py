"""Inside a program that is being diagnosed: what its process holds, by name, and how to put it back.

A unit is a variable of the program, an attribute of one of its objects, or a random generator of the
process. `freeze` copies a value into plain data that another process can compare and put back. Values
that have no such form are left out; nothing is put back that was not asked for by name.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np

import perdure
from perdure.state import process_random

Frozen = tuple[Any, ...]
"""A tag and the data of a value; see `freeze`."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_DEEPEST = 6
_MOST_ITEMS = 10_000
_SMALL = 64  # numbers; more count as an array
_PACKAGE = str(Path(perdure.__file__).parent) + os.sep
_LIBRARIES = tuple(
    path.rstrip(os.sep) + os.sep
    for path in {
        *site.getsitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        site.getusersitepackages(),
    }
)


@dataclass(frozen=True)
class Unit:
    """One thing that the process holds.

    Attributes:
        name: `velocity`, `sampler.position`, `train.rate` (a variable of the function `train`).
        get: Returns its present value.
        bind: Gives the name another value.
    """

    name: str
    get: Callable[[], Any]
    bind: Callable[[Any], None]


def is_program_file(path: str) -> bool:
    """Whether the file belongs to the program and neither to perdure nor to a library."""
    return bool(path) and not path.startswith((_PACKAGE, "<frozen", *_LIBRARIES))


def is_program_frame(frame: FrameType) -> bool:
    """Whether the code of the program runs in `frame`."""
    named = frame.f_globals.get("__name__", "")
    return named == "__main__" or (
        is_program_file(frame.f_code.co_filename) and not named.startswith("perdure.")
    )


def program_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the program in `frame` and its callers, innermost first."""
    frames = []
    while frame is not None:
        if is_program_frame(frame):
            frames.append(frame)
        frame = frame.f_back
    return frames


def held_units(frames: Sequence[FrameType]) -> dict[str, Unit]:
    """All units of the process by name; `frames` are those of the program that run now."""
    found: dict[str, Unit] = {}
    seen: set[int] = set()
    for unit in _named(frames):
        _expand(unit, found, seen, depth=0)
    for unit in _nameless(seen):
        _expand(unit, found, seen, depth=0)
    for name in process_random.capture():
        found[f"generator of {name}"] = _global_generator(name)
    return found


def freeze(value: Any, depth: int = 0) -> Frozen | None:
    """Copy `value` into plain data; None if it has no such form, or cannot be read at this moment.

    For instance, `fit` on JAX holds the values of Keras's variables itself while it trains.
    """
    if depth > _DEEPEST:
        return None
    try:
        return _frozen(value, depth)
    except Exception:  # noqa: BLE001 (objects of any library, read where they do not expect it)
        return None


def _frozen(value: Any, depth: int) -> Frozen | None:
    if isinstance(value, _SCALARS):
        return ("scalar", value)
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else ("numpy", value.copy())
    if (generator := _generator_state(value)) is not None:
        return ("generator", generator)
    kind = type(value).__module__.partition(".")[0]
    if kind == "torch" and hasattr(value, "detach") and hasattr(value, "untyped_storage"):
        return ("torch", value.detach().clone())
    if kind in ("jax", "jaxlib") and hasattr(value, "addressable_shards"):
        return _frozen_jax(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _frozen_state(value)
    if kind == "keras" and hasattr(value, "variables"):
        return ("variables", [np.array(each) for each in value.variables])
    return _frozen_container(value, depth)


def equal(one: Frozen | None, other: Frozen | None) -> bool:
    """Whether two frozen values have the same bits."""
    return _comparable(one) == _comparable(other)


def kind_of(frozen: Frozen) -> str:
    """ "generator", "number" (a few numbers, a schedule) or "array"."""
    if frozen[0] == "generator":
        return "generator"
    return "number" if _size(frozen) <= _SMALL else "array"


def put_back(current: Any, frozen: Frozen) -> Any:
    """Give `current` the frozen value, in place if that is possible; returns what to bind."""
    tag, data = frozen[0], frozen[1]
    if tag == "generator":
        if data[0] == "global":
            return data[1]
        _set_generator_state(current, data)
        return current
    if tag == "numpy":
        same = isinstance(current, np.ndarray) and current.shape == data.shape
        if same and current.dtype == data.dtype and current.flags.writeable:
            np.copyto(current, data)
            return current
        return data.copy()
    if tag == "torch":
        if hasattr(current, "detach") and current.shape == data.shape:
            current.detach().copy_(data)
            return current
        return data.clone()
    if tag == "jax":
        return _thawed_jax(frozen)
    if tag == "state":
        current.load_state_dict(copy.deepcopy(data))
        return current
    if tag == "variables":
        for variable, value in zip(current.variables, data, strict=True):
            variable.assign(value)
        return current
    return _put_container(current, tag, data)


# ---------------------------------------------------------------- where units are found


def _named(frames: Sequence[FrameType]) -> Iterator[Unit]:
    """The variables of the program: of its modules and of the functions that run now."""
    for frame in frames:
        if frame.f_locals is not frame.f_globals:
            values, name = frame.f_locals, frame.f_code.co_name
            for key in list(values):
                yield _variable(values, key, f"{name}.{key}")
    for module in _program_modules():
        prefix = "" if module.__name__ == "__main__" else f"{module.__name__}."
        values = vars(module)
        for key in [key for key in values if not key.startswith("__")]:
            yield _variable(values, key, f"{prefix}{key}")


def _nameless(seen: set[int]) -> Iterator[Unit]:
    """Objects of the program's classes that no variable names, such as a callback in a list."""
    modules = {module.__name__ for module in _program_modules()}
    counts: dict[str, int] = {}
    for value in gc.get_objects():
        home = type(value).__module__
        if isinstance(home, str) and home in modules and id(value) not in seen:
            name = type(value).__name__
            counts[name] = counts.get(name, 0) + 1
            title = name if counts[name] == 1 else f"{name} {counts[name]}"
            yield Unit(title, lambda value=value: value, lambda _: None)


def _program_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and (name == "__main__" or is_program_file(getattr(module, "__file__", None) or ""))
        and not name.startswith("perdure")
    ]


def _variable(values: dict[str, Any], key: str, name: str) -> Unit:
    return Unit(name, lambda: values.get(key), lambda value: values.__setitem__(key, value))


def _attribute(owner: Any, key: str, name: str) -> Unit:
    return Unit(name, lambda: getattr(owner, key, None), lambda value: setattr(owner, key, value))


def _expand(unit: Unit, found: dict[str, Unit], seen: set[int], depth: int) -> None:
    """Add the unit, or what belongs to it if it is an object or a function of the program."""
    value = unit.get()
    if isinstance(value, _SCALARS):
        found.setdefault(unit.name, unit)
        return
    if id(value) in seen or depth > _DEEPEST or isinstance(value, (ModuleType, io.IOBase)):
        return
    if not (isinstance(value, tuple) or hasattr(value, "addressable_shards")):
        seen.add(id(value))  # what cannot change in place is put back under each of its names
    if isinstance(value, types.FunctionType):
        for part in _of_function(value, unit.name):
            _expand(part, found, seen, depth + 1)
    elif (owner := _program_object(value)) is not None:
        hidden = "_" if _is_leaf(value) else "__"  # what its state_dict holds
        for key in list(owner):
            if not key.startswith(hidden):
                _expand(_attribute(value, key, f"{unit.name}.{key}"), found, seen, depth + 1)
        if _is_leaf(value):
            found.setdefault(unit.name, unit)
    else:
        found.setdefault(unit.name, unit)
        if isinstance(value, (list, tuple, dict)) and len(value) <= _SMALL:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if _program_object(item) is not None:
                    part = Unit(f"{unit.name}[{key!r}]", lambda item=item: item, lambda _: None)
                    _expand(part, found, seen, depth + 1)


def _of_function(function: types.FunctionType, name: str) -> Iterator[Unit]:
    """What a function keeps between calls: closed-over variables and mutable default values."""
    if not is_program_file(function.__code__.co_filename):
        return
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _attribute(cell, "cell_contents", f"{name}.{key}")
    for number, value in enumerate(function.__defaults__ or ()):
        if not isinstance(value, _SCALARS):
            yield Unit(f"{name}.default {number}", lambda value=value: value, lambda _: None)


def _program_object(value: Any) -> Any:
    """The attributes of an object or class of the program; None for anything else."""
    owner = value if isinstance(value, type) else type(value)
    module = sys.modules.get(owner.__module__)
    if owner.__module__.startswith("perdure.") or module is None:
        return None
    if owner.__module__ == "__main__" or is_program_file(getattr(module, "__file__", None) or ""):
        return getattr(value, "__dict__", None)
    return None


def _is_leaf(value: Any) -> bool:
    """Whether an object of the program is put back as a whole, as a module of PyTorch is."""
    return hasattr(value, "load_state_dict") and not isinstance(value, type)


def _global_generator(name: str) -> Unit:
    def bind(value: Any) -> None:
        if isinstance(value, bytes):
            process_random.restore_generator(name, value)

    def get() -> _Global:
        return _Global(process_random.encode(process_random.capture())[name])

    return Unit(f"generator of {name}", get, bind)


class _Global:
    """The state of a global generator of the process, as bytes."""

    def __init__(self, state: bytes) -> None:
        self.state = state


# ---------------------------------------------------------------- generators


def _generator_state(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, _Global):
        return "global", value.state
    if isinstance(value, np.random.Generator):
        return "numpy", copy.deepcopy(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return "legacy", value.get_state(legacy=False)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else ("python", value.getstate())
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return "torch", value.get_state().clone()
    return None


def _set_generator_state(value: Any, state: tuple[str, Any]) -> None:
    kind, data = state
    if kind == "numpy":
        value.bit_generator.state = data
    elif kind == "legacy":
        value.set_state(data)
    elif kind == "python":
        value.setstate(data)
    elif kind == "torch":
        value.set_state(data)


# ---------------------------------------------------------------- frozen values


def _frozen_jax(value: Any) -> Frozen | None:
    import jax

    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("jax", np.asarray(jax.random.key_data(value)), "key")
    return ("jax", np.asarray(value), "weak" if value.weak_type else "")


def _thawed_jax(frozen: Frozen) -> Any:
    import jax

    _, data, form = frozen
    if form == "key":
        return jax.random.wrap_key_data(data)
    if form == "weak":
        return jax.numpy.asarray(data[()].item())
    return jax.numpy.asarray(data)


def _frozen_state(value: Any) -> Frozen | None:
    try:
        return ("state", copy.deepcopy(value.state_dict()))
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return None


def _frozen_container(value: Any, depth: int) -> Frozen | None:
    if isinstance(value, dict):
        if len(value) > _MOST_ITEMS or not all(
            isinstance(key, (*_SCALARS, tuple)) for key in value
        ):
            return None
        return ("dict", {key: freeze(item, depth + 1) for key, item in value.items()})
    if isinstance(value, (list, deque, tuple)) and len(value) <= _MOST_ITEMS:
        tag = "tuple" if isinstance(value, tuple) else "list"
        parts = [freeze(item, depth + 1) for item in value]
        return None if any(part is None for part in parts) else (tag, parts)
    if isinstance(value, (set, frozenset)) and all(isinstance(item, _SCALARS) for item in value):
        return ("set", sorted(value, key=repr))
    return None


def _put_container(current: Any, tag: str, data: Any) -> Any:
    if tag == "dict" and isinstance(current, dict):
        for key in [key for key in current if key not in data]:
            del current[key]
        for key, item in data.items():
            if item is not None:
                current[key] = put_back(current.get(key), item)
        return current
    if tag == "list" and isinstance(current, (list, deque)):
        old = [*current, *[None] * len(data)]
        new = [put_back(item, part) for item, part in zip(old, data, strict=False)]
        current.clear()
        current.extend(new)
        return current
    if tag == "tuple":
        old = [*(current if isinstance(current, tuple) else ()), *[None] * len(data)]
        new = [put_back(item, part) for item, part in zip(old, data, strict=False)]
        if hasattr(current, "_fields"):
            return type(current)(*new)
        return tuple(new)
    if tag == "set" and isinstance(current, set):
        current.clear()
        current.update(data)
        return current
    if tag == "scalar":
        return data
    raise TypeError(f"a {tag} cannot be put in place of a {type(current).__name__}")


def _comparable(value: Any) -> Any:
    """Plain data in which equal bits compare equal."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (str(value.dtype), value.tobytes())
    if isinstance(value, (float, complex)):
        return repr(value)
    if isinstance(value, dict):
        return {repr(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if hasattr(value, "untyped_storage"):
        return (str(value.dtype), tuple(value.shape), repr(value.cpu().flatten().tolist()))
    return (type(value).__name__, repr(value))


def _size(value: Any) -> int:
    """How many numbers there are in plain data."""
    if isinstance(value, np.ndarray):
        return int(value.size)
    if hasattr(value, "untyped_storage"):
        return int(value.numel())
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 1
