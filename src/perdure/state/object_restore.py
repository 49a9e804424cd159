"""The states of objects with `load_state_dict`, built as they were stored.

The present state of an object decides only the devices of arrays, and has the live objects inside.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from perdure.errors import MismatchError, StateError
from perdure.state.adapter import (
    ModuleValues,
    Stateful,
    leaf_adapter,
    load_leaf,
    loaded_adapters,
)
from perdure.state.containers import (
    BYTEARRAY,
    SORTED_DICT,
    array_class_name,
    build_container,
    build_record,
    describe_container,
    record_class,
)
from perdure.state.leaf_spec import Difference, LeafSpec, PathInErrors, type_name
from perdure.state.leaf_values import cut, leaf_array, plain_value, same_bits
from perdure.state.paths import below, join_dotted, join_part, nearest
from perdure.state.per_rank import own_shards_only
from perdure.state.snapshots import ObjectFlattener, read_state
from perdure.state.value_forms import is_form, made_value
from perdure.store.format import children_of, escape, unescape
from perdure.store.leaf import Leaf, Leaves, containers_of

_MISSING: Any = object()


class ObjectStates:
    """The leaves of a checkpoint, from which states of objects are built, and compared with.

    `keep` has values of modules that stay; with `takes` an object that changes no array may get the
    memory of the leaves. `member` gives a member of the state by the name in a form.
    """

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        keep: Collection[str] = (),
        takes: bool = False,
        sharded: Mapping[str, Any] = MappingProxyType({}),
        member: Callable[[str], Any] = str,
    ) -> None:
        self.leaves = leaves
        self._member = member
        self._sharded = sharded
        self.keep = keep
        self._may_take = takes
        self._takes = False
        self.containers = containers_of(leaves)
        self.adapters = loaded_adapters()
        self.missing: list[Difference] = []
        """Objects for which the checkpoint has no state at all."""

    def rebuild(self, like: Any, path: str) -> Any:
        """Restore the live object `like` inside a state."""
        raise MismatchError(f"{path}: only the object that saved this can rebuild it.")

    def shared(self, path: str, build: Callable[[], Any]) -> Any:
        """What `build` makes for `path`, or the same for several paths that had one object."""
        return build()

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """By path, the last part of the path of each child."""
        return children_of([*self.leaves, *self.containers])

    def leaf_paths(self, path: str) -> Iterator[str]:
        """The paths of the leaves at `path` and below it."""
        if path in self.leaves:
            yield path
        for part in self._parts.get(path, ()):
            yield from self.leaf_paths(join_part(path, part))

    def state(self, stateful: Stateful, path: str) -> Any:
        """The state to load into the object at `path`. One without any is added to `missing`."""
        outer, self._takes = self._takes, self._may_take and stateful.changes_no_array
        try:
            return self._state(stateful, path)
        finally:
            self._takes = outer

    def _state(self, stateful: Stateful, path: str) -> Any:
        present = read_state(stateful, path)
        if isinstance(present, ModuleValues):
            return self.module_values(present, path, stateful.arrays)
        if leaf_adapter(present, self.adapters) is None and describe_container(present) is None:
            return self.rebuild(present, path)  # the state is itself a live object
        if path in self.leaves or path in self.containers or path in self._parts:
            return self._value(path, present, stateful.arrays, root=True)
        if has_leaves(present):
            expected = f"the state of a {type_name(stateful.target)}"
            self.missing.append(Difference(path, expected))
        return present

    def value(self, path: str, like: Any) -> Any:
        """The plain value at `path`; its tensors are on the devices of the tensors of `like`."""
        return self._value(path, like, "numpy", root=True)

    def digests(self, stateful: Stateful, path: str) -> dict[str, list[str]] | None:
        """dtype, shape and chunk hashes of the present leaves; None for a state without exact form."""
        leaves = Leaves()
        try:
            with own_shards_only():
                flattener = ObjectFlattener(leaves, self.adapters)
                flattener.add(stateful, path, read_state(stateful, path))
        except StateError:
            return None
        return {
            leaf_path: [leaf.dtype, str(leaf.shape), *leaf.hashes()]
            for leaf_path, leaf in leaves.items()
        }

    def differences(self, stateful: Stateful, path: str) -> list[Difference]:
        """How the object's present state differs from the stored one, sorted by path."""
        present = _ComparedLeaves(self.leaves)
        flattener = ObjectFlattener(present, self.adapters)
        with own_shards_only():
            flattener.add(stateful, path, read_state(stateful, path), self.keep)
        differences = [
            line
            for line in present.differences
            if (line.stored or line.reason or not stateful.may_add(below(line.path, path)))
            and nearest(line.path, self.keep) is None
        ]
        differences += [
            Difference(leaf_path, None, self.leaves[leaf_path].describe())
            for leaf_path in self.leaf_paths(path)
            if leaf_path not in present and nearest(leaf_path, flattener.live_paths) is None
        ]
        return sorted(differences, key=lambda line: line.path)

    def module_values(self, present: ModuleValues, path: str, arrays: str) -> dict[str, Any]:
        """The stored values of the module at `path` by dotted name, and those in `keep`."""
        values = {
            name: self._value(value_path, present.get(name, _MISSING), arrays)
            for value_path, name in self._dotted_names(path, "")
        }
        for name in present if self.keep else ():
            if join_dotted(path, name) in self.keep:
                values[name] = present[name]
        return values

    def _dotted_names(self, path: str, name: str) -> Iterator[tuple[str, str]]:
        """Path and dotted name of each value of a module."""
        for part in self._parts.get(path, ()):
            child_path = join_part(path, part)
            child_name = f"{name}.{unescape(part)}" if name else unescape(part)
            if child_path in self.leaves or child_path in self.containers:
                yield child_path, child_name
            else:
                yield from self._dotted_names(child_path, child_name)

    def _value(self, path: str, like: Any, arrays: str, *, root: bool = False) -> Any:
        """The value at `path`; its arrays have the class `arrays` unless an entry names another."""
        entry = self.containers.get(path)
        if entry is not None and entry.type == BYTEARRAY:
            return bytearray(plain_value(self.leaves[path]))
        is_record = entry is not None and entry.kind == "object" and entry.keys is not None
        kind = entry and entry.type and self.container_class(entry.type, like)
        if not kind and entry is not None and entry.type is not None and (not root or is_record):
            return self._live(path, like, entry.type, arrays)
        if entry is not None and entry.arrays is not None:
            arrays = entry.arrays
        if path in self.leaves:
            return self.leaf_as(arrays, path, like)
        made = build_container(
            entry or SORTED_DICT,
            self._parts.get(path, ()),
            lambda key, part: self._part(join_part(path, part), _child(like, key), arrays),
        )
        made = made_value(made, self._member) if type(made) is dict else made
        if type(made) is defaultdict and made.default_factory is None:  # a function of the program
            like = like["in"] if isinstance(like, Mapping) and is_form(like) else like
            made.default_factory = getattr(like, "default_factory", None)
        if not kind:
            return made
        with PathInErrors(path, f"a {kind.__name__} could not be made from its items"):
            return kind(made.default_factory, made) if issubclass(kind, defaultdict) else kind(made)

    def _part(self, path: str, like: Any, arrays: str) -> Any:
        return self.shared(path, lambda: self._value(path, like, arrays))

    def _live(self, path: str, like: Any, stored_type: str, arrays: str) -> Any:
        kind = record_class(stored_type)
        if (
            like is _MISSING
            or leaf_adapter(like, self.adapters)
            or describe_container(like) is not None
            or (kind is not None and self.containers[path].keys is not None)
        ):
            if kind is not None:
                values = dict[str, Any]()
                for name in map(str, self.containers[path].keys or self._parts.get(path, ())):
                    inside, present = join_part(path, escape(name)), getattr(like, name, _MISSING)
                    values[name] = self._part(inside, present, arrays)
                return self.record(kind, values, like, path)
            target = "nothing" if like is _MISSING else f"a {type_name(like)}"
            raise MismatchError(
                f"{path}: the state that was stored has a {stored_type}, and the target has {target}; "
                f"nothing was changed. Give the target an object of that class, because only such an "
                f"object can rebuild it."
            )
        return self.rebuild(like, path)

    def container_class(self, name: str, like: Any) -> type[Any] | None:
        """The class of this name if it is a subclass of a container that its items make again."""
        return None

    def record(self, kind: type, values: dict[str, Any], like: Any, path: str) -> Any:
        """A value of the class `kind` with these attributes, where the target has `like`."""
        return build_record(kind, values)

    def load(self, target: Any, path: str) -> Any:
        """The leaf at `path` as an array such as `target`."""
        chosen = leaf_adapter(target, self.adapters)
        assert chosen is not None
        return load_leaf(chosen[0], target, self.leaves[path])

    def leaf_as(self, arrays: str, path: str, like: Any) -> Any:
        """The leaf at `path` as an array of the class `arrays`, on the device of `like`."""
        leaf = self.leaves[path]
        if leaf.is_scalar:
            return plain_value(leaf)
        with PathInErrors(path):
            if leaf.shards is not None:
                return self.load(self._sharded[path], path)
            target, chosen, base = like, None, arrays.partition("@")[0]
            if like is not _MISSING and array_class_name(like).partition("@")[0] == base:
                with suppress(StateError, ValueError, TypeError):  # `like` cannot be a target
                    chosen = leaf_adapter(like, self.adapters)
            if chosen is None or chosen[1] != LeafSpec.of(leaf):
                target = _array_template(arrays, leaf, like)
                chosen = leaf_adapter(target, self.adapters)
            assert chosen is not None
            take = getattr(chosen[0], "take", None) if self._takes else None
            value = load_leaf(chosen[0], target, leaf) if take is None else take(target, leaf)
        is_in_order = leaf.axes is not None or not isinstance(value, np.ndarray)
        return value if is_in_order else value.copy()


_COMPARED = Leaf("", (), memoryview(b""))


class _ComparedLeaves(Leaves):
    """Compares each leaf that is added with the stored one, and keeps its path only."""

    def __init__(self, stored: Mapping[str, Leaf]) -> None:
        super().__init__()
        self._stored = stored
        self.differences: list[Difference] = []

    def __setitem__(self, path: str, leaf: Leaf) -> None:
        super().__setitem__(path, _COMPARED)
        stored = self._stored.get(path)
        if stored is not None and stored.shape == leaf.shape and leaf.region is not None:
            stored = cut(stored, leaf.region)
        if stored is None:
            self.differences.append(Difference(path, leaf.describe(), None))
        elif not same_bits(stored, leaf):
            before, after = stored.describe(), leaf.describe()
            after = "other bits" if before == after else after
            reason = f"stored {before}, the object has {after} after the load"
            self.differences.append(Difference(path, reason=reason))


def _child(like: Any, key: Any) -> Any:
    try:
        if isinstance(like, Mapping) and key not in like:  # which `like[key]` might change
            factory = getattr(like, "default_factory", None)
            return _MISSING if factory is None else factory()
        return like[key] if isinstance(like, (Mapping, Sequence)) else _MISSING
    except (KeyError, IndexError, TypeError):
        return _MISSING


def has_leaves(value: Any) -> bool:
    """Whether the state of an object has anything to store."""
    described = describe_container(value)
    return described is None or any(has_leaves(child) for _, child in described[1])


def module_tensors(leaves: Leaves, branch: str) -> dict[str, Any]:
    """The values of the module at `branch` by dotted name; its arrays become tensors on the CPU."""
    if branch in leaves.containers or branch in leaves:
        raise MismatchError(
            f"{branch}: expected a module, found "
            + (leaves[branch].describe() if branch in leaves else "the state of another object")
            + "; restore it with `CheckpointManager.restore`."
        )
    if keys := [path for path, leaf in leaves.items() if leaf.dtype.startswith("key<")]:
        raise MismatchError(f"{keys[0]}: PyTorch has nothing like a random key of JAX.")
    # In the checkpoint of a run on another device, entries name that device.
    containers = {
        path: msgspec.structs.replace(entry, arrays=entry.arrays and entry.arrays.partition("@")[0])
        for path, entry in leaves.containers.items()
    }
    strong = {path: leaf.strong() for path, leaf in leaves.items()}
    return ObjectStates(Leaves(strong, containers)).module_values(ModuleValues(), branch, "torch")


def _array_template(name: str, leaf: Leaf, like: Any) -> Any:
    """A target for `Adapter.load` of an array of the class `name`, on the device of the tensor
    `like`."""
    base, _, device = name.partition("@")
    if base.startswith("torch"):
        torch = _library("torch")
        if isinstance(like, torch.Tensor) and not like.is_meta:
            target_device = like.device
        else:
            backend = getattr(torch, device, None) if device else None
            available = backend is not None and backend.is_available()
            target_device = device if available else "cpu"
        tensor = torch.empty(0, dtype=getattr(torch, leaf.dtype), device=target_device)
        if base.startswith("torch.Parameter"):
            return torch.nn.Parameter(tensor, requires_grad=not base.endswith(".frozen"))
        return tensor.requires_grad_(base == "torch.requires_grad")
    if base.startswith("jax"):
        _library("jax")
        from perdure.state.jax_state import ADAPTER

        return ADAPTER.abstract(LeafSpec.of(leaf))
    array = leaf_array(leaf)
    if base == "numpy.swapped":
        return array.astype(array.dtype.newbyteorder())
    return array[()] if base == "numpy.generic" else array


def _library(name: str) -> Any:
    if name not in sys.modules:
        raise StateError(
            f"the checkpoint has an array of {name} here. Import {name} before the restore."
        )
    return sys.modules[name]
