"""Which files and classes are the program's own."""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import enum
import gc
import io
import os
import re
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np

from perdure.state.generators import is_generator
from perdure.state.leaf_values import CONTAINERS, SCALAR_TYPES

_DEEPEST, _LONG = 16, 100
_WITHOUT_PARTS = (ModuleType, CodeType, FrameType, str, bytes, int, float, complex, type(None))
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_NAMESPACES = (
    "types.SimpleNamespace",
    "argparse.Namespace",
    "collections.UserDict",
    "collections.UserList",
    "collections.ChainMap",
    "torch.quasirandom.SobolEngine",
    "torch.utils.data.sampler.WeightedRandomSampler",
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, np.ufunc)
_MODELS = ("flax.linen.", "optax.")
"""Packages whose objects, other than tuples, are functions with settings."""
_LAYERS = (
    "torch.nn.modules.",
    "torch.optim.",
    "torch.ao.nn.",
    "torch.ao.quantization.",
    "transformers.",
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, of a class that a `class` statement has made
_NOTHING = object()
_MUTABLE_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
_PROCESS_PACKAGES = (
    "logging.",
    "_thread.",
    "threading.",
    "_csv.",
    "tqdm.",
    "rich.",
    "torch.utils.tensorboard.",
    "tensorboardX.",
    "wandb.",
    "mlflow.",
)
"""Packages whose objects belong to the process."""
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def is_program_file(path: str) -> bool:
    """Whether the file belongs to the program and neither to perdure nor to a library."""
    if not path or path.startswith((_PACKAGE, _STANDARD, "<frozen")):
        return False
    return _LIBRARIES.search(path) is None


@cache
def is_user_class(kind: type) -> bool:
    """Whether a class is from a file of the program, or has nothing but attributes of its own."""
    if f"{kind.__module__}.{kind.__qualname__}" in _NAMESPACES:
        return True
    if issubclass(kind, (enum.Enum, type)) or kind.__module__ == "builtins":
        return False
    return is_program_module(kind.__module__)


def loads_state(value: Any) -> bool:
    """Whether an object has `load_state_dict`. Of a mapping the class is asked, because its
    `__getattr__` may look for a key, raise KeyError, or add the key."""
    return hasattr(type(value) if isinstance(value, Mapping) else value, "load_state_dict")


def is_plain_object(value: Any) -> bool:
    """Whether the attributes of an object are its state, unless a framework takes it."""
    if loads_state(value) or dataclasses.is_dataclass(value):
        return False
    return is_user_class(type(value)) and (hasattr(value, "__dict__") or bool(slots_of(value)))


@cache
def is_made_of_attributes(kind: type) -> bool:
    """Whether `object.__new__` and attributes make an instance: it has no part in C (`class Name(str)`
    has one) and no `load_state_dict`."""
    is_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
    return is_python and kind is not object and not hasattr(kind, "load_state_dict")


def is_computed(value: Any, name: str) -> bool:
    """Whether an attribute of an object is a cached property, which can be computed again."""
    return isinstance(getattr(type(value), name, None), cached_property)


def slots_of(value: Any) -> list[str]:
    """The names of the attributes that an object has in its `__slots__` and in its bases'."""
    return [name for name in slot_names(type(value)) if hasattr(value, name)]


def slot_names(kind: type) -> list[str]:
    """The names in the `__slots__` of a class and its bases."""
    return copyreg._slotnames(kind)  # type: ignore[attr-defined]


def is_program_module(name: str) -> bool:
    """Whether a module that is imported is the program's."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    if not file and module is not None and getattr(module, "__spec__", None) is None:
        return (
            True  # `__main__` of a shell, or a module that a program made with `types.ModuleType`
        )
    return name == "__main__" or (is_program_file(file) and not name.startswith("perdure."))


@cache
def is_owner(kind: type) -> bool:
    """Whether the attributes of a module or an optimizer are saved: yes for classes of the program,
    PyTorch's layers and optimizers, models of Transformers, and metrics. In attributes of other
    libraries are resources of the process. A class that a library derives (`fully_shard`) counts as
    its base."""
    if is_made(kind) and not is_user_class(kind):
        return any(is_owner(base) for base in kind.__bases__)
    return is_user_class(kind) or kind.__module__.startswith(_LAYERS) or is_metric(kind)


@cache
def is_metric(kind: type) -> bool:
    """Whether a module is a metric of torchmetrics, which keeps its sums in attributes."""
    return any(base.__module__.startswith("torchmetrics.") for base in kind.__mro__)


def is_made(kind: type) -> bool:
    """Whether a class was made while the program runs, and no module has it."""
    module = sys.modules.get(kind.__module__)
    return "." not in kind.__qualname__ and not hasattr(module, kind.__qualname__)


def is_process_resource(value: Any) -> bool:
    """Whether a value belongs to the process and decides no step: a Python module, a logger, a lock, a
    progress bar, an experiment tracker, a file that is only written."""
    kind = type(value)
    if f"{kind.__module__}.".startswith(_PROCESS_PACKAGES) or kind is ModuleType:
        return True
    is_file = isinstance(value, io.IOBase) and not value.closed
    return is_file and value.writable() and not value.readable()


def is_bound_to_container(value: Any, owner: Any = None) -> bool:
    """Whether a value is a method of a container (`self.log.append`), or closes over its `owner`."""
    if isinstance(value, FunctionType) and owner is not None:
        return any(contents_of(cell) is owner for cell in value.__closure__ or ())
    is_method = isinstance(value, (BuiltinFunctionType, MethodWrapperType))
    return is_method and type(value.__self__) in _MUTABLE_CONTAINERS


def contents_of(cell: CellType) -> Any:
    """The value of a variable that a function closes over; a unique object if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def is_code(value: Any) -> bool:
    """Whether a value is a function, also a compiled one, or a model of Linen: it has no state."""
    if isinstance(value, partial):
        return all(map(_is_setting, (value.func, *value.args, *value.keywords.values())))
    return _is_code_class(type(value))


def changed_cells(function: Any) -> dict[str, Any]:
    """The variables that a function of the program closes over and may change: numbers, texts and
    arrays that it declares `nonlocal`, generators of random numbers, and containers of plain values.
    Another array may be a data set."""
    if not isinstance(function, FunctionType) or not is_program_module(function.__module__):
        return {}
    names, found = _stored_names(function.__code__), dict[str, Any]()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        contents = contents_of(cell)
        if isinstance(contents, (list, dict, deque, set)):
            parts = contents.values() if isinstance(contents, dict) else contents
            if all(isinstance(part, SCALAR_TYPES) for part in parts):
                found[name] = cell
        elif (
            name in names and (isinstance(contents, SCALAR_TYPES) or hasattr(contents, "dtype"))
        ) or is_generator(contents):
            found[name] = cell
    return found


def held_generators(value: Any, kinds: tuple[type, ...] = ()) -> Iterator[Any]:
    """The random generators, and objects of `kinds`, that a dataset, a sampler or a function reaches:
    itself, or through objects, classes and functions inside it. Each is returned once."""
    # By `id`, with the values: a value that is freed would leave its `id` to another.
    seen: dict[int, Any] = {}

    def look(value: Any, depth: int) -> Iterator[Any]:
        if id(value) in seen or isinstance(value, _WITHOUT_PARTS):
            return
        seen[id(value)] = value
        if is_generator(value) or isinstance(value, kinds):
            yield value
        elif depth < _DEEPEST:
            for part in _parts(value):
                yield from look(part, depth + 1)

    return look(value, 0)


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value; of a function of the program also the global variables that it uses."""
    kind = type(value)
    if isinstance(value, type):
        return vars(value).values() if is_program_module(value.__module__) else ()
    if isinstance(value, FunctionType):
        cells = map(contents_of, value.__closure__ or ())
        return [*cells, *(value.__defaults__ or ()), *_used(value)]
    if isinstance(value, np.ndarray):
        return value.flat if value.dtype == object and value.size <= _LONG else ()
    if kind.__name__ == "SeedableRandomSampler":  # Accelerate's, seeded for each epoch
        return ()
    attributes = getattr(value, "__dict__", {}).values()
    if isinstance(value, CONTAINERS) and len(value) > _LONG:
        return attributes
    bases = [base for base in kind.__mro__ if is_program_module(base.__module__)]
    # All parts of a cache, and of values without attributes (a list, a method, a running generator).
    is_known = attributes and not bases and kind.__module__ != "functools"
    return [*attributes, *bases, *(() if is_known else gc.get_referents(value))]


def _used(function: FunctionType) -> Iterator[Any]:
    """The global variables of the program's modules that a function of the program uses."""
    if not is_program_module(function.__module__):
        return
    names = dict.fromkeys(names_in(function.__code__))
    for name in names:
        found = function.__globals__.get(name)
        if not isinstance(found, ModuleType):
            yield found
        elif is_program_module(found.__name__):
            yield from (vars(found)[each] for each in names if each in vars(found))


def names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in the code of a function and of those inside it."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from names_in(inside)


@cache
def _stored_names(code: CodeType) -> frozenset[str]:
    found = dis.get_instructions(code)
    return frozenset(str(each.argval) for each in found if each.opname == "STORE_DEREF")


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str, type)) or is_code(value)


@cache
def _is_code_class(kind: type) -> bool:
    if issubclass(kind, _FUNCTIONS):
        return True
    names = [f"{base.__module__}." for base in kind.__mro__]
    is_model = any(name.startswith(_MODELS) for name in names) and not issubclass(kind, tuple)
    is_jax = names[0].startswith(("jax.", "jaxlib.")) and hasattr(kind, "__call__")  # noqa: B004
    return is_model or (is_jax and not hasattr(kind, "dtype"))
