"""The plain values that JAX takes as part of the structure of a module, and no leaf has: static
fields of dataclasses (Equinox, `flax.struct`), and plain attributes of Flax NNX modules."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from perdure.state.adapter import Node
from perdure.state.attribute_values import Kind, kind_of
from perdure.state.paths import join_key
from perdure.state.program_code import is_of_program
from perdure.state.walk import Walk

_MODES = ("training", "deterministic", "use_running_average")
"""Attributes of NNX that a program sets for an evaluation, and sets back."""


def static_owners(walk: Walk) -> Iterator[tuple[str, Any, list[str]]]:
    """Path and value of each module with static values, and their names."""
    if "jax" not in sys.modules:
        return
    for branch in walk.branches:
        kind = type(branch.value)
        if _may_have_fields(kind):
            yield from _inside(branch.path, branch.value)
        elif _is_registered(kind) and isinstance(branch.node, Node) and not branch.node.in_place:
            # What a class that is registered with JAX leaves out of its children.
            children = {key for key, _ in branch.node.children}
            values = vars(branch.value)
            names = [name for name in values if name not in children]
            if static := [name for name in names if kind_of(values[name]) is Kind.PLAIN]:
                yield branch.path, branch.value, static


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any, list[str]]]:
    kind = type(value)
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, Sequence):  # also the lists of NNX
        children = enumerate(value)
    elif _may_have_fields(kind):
        parts = {name: getattr(value, name, None) for name in _names(value)}
        static = [name for name in parts if _is_static(kind, name, parts[name])]
        if static:
            yield path, value, static
        children = ((name, part) for name, part in parts.items() if name not in static)
    else:
        return
    for name, part in children:
        is_container = isinstance(part, (Mapping, Sequence)) and not isinstance(part, (str, bytes))
        if is_container or _may_have_fields(type(part)):
            yield from _inside(join_key(path, str(name)), part)


def _names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [name for name in vars(value) if not name.startswith(("_pytree", "_object"))]


@cache
def _is_registered(kind: type) -> bool:
    """Whether values of a class of the program may be nodes of JAX with attributes of their own."""
    is_plain = issubclass(kind, (tuple, list, dict)) or not hasattr(kind, "__dict__")
    return is_of_program(kind) and not is_plain


@cache
def _may_have_fields(kind: type) -> bool:
    """Whether a class is a module of NNX, or a dataclass with static fields or of Equinox."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if dataclasses.is_dataclass(kind):
        return "equinox" in names or bool(_static_fields(kind))
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(kind, nnx.Module)


@cache
def _static_fields(kind: type) -> frozenset[str]:
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return frozenset(
        field.name
        for field in fields
        if field.metadata.get("static") or field.metadata.get("pytree_node") is False
    )


def _is_static(kind: type, name: str, value: Any) -> bool:
    if kind_of(value) is not Kind.PLAIN or name in _MODES:
        return False
    return not dataclasses.is_dataclass(kind) or name in _static_fields(kind)
