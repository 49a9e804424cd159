"""Finds attributes of modules that training changes and no checkpoint has.

A plain number, string or tensor that is an attribute of a module belongs to its code: a resumed program
has that of a fresh module.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any

from perdure.state.live_objects import kind_of, live_objects
from perdure.state.paths import join_dotted, join_key

PLAIN = frozenset([type(None), bool, int, float, complex, str, tuple])
_LIBRARIES = frozenset(
    [
        *("accelerate", "diffusers", "equinox", "flax", "keras", "lightning", "optax", "peft"),
        *("pytorch_lightning", "timm", "torch", "torchaudio", "torchmetrics", "torchvision"),
        "transformers",
    ]
)
"""Packages that keep counters and caches in the attributes of their modules."""
_MODES = ("training", "deterministic", "use_running_average")
_FEW = 5
_MOST = 4096


class UnsavedAttributes:
    """Compares the attributes of the modules in a state with those at the first save."""

    def __init__(self) -> None:
        self._modules: dict[str, tuple[weakref.ref[Any], Any]] = {}
        # By path, the flags of modules that the program restores into.
        self._flags: dict[str, tuple[weakref.ref[Any], Any]] = {}
        self._static: dict[str, Any] | None = None
        self._named: set[str] = set()
        self._steps: Any = None

    def notes(self, state: Any) -> Iterator[str]:
        """All warnings about a state that is saved."""
        saved = _torch("unsaved").SavedValues(state) if "torch" in sys.modules else None
        if changed := self.changed(state, saved):
            yield changed
        yield from self.unsaved(state, saved)

    def unsaved(self, state: Any, saved: Any = None) -> Iterator[str]:
        """Warnings about optimizers and the like that others own, and about tensors that are stepped
        and that the state does not have; once for each path."""
        if "torch" not in sys.modules:
            return
        saved = saved or _torch("unsaved").SavedValues(state)
        self._steps = self._steps or _torch("unsaved").SteppedTensors()
        found = {
            join_dotted(path, name): type(inner).__name__
            for path, owner in live_objects(state)
            for name, inner in _torch("unsaved").unsaved_inner(owner, saved)
        }
        if names := [f"{path} ({kind})" for path, kind in found.items() if path not in self._named]:
            self._named.update(found)
            yield (
                f"no checkpoint has the state of {_few(names)}, which a module or an optimizer owns: "
                f"it is not in the owner's `state_dict()`, and a resume begins without it (momentum, "
                f"learning rate). Make it a member of the state too, such as "
                f"`{{'model': model, 'optimizer': model.optimizer}}`, or return its state in the "
                f"owner's `state_dict` and load it in `load_state_dict`."
            )
        for path, tensors in self._steps.outside(saved):
            yield (
                f"{path or '(the state itself)'}: the {type(saved.optimizers[path]).__name__} steps "
                f"tensors that no member of the state has: {tensors}. A resume begins with their fresh "
                f"values. Put them, or the module that has them, into the state. If they belong to a "
                f"module that the run has replaced, give the optimizer the parameters of the new one."
            )

    def expect(self, fresh: Any) -> None:
        """Compare what JAX takes as structure with that of `fresh`, which a resume begins with.

        Of the attributes of PyTorch modules only flags; the others are compared from the first save on,
        since the first forward pass may make caches.
        """
        self._static = _static_values(fresh)
        if torch := sys.modules.get("torch"):
            self._flags = {
                path: (
                    weakref.ref(value),
                    _torch("attributes").ModuleAttributes(value, flags_only=True),
                )
                for path, value in live_objects(fresh)
                if isinstance(value, torch.nn.Module)
            }

    def changed(self, state: Any, saved: Any = None) -> str | None:
        """A warning about attributes that have changed and were not named before; else None."""
        changed = [*self._changed_modules(state, saved), *self._changed_static(state)]
        paths = [path for path in changed if path not in self._named]
        if not paths:
            return None
        self._named.update(paths)
        return (
            f"attributes of modules or optimizers have changed since the restore or the first save, "
            f"and no checkpoint has them: {_few(paths)}. After a resume they have "
            f"their fresh values. If later steps depend on them, let the state have them: a persistent "
            f"buffer of the module (`register_buffer`) or the optimizer's `state_dict` in PyTorch, "
            f"an `nnx.Variable` in Flax, an array in place of a static field in Equinox and JAX. "
            f"Nothing is lost if they are only a log or a cache."
        )

    def _changed_modules(self, state: Any, saved: Any = None) -> Iterator[str]:
        if (torch := sys.modules.get("torch")) is None:
            return
        saved = saved or _torch("unsaved").SavedValues(state)
        for path, value in live_objects(state):
            if isinstance(value, torch.nn.Module):
                kind = "ModuleAttributes"
            elif isinstance(value, torch.optim.Optimizer) and not is_from_library(type(value)):
                kind = "OptimizerAttributes"
            else:
                continue
            module, attributes = self._modules.get(path, (None, None))
            if module is None or module() is not value or attributes is None:
                attributes = getattr(_torch("attributes"), kind)(value)
                self._modules[path] = weakref.ref(value), attributes
                module, attributes = self._flags.pop(path, (None, None))
                if module is None or module() is not value or attributes is None:
                    continue
            yield from (join_dotted(path, name) for name in attributes.changed(saved))

    def _changed_static(self, state: Any) -> list[str]:
        static = _static_values(state)
        before, self._static = self._static, self._static or static
        return [
            path
            for path, value in (static or {}).items()
            if before is not None and path in before and not is_same(before[path], value)
        ]


def _few(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (
        f" and {len(names) - _FEW:,} more" if len(names) > _FEW else ""
    )


def _torch(name: str) -> Any:
    return import_module(f"perdure.state.torch_{name}")


def _static_values(state: Any) -> dict[str, Any] | None:
    """The plain values in a state that JAX takes as part of its structure; None without JAX."""
    if "jax" not in sys.modules:
        return None
    static: dict[str, Any] = {}
    _add_static(state, "", static, set())
    return static


def is_same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; a NaN is equal to itself."""
    return one is other or (type(one) is type(other) and (one == other or repr(one) == repr(other)))


@cache
def is_from_library(kind: type) -> bool:
    """Whether the class belongs to a framework, which decides what its attributes are."""
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


def _add_static(value: Any, path: str, static: dict[str, Any], seen: set[int]) -> None:
    """Add by path what JAX takes as part of the structure: static fields of dataclasses, plain
    attributes of Flax NNX modules, auxiliary data of classes that the program has registered."""
    kind = kind_of(type(value))
    children: Any = ()
    if kind == "object" and _is_torchs(type(value)):
        return  # whose attributes are compared elsewhere, and may contain themselves
    if kind == "mapping":
        children = value.items()
    elif kind == "sequence":
        children = enumerate(value)
    elif kind in ("object", "attributes") and id(value) not in seen:
        seen.add(id(value))
        attributes = dict(_plain_attributes(value))
        children = [
            (key, child) for key, child in _attributes(value).items() if key not in attributes
        ]
        static |= {join_key(path, key): child for key, child in attributes.items()}
        # `register_dataclass(kind, data_fields, meta_fields)` leaves no mark in the fields.
        node = None if attributes else _registered_node(value)
        if node is not None:
            static[join_key(path, "(meta fields)")] = _plain_part(node[1])
    elif id(value) not in seen and (node := _registered_node(value)) is not None:
        seen.add(id(value))
        parts, auxiliary = node
        children = enumerate(parts)
        static[join_key(path, "(auxiliary data)")] = _plain_part(auxiliary)
    for key, child in children:
        if kind_of(type(child)) != "other" or not _is_leaf(type(child)):
            _add_static(child, join_key(path, str(key)), static, seen)


@cache
def _is_torchs(kind: type) -> bool:
    return any(base.__module__.startswith(("torch.nn.", "torch.optim.")) for base in kind.__mro__)


_LEAVES: set[type] = set()


def _is_leaf(kind: type) -> bool:
    """Whether values of a class are known to be no nodes of JAX."""
    return kind in _LEAVES or kind in PLAIN


def _registered_node(value: Any) -> tuple[Iterable[Any], Any] | None:
    """(children, auxiliary data) of an object whose class is registered with JAX by the program."""
    kind = type(value)
    if _is_leaf(kind) or is_from_library(kind):
        return None
    node = sys.modules["jax"].tree_util.default_registry.flatten_one_level(value)
    if node is None:
        _LEAVES.add(kind)
    return node


def is_plain(value: Any) -> bool:
    """Whether a value is made of few plain ones alone, which are equal if they were made again."""
    nodes, count = [value], 0
    while nodes:
        part = nodes.pop()
        count += 1
        if count > _MOST:  # it may also contain itself
            return False
        if isinstance(part, (tuple, list, dict)):
            nodes += islice(part.values() if isinstance(part, dict) else part, _MOST)
        elif type(part) not in PLAIN:
            return False
    return True


def _plain_part(value: Any) -> Any:
    """What is plain in a value, with the class in place of what is not."""
    if isinstance(value, (tuple, list)):
        return [_plain_part(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain_part(part) for key, part in value.items()}
    return value if type(value) in PLAIN else type(value)


def _attributes(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


def _plain_attributes(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if is_from_library(kind):
        return
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if _is_static(field)]
    elif _is_nnx(kind):
        names = [name for name in _attributes(value) if not name.startswith(("_pytree", "_object"))]
    else:
        return
    for name in names:
        plain = getattr(value, name, ...)
        if name not in _MODES and type(plain) in PLAIN and is_plain(plain):
            yield name, plain


def _is_static(field: Any) -> bool:
    """Whether a field is no leaf: of Equinox and JAX (`static`), or of `flax.struct`."""
    return bool(field.metadata.get("static")) or field.metadata.get("pytree_node") is False


@cache
def _is_nnx(kind: type) -> bool:
    return any(base.__module__.startswith("flax.nnx") for base in kind.__mro__)
