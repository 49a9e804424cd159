"""A state as `{leaf path: Leaf}`, and back into a template.

Invariant of `restore`: nothing is changed, also not in place, before the whole template has been
compared with the checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, Spec
from perdure.state.arena import Arena
from perdure.state.builtin import Builtin, plain_value
from perdure.store.collector import collector_paused
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


def flatten(state: Any) -> dict[str, Leaf]:
    """Every leaf of `state` by its path, sharing memory with the live arrays where it can.

    Paths join dict keys, field names and positions with `/`: `model/dense/kernel`. Raises
    `UnsupportedLeafError` naming the path of a value that has no exact form.
    """
    leaves: dict[str, Leaf] = {}
    _collect([("", state)], "", _adapters(), leaves)
    return leaves


def snapshot(state: Any, into: Arena | None = None) -> dict[str, Leaf]:
    """`flatten`, safe to use after `state` changes: whatever can change in place is copied.

    The copies lie in `into`, where they stay until the next snapshot into it, or in new memory.
    """
    with collector_paused():
        return (into or Arena()).hold(flatten(state))


def restore(like: Any, leaves: Mapping[str, Leaf]) -> Any:
    """`like` with the bits of `leaves`: new containers, in place for modules and optimizers.

    `like` gives structure, array kind, device and sharding; its values are not read. Raises
    `MismatchError` that lists every difference in structure, dtype and shape by leaf path; nothing
    has been changed then.
    """
    stored = {path: Spec(leaf.dtype, leaf.shape) for path, leaf in leaves.items()}
    wanted = {path: _spec(path, value, adapter) for path, value, adapter in _walk(like, "", stored)}
    if lines := differences(wanted, stored):
        raise MismatchError(
            f"the target and the checkpoint differ in {len(lines)} "
            f"{'leaf' if len(lines) == 1 else 'leaves'}; nothing was changed:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nBuild the target with the code that saved it, or restore without a target."
        )
    return _rebuild(like, "", leaves, stored)


def is_state(value: Any) -> bool:
    """Whether an adapter recognises `value` itself as a leaf or as a container of leaves."""
    try:
        _classify(value, "", None)
    except StateError:
        return False
    return True


def unflatten(leaves: Mapping[str, Leaf]) -> Any:
    """Leaves as nested dicts of NumPy arrays and Python scalars, for use without a template."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        at = root
        for part in parents:
            at = at.setdefault(_unescape(part), {})
        at[_unescape(last)] = plain_value(leaf)
    return root[""] if root.keys() == {""} else root


def differences(wanted: Mapping[str, Spec], found: Mapping[str, Spec]) -> list[str]:
    """One line for each leaf that differs, in path order; empty when they fit."""
    lines = []
    for path in sorted(wanted.keys() | found.keys()):
        if path not in found:
            lines.append(f"{path}: expected {_text(wanted[path])}, the checkpoint has no such leaf")
        elif path not in wanted:
            lines.append(
                f"{path}: the checkpoint has {_text(found[path])}, the target no such leaf"
            )
        elif not fits(wanted[path], found[path]):
            lines.append(f"{path}: expected {_text(wanted[path])}, found {_text(found[path])}")
    return lines


def fits(wanted: Spec, found: Spec) -> bool:
    """Whether a stored leaf can take a place in a target.

    Equal, or a number of Python's where the checkpoint has a zero-dimensional array of that kind: a
    counter that starts as `0` comes out of the first compiled step as an array.
    """
    kinds = {"py:int": ("int", "uint"), "py:float": ("float", "bfloat"), "py:bool": ("bool",)}
    return wanted == found or (
        found.shape == () and found.dtype.startswith(kinds.get(wanted.dtype, ("/",)))
    )


def _text(spec: Spec) -> str:
    return Leaf(spec.dtype, spec.shape, memoryview(b"")).describe().strip()


def _spec(path: str, value: Any, adapter: Adapter) -> Spec:
    with _Named(path):
        spec = adapter.spec(value)
    assert spec is not None
    return spec


def _collect(
    children: Sequence[tuple[str, Any]],
    path: str,
    adapters: Sequence[Adapter],
    leaves: dict[str, Leaf],
) -> None:
    # The loop of the user stands still here. So one call decides what a value is and gives its
    # bytes, and only a value that holds others costs a call of this function.
    prefix = f"{path}/" if path else ""
    at = path
    try:
        for key, value in children:
            at = prefix + key if key.isalnum() else _join(path, key)
            for adapter in adapters:
                leaf = adapter.leaf(value)
                if leaf is not None:
                    break
            else:
                _collect(_node(value, adapters, None).children, at, adapters, leaves)
                continue
            if at in leaves:
                raise UnsupportedLeafError(
                    f"two leaves have the path {at!r}; rename one of the keys."
                )
            leaves[at] = leaf
    except StateError as error:
        _name(error, at)
        raise


def _walk(
    value: Any, path: str, stored: Mapping[str, Spec] | None
) -> Iterator[tuple[str, Any, Adapter]]:
    adapter, node = _classify(value, path, stored)
    if node is None:
        yield path, value, adapter
        return
    for key, child in node.children:
        yield from _walk(child, _join(path, key), stored)


def _rebuild(like: Any, path: str, leaves: Mapping[str, Leaf], stored: Mapping[str, Spec]) -> Any:
    adapter, node = _classify(like, path, stored)
    with _Named(path):
        if node is None:
            return adapter.load(like, leaves[path])
        return node.rebuild(
            [_rebuild(child, _join(path, key), leaves, stored) for key, child in node.children]
        )


def _classify(
    value: Any, path: str, stored: Mapping[str, Spec] | None
) -> tuple[Adapter, Node | None]:
    adapters = _adapters()
    with _Named(path):
        for adapter in adapters:
            if adapter.spec(value) is not None:
                return adapter, None
        below = None if stored is None else _Below(stored, path)
        return adapters[-1], _node(value, adapters, below)


def _node(value: Any, adapters: Sequence[Adapter], below: Mapping[str, Spec] | None) -> Node:
    for adapter in adapters:
        if (node := adapter.node(value, below)) is not None:
            return node
    raise UnsupportedLeafError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} has no exact form in "
        f"a checkpoint. Give it `state_dict` and `load_state_dict`, turn it into arrays and "
        f"scalars, or leave it out of the state."
    )


def _adapters() -> list[Adapter]:
    loaded = [_load(module) for name, module in _FRAMEWORKS.items() if name in sys.modules]
    return [*loaded, _builtin]


_builtin = Builtin()


@cache
def _load(module: str) -> Adapter:
    return import_module(module).ADAPTER


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


class _Named:
    """Puts the leaf path in front of a `StateError` that comes from below."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StateError):
            _name(error, self._path)


def _name(error: StateError, path: str) -> None:
    if not hasattr(error, "path"):
        error.path = path  # type: ignore[attr-defined]
        if not isinstance(error, MismatchError):
            error.args = (f"{path or '(the state itself)'}: {error}",)


def _join(path: str, key: str) -> str:
    if not key:
        return path
    part = key if key.isalnum() else key.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{part}" if path else part


def _unescape(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")
