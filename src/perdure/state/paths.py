"""Leaf paths: keys from the root to a leaf, escaped and joined with `/`; and nested dicts of such
keys."""

from __future__ import annotations

import reprlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import UnsupportedLeafError
from perdure.state.leaf_spec import add_path
from perdure.store.format import escape, unescape

LISTED = ("!listed", "in")
"""The two keys of a form, which stands for a mapping whose keys have no text, or for a value without an
entry in a manifest: the parts of the value, and its type."""


def key_text(key: object) -> str:
    """The text of a mapping's key; raises `UnsupportedLeafError` for a key that cannot be in a path."""
    if isinstance(key, (str, int)) and not isinstance(key, bool) and key != "":
        return str(key)
    shape = getattr(key, "shape", None)  # of an array or a tensor, which may be large
    is_array = isinstance(shape, tuple)
    shown = f"{type(key).__name__} of shape {tuple(shape)}" if is_array else reprlib.repr(key)
    raise UnsupportedLeafError(
        f"a mapping has the key {shown}; expected a non-empty string or an integer, because keys "
        f"become leaf paths."
    )


def join_key(path: str, key: str) -> str:
    """The path of the child `key`, which is escaped here. An empty key adds nothing."""
    if not key:
        return path
    if key.isidentifier() or key.isalnum():
        part = key
    else:
        part = escape(key)
        try:
            part.encode()
        except UnicodeEncodeError:
            error = UnsupportedLeafError(
                f"the key or name {key!r} is not valid Unicode; rename it, because keys become "
                f"leaf paths."
            )
            add_path(error, path)
            raise error from None
    return join_part(path, part)


def join_keys(path: str, keys: Iterable[str]) -> list[str]:
    """`join_key` for the keys of many children; nearly all of them need no escaping."""
    prefix = f"{path}/" if path else ""
    return [prefix + key if key.isalnum() else join_key(path, key) for key in keys]


def join_part(path: str, part: str) -> str:
    """The path of a child from its escaped part of the path; an empty part adds nothing."""
    return f"{path}/{part}" if path and part else path or part


def join_dotted(path: str, name: str) -> str:
    """The path of a value with a dotted name, such as the `0.weight` of a torch module."""
    if "/" not in name and "%" not in name:
        return join_part(path, name.replace(".", "/"))
    for key in name.split("."):
        path = join_key(path, key)
    return path


def split_path(path: str) -> list[str]:
    """The keys of a path, no longer escaped."""
    return [unescape(part) for part in path.split("/")]


def ancestors(path: str) -> Iterator[str]:
    """`path`, and the paths above it up to the state itself (`""`), the longest first."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path


def nearest(path: str, paths: Container[str]) -> str | None:
    """The longest of `paths` that `path` is or lies below; None if there is none."""
    while path not in paths:  # without `ancestors`, because a restore asks this about every leaf
        if not path:
            return None
        path = path.rpartition("/")[0]
    return path


def below(path: str, ancestor: str) -> str:
    """`path` as it is relative to a path above it; "" for that itself."""
    return path[len(ancestor) :].removeprefix("/")


def insert(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set the value at `keys` in nested dicts, and make the dicts that are missing."""
    *parents, last = keys
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def nested(values: Iterable[tuple[str, Any]]) -> Any:
    """Values by path as nested dicts of the keys; the value itself at the path ""."""
    tree: dict[str, Any] = {}
    for path, value in values:
        insert(tree, split_path(path), value)
    return tree[""] if tree.keys() == {""} else tree


def unflatten_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"dense/kernel": v}` as `{"dense": {"kernel": v}}`. Names are split at `/`, not unescaped."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        insert(tree, name.split("/"), value)
    return tree


def flatten_dict(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `unflatten_dict`; every name gets `prefix` in front."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            values.update(flatten_dict(value, f"{prefix}{key}/"))
        else:
            values[prefix + key] = value
    return values
