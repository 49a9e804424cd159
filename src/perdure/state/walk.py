"""Which adapter takes a value, and how the path of a leaf is put together and named in errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, Spec, Stateful
from perdure.state.builtin import Builtin
from perdure.state.per_rank import PerRank, per_rank_node
from perdure.store.format import escape
from perdure.store.leaf import Leaf

# Before the built-in one, because what a framework registered (a dataclass with static fields) is
# its own to take apart. Flax and Equinox before JAX for the same reason, and Keras before PyTorch,
# one of whose modules a Keras layer is on that backend.
_FRAMEWORKS = {
    "keras": "perdure.state.keras_state",
    "flax.nnx": "perdure.state.flax_state",
    "equinox": "perdure.state.equinox_state",
    "jax": "perdure.state.jax_state",
    "torch": "perdure.state.torch_state",
}


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that are imported, and the built-in one last."""
    loaded = [_load(module) for name, module in _FRAMEWORKS.items() if name in sys.modules]
    return [*loaded, _builtin]


def node_of(
    value: Any, path: str, among: Sequence[Adapter], stored: Mapping[str, Spec] | None
) -> Node | Stateful:
    """The interior value at `path`; raises `UnsupportedLeafError` for one that no adapter takes.

    `stored` has the specs of the whole checkpoint while restoring.
    """
    below = None if stored is None else _Below(stored, path)
    if isinstance(value, PerRank):
        return per_rank_node(value, below, path)
    for adapter in among:
        if (node := adapter.node(value, below)) is not None:
            return node
    raise UnsupportedLeafError(
        f"a value of type {type_name(value)} has no exact form in a checkpoint. Give it `state_dict` "
        f"and `load_state_dict`, turn it into arrays and scalars, or leave it out of the state."
    )


def leaf_adapter(value: Any, among: Sequence[Adapter]) -> tuple[Adapter, Spec] | None:
    """The adapter for which a value is a leaf, and its dtype and shape."""
    for adapter in among:
        if (spec := adapter.spec(value)) is not None:
            return adapter, spec
    return None


def load_leaf(adapter: Adapter, like: Any, leaf: Leaf) -> Any:
    """An array such as `like` with the bits of `leaf`."""
    if not leaf.is_weak:
        return adapter.load(like, leaf)
    # Only JAX has weak types. A number of Python's in the target is a weakly typed array after the
    # first compiled step, and as a NumPy scalar it would be a strong one.
    if "jax" in sys.modules:
        jax = _load(_FRAMEWORKS["jax"])
        if adapter is jax or type(like) in (int, float, complex):
            return jax.load(like, leaf)
    return adapter.load(like, leaf.strong())


def nested_too_deeply() -> UnsupportedLeafError:
    """The error about a state that the call stack cannot follow."""
    return UnsupportedLeafError(
        f"the state contains itself, or is nested deeper than Python's limit for calls "
        f"({sys.getrecursionlimit()}). Save a tree of containers without such a loop."
    )


def type_name(value: Any) -> str:
    """`torch.nn.modules.linear.Linear`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def join(path: str, key: str) -> str:
    """The path of a child; an empty key adds nothing."""
    if not key:
        return path
    if key.isalnum():
        part = key
    else:
        part = escape(key)
        try:
            part.encode()
        except UnicodeEncodeError:
            error = UnsupportedLeafError(
                f"a key or name is {key!r}, which is not valid Unicode; rename it, because keys become "
                f"leaf paths."
            )
            name_error(error, path)
            raise error from None
    return f"{path}/{part}" if path else part


class _Below(Mapping[str, Spec]):
    """The part of a mapping under one path, made only when an adapter looks at it."""

    def __init__(self, stored: Mapping[str, Spec], path: str) -> None:
        self._stored = stored
        self._prefix = f"{path}/" if path else ""

    def __iter__(self) -> Iterator[str]:
        cut = len(self._prefix)
        return (path[cut:] for path in self._stored if path.startswith(self._prefix))

    def __getitem__(self, key: str) -> Spec:
        return self._stored[self._prefix + key]

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Named:
    """Puts the leaf path in front of a `StateError` that comes from below."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StateError):
            name_error(error, self._path)


def name_error(error: StateError, path: str) -> None:
    """Put `path` in front of an error, unless a path is there already."""
    if not hasattr(error, "path"):
        error.path = path  # type: ignore[attr-defined]
        if not isinstance(error, MismatchError):
            error.args = (f"{path or '(the state itself)'}: {error}",)


_builtin = Builtin()


@cache
def _load(module: str) -> Adapter:
    return import_module(module).ADAPTER
