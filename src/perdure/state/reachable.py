"""The values that the objects and the running functions of a program reach, by name.

A manager checks whether a program changes, under such a name, a value that it gave to a restore; the
drill compares the values of two processes, and puts back values that a resumed process lacks.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import gc
import io
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from perdure.state import process_random
from perdure.state.generators import generator_name, is_generator, read_generator, write_generator
from perdure.state.leaf_values import SCALAR_TYPES
from perdure.state.program_code import is_program_file, is_program_module, loads_state

PLAIN_TYPES = (*SCALAR_TYPES, np.generic)
_DEEPEST = 6
_MOST_ITEMS = 64  # of a container that is looked into
_ENVIRONMENT = dict(os.environ)
"""The variables with which the process began, as far as this module knows."""
_DEFAULTS = {
    "torch.get_default_dtype()": (
        "torch",
        lambda torch: str(torch.get_default_dtype()).rpartition(".")[2],
        lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "jax.config.jax_enable_x64": (
        "jax",
        lambda jax: jax.config.jax_enable_x64,
        lambda jax, value: jax.config.update("jax_enable_x64", value),
    ),
    "keras.config.floatx()": (
        "keras",
        lambda keras: keras.config.floatx(),
        lambda keras, name: keras.config.set_floatx(name),
    ),
}
"""Defaults of a framework for new arrays: the framework, and how they are read and set."""


@dataclass(frozen=True)
class Reachable:
    """A value that the program reaches: `velocity`, `sampler.position`, `train.rate` (a variable of
    the function `train`). `bind` gives the name another value."""

    name: str
    get: Callable[[], Any]
    bind: Callable[[Any], object]


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


def frames_of_threads() -> list[FrameType]:
    """The frames of the program in all other threads."""
    here = threading.get_ident()
    others = [frame for thread, frame in sys._current_frames().items() if thread != here]
    return [each for frame in others for each in program_frames(frame)]


def reachable_values(frames: Sequence[FrameType], *, unnamed: bool = True) -> dict[str, Reachable]:
    """The values that the program reaches by name, from its modules and `frames`.

    With `unnamed` also objects of its classes to which no variable leads, such as a callback in a
    list; the search for these looks at all objects of the process.
    """
    found: dict[str, Reachable] = {}
    seen: set[int] = set()
    for reached in _variables(frames):
        _expand(reached, found, seen, depth=0)
    if unnamed:
        for reached in _unnamed(seen):
            _expand(reached, found, seen, depth=0)
    for reached in _process_values():
        found[reached.name] = reached
    return found


def _variables(frames: Sequence[FrameType]) -> Iterator[Reachable]:
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


def _unnamed(seen: set[int]) -> Iterator[Reachable]:
    modules = {module.__name__ for module in _program_modules()}
    counts: dict[str, int] = {}
    for value in gc.get_objects():
        home = type(value).__module__
        if isinstance(home, str) and home in modules and id(value) not in seen:
            name = type(value).__name__
            counts[name] = counts.get(name, 0) + 1
            yield _fixed(name if counts[name] == 1 else f"{name} {counts[name]}", value)


def _process_values() -> Iterator[Reachable]:
    """The global generators, the changed variables of the environment, and defaults of frameworks."""
    shared: Any = {"python": random._inst, "numpy": np.random.mtrand._rand}  # type: ignore[attr-defined]
    if (torch := sys.modules.get("torch")) is not None:
        shared["torch"] = getattr(torch, "default_generator", None)
    for name in process_random.capture():
        yield _fixed(f"generator of {name}", shared.get(name) or GlobalGenerator(name))
    yield Reachable("os.environ", _changed_environment, _set_environment)
    for name, (library, get, put) in _DEFAULTS.items():
        if (module := sys.modules.get(library)) is not None and hasattr(module, "__version__"):
            yield Reachable(name, functools.partial(get, module), functools.partial(put, module))


def _changed_environment() -> dict[str, str | None]:
    names = _ENVIRONMENT.keys() | os.environ.keys()
    now = {name: os.environ.get(name) for name in sorted(names)}
    return {name: value for name, value in now.items() if value != _ENVIRONMENT.get(name)}


def _set_environment(changed: Mapping[str, str | None]) -> None:
    for name in _changed_environment().keys() | changed.keys():
        value = changed.get(name, _ENVIRONMENT.get(name))
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _program_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and is_program_module(name)
    ]


def _variable(values: dict[str, Any], key: str, name: str) -> Reachable:
    return Reachable(name, lambda: values.get(key), lambda value: values.__setitem__(key, value))


def _attribute(owner: Any, key: str, name: str) -> Reachable:
    get = functools.partial(getattr, owner, key, None)
    return Reachable(name, get, functools.partial(setattr, owner, key))


def _fixed(name: str, value: Any) -> Reachable:
    return Reachable(name, lambda: value, lambda _: None)


def _expand(reached: Reachable, found: dict[str, Reachable], seen: set[int], depth: int) -> None:
    """Add the value, or its parts if it is an object or a function of the program.

    An object that raises when asked for an attribute is left out (it stands for a missing library).
    """
    try:
        value = reached.get()
        if isinstance(value, PLAIN_TYPES):
            found.setdefault(reached.name, reached)
            return
        if id(value) in seen or depth > _DEEPEST or isinstance(value, (ModuleType, io.IOBase)):
            return
        if isinstance(value, Mapping) or not (
            isinstance(value, tuple) or hasattr(value, "addressable_shards")
        ):
            seen.add(id(value))  # an immutable value is put back under each of its names
        parts = _parts(value, reached.name)
        if parts is None or is_whole(value):
            found.setdefault(reached.name, reached)
        if parts is None and isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = (
                _fixed(f"{reached.name}[{key!r}]", item)
                for key, item in items
                if _attributes(item) is not None
            )
        for part in parts or ():
            _expand(part, found, seen, depth + 1)
    except Exception:  # noqa: BLE001 (objects of any library, read where they do not expect it)
        return


def _parts(value: Any, name: str) -> Iterable[Reachable] | None:
    """The parts of a function or an object of the program; None for any other value."""
    if isinstance(value, types.FunctionType):
        return _function_values(value, name)
    if isinstance(value, ContextVar):
        return [Reachable(f"{name}.get()", lambda: value.get(None), value.set)]
    if isinstance(value, functools.partial):
        return [_fixed(f"{name}.func", value.func), _fixed(f"{name}.args", value.args)]
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [_fixed(f"{name}.__self__", value.__self__)]
    if (attributes := _attributes(value)) is None:
        return None
    hidden = "_" if is_whole(value) else "__"  # what its state_dict holds
    return [
        _attribute(value, key, f"{name}.{key}") for key in attributes if not key.startswith(hidden)
    ]


def _function_values(function: types.FunctionType, name: str) -> Iterator[Reachable]:
    """The values that a function keeps between calls: closed-over variables, mutable defaults."""
    if not is_program_file(function.__code__.co_filename):
        return
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _attribute(cell, "cell_contents", f"{name}.{key}")
    for number, value in enumerate(function.__defaults__ or ()):
        if not isinstance(value, PLAIN_TYPES):
            yield _fixed(f"{name}.default {number}", value)


def _attributes(value: Any) -> list[str] | None:
    owner = value if isinstance(value, type) else type(value)
    if isinstance(value, threading.local):
        return list(vars(value))
    if not is_program_module(owner.__module__):
        return None
    slots = [] if owner is value else copyreg._slotnames(owner)  # type: ignore[attr-defined]
    return [*getattr(value, "__dict__", ()), *slots]


def is_whole(value: Any) -> bool:
    """Whether an object of the program is put back as a whole, as a module of PyTorch is."""
    return loads_state(value) and not isinstance(value, type)


@dataclass(frozen=True)
class GlobalGenerator:
    """A generator of the process that is no object of Python, by its name in `process_random`."""

    name: str


def generator_state(value: Any) -> tuple[str, Any] | None:
    """The kind of a random generator and a copy of its state; None for any other value."""
    if isinstance(value, GlobalGenerator):
        return value.name.partition(" ")[0], process_random.capture()[value.name]
    if not is_generator(value):
        return None
    return generator_name(value), copy.deepcopy(read_generator(value))


def set_generator_state(value: Any, state: tuple[str, Any]) -> None:
    """Give a generator the state that `generator_state` returned for one of its kind."""
    if isinstance(value, GlobalGenerator):
        process_random.restore_generator(value.name, state[1])
    else:
        write_generator(value, state[1])
