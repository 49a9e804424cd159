"""A state as `{leaf path: Leaf}` for a save, with copies of the leaves that may change.

The states of objects with `state_dict` become leaves, with entries that describe their containers.
Outside of these, only containers that a run has changed have entries: a list that has grown, a deque, a
set, a value where the target has None.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import msgspec
import numpy as np

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import (
    Adapter,
    Contents,
    ModuleValues,
    Node,
    Stateful,
    Structure,
    adapter,
    leaf_adapter,
    loaded_adapters,
)
from perdure.state.builtin import describe_object
from perdure.state.containers import (
    ANY_LENGTH,
    BYTEARRAY,
    SORTED_DICT,
    array_class_name,
    describe_container,
    describe_record,
)
from perdure.state.leaf_spec import (
    AttributeErrors,
    Difference,
    LeafSpec,
    PathInErrors,
    add_path,
    duplicate_path,
    nested_too_deeply,
    type_name,
)
from perdure.state.leaf_values import SCALARS, is_plain, plain_value, scalar_leaf
from perdure.state.paths import join_dotted, join_key, nearest, nested
from perdure.state.per_rank import current_rank_context
from perdure.state.program_code import (
    is_plain_object,
    is_process_resource,
    is_user_class,
)
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.state.value_forms import Form, class_named, is_form
from perdure.state.walk import Branch, LazyWalk, Walk, may_change_kind, node_of
from perdure.store.format import SCALAR_PREFIX, WEAK_PREFIX
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import Container, LeafEntry
from perdure.text import counted

TakeLeaf = Callable[[Any], Leaf | None]


class ObjectFlattener:
    """Adds the leaves and the container entries of objects to `leaves`. Live objects inside of a
    state are in `live_paths` afterwards, and flattened too if it `enters` them. With `makes_objects`
    those of the program are described as a restore can make them, and containers of `kinds`."""

    def __init__(
        self,
        leaves: Leaves,
        adapters: Sequence[Adapter],
        *,
        enters: bool = False,
        makes_objects: bool = False,
        takers: Sequence[TakeLeaf] | None = None,
        kinds: Collection[type] = (),
    ) -> None:
        self._kinds = kinds
        self._adapters = adapters
        self._takers = takers or [adapter.leaf for adapter in adapters]
        self._leaves = leaves
        self._enters = enters
        self._makes_objects = makes_objects
        self._array_classes: dict[str, str] = {}
        self.live_paths: list[str] = []
        self.inside: list[tuple[str, Any]] = []
        """Path and value of each array and container."""

    def add(
        self, stateful: Stateful, path: str, state: Any, leave_out: Collection[str] = ()
    ) -> None:
        """Add the object at `path` with its present state, a module without what is in `leave_out`."""
        outer, self._array_classes = self._array_classes, {}
        try:
            if isinstance(state, ModuleValues):
                common_class = stateful.arrays
                for name, value in state.items():
                    value_path = join_dotted(path, name)
                    if value_path not in leave_out:
                        self._add(value, value_path, needs_entry=True)
            else:
                self._add(state, path, needs_entry=True)
                common_class = self._describe_arrays(path)
                if stateful.class_name and (entry := self._leaves.containers.get(path)):
                    typed = msgspec.structs.replace(entry, type=stateful.class_name)
                    self._leaves.containers[path] = typed
        except RecursionError:
            raise UnsupportedLeafError(
                f"{path}: the state of a {type_name(stateful.target)} contains itself, or is nested "
                f"too deeply. Of objects that refer to each other (a node to its parent) keep the "
                f"number of the other one, or make them in an object with `state_dict` and "
                f"`load_state_dict`."
            ) from None
        for array_path, array_class in self._array_classes.items():
            if array_class != common_class:
                self._leaves.containers[array_path] = Container("array", arrays=array_class)  # type: ignore[arg-type]
        self._array_classes = outer

    def _describe_arrays(self, path: str) -> str | None:
        entry = self._leaves.containers.get(path)
        if path in self._array_classes or entry is None or entry.type is not None:
            return None
        counts = Counter(self._array_classes.values()).most_common()
        common: Any = min((name for name, n in counts if n == counts[0][1]), default=None)
        self._leaves.containers[path] = msgspec.structs.replace(entry, arrays=common)
        return common

    def _add(self, value: Any, path: str, *, needs_entry: bool = False) -> None:
        # The training loop waits for this.
        try:
            for take in self._takers:
                if (leaf := take(value)) is not None:
                    self._add_leaf(leaf, path)
                    if leaf.dtype[:3] != SCALAR_PREFIX:
                        self._array_classes[path] = array_class_name(value)
                        self.inside.append((path, value))
                    return
            described = describe_container(value) or describe_record(value)
            if described is None and self._makes_objects:
                with AttributeErrors(value):
                    described = describe_object(value)
            if described is None:
                self._add_live(value, path)
                return
        except StateError as error:
            add_path(error, path)
            raise
        entry, children = described
        if self._makes_objects and entry.kind == "object":
            node = node_of(value, path, self._adapters, None)
            parts = {key for key, _ in node.children} if isinstance(node, Node) else None
            if parts != {key for key, _ in children}:  # of a class that is registered with JAX
                self.live_paths.append(path)
                return
        self.inside.append((path, value))
        if needs_entry or not children or entry != SORTED_DICT:
            self._leaves.containers[path] = entry
        for key, child in children:
            self._add(child, join_key(path, key))

    def _add_leaf(self, leaf: Leaf, path: str) -> None:
        if path in self._leaves:
            raise duplicate_path(path)
        self._leaves[path] = leaf

    def _add_live(self, value: Any, path: str) -> None:
        node = node_of(value, path, self._adapters, None)  # refuses what is no object
        if isinstance(node, Node) and is_form(parts := dict(node.children)):
            self._add(Form(parts), path)  # a restore makes another one
            return
        kind, name = type(value), type_name(value)
        is_found = kind in self._kinds or (is_user_class(kind) and class_named(name) is kind)
        if self._makes_objects and isinstance(node, Contents) and is_found:
            ((_, items),) = node.children
            self._add(items, path, needs_entry=True)
            entry = self._leaves.containers[path]
            self._leaves.containers[path] = msgspec.structs.replace(entry, type=name)
            return
        if kind is bytearray:
            self._add_leaf(scalar_leaf(bytes(value)), path)
            self._leaves.containers[path] = Container("object", type=BYTEARRAY)
            return
        self.live_paths.append(path)
        if not self._enters:
            return
        walk = Walk(value, path=path, adapters=self._adapters)
        for leaf_path, each in walk.pairs():
            for leaf in filter(None, (take(each) for take in self._takers)):
                self._add_leaf(leaf, leaf_path)
                break
        for inside, node in walk.objects.items():
            self.add(node, inside, read_state(node, inside))
        entry = self._leaves.containers.get(path) or Container("object")
        self._leaves.containers[path] = msgspec.structs.replace(entry, type=type_name(value))


def read_state(stateful: Stateful, path: str) -> Any:
    """The present state of an object; any exception becomes a `StateError` with the path."""
    with PathInErrors(path, f"a {type_name(stateful.target)} did not return its state"):
        return stateful.read()


def _without_bytes(value: Any) -> Leaf | None:
    """A leaf that has no bytes: what is described needs none."""
    if type(value).__name__.startswith("Uninitialized"):
        return Leaf("", (), b"")  # a lazy parameter, which has a shape before the first save
    taken = leaf_adapter(value, loaded_adapters())
    return None if taken is None else Leaf(taken[1].dtype, taken[1].shape, b"")


def inner_objects(objects: Mapping[str, Stateful]) -> set[str]:
    """The paths of values in states of objects that are neither leaves nor plain containers."""
    flattener = ObjectFlattener(Leaves(), loaded_adapters(), enters=True, takers=[_without_bytes])
    for path, node in objects.items():
        flattener.add(node, path, read_state(node, path))
    return set(flattener.live_paths)


def lost_objects(
    leaves: Mapping[str, Leaf], objects: Collection[str], present: Collection[str]
) -> list[Difference]:
    """The objects in `leaves` that only a target which has them could rebuild, and it has not."""
    lost: dict[tuple[str, str], list[str]] = {}
    for path, entry in containers_of(leaves).items():
        is_live = entry.type not in (None, BYTEARRAY) and entry.keys is None
        is_present = path in present or path in objects
        if is_live and not is_present and nearest(path, objects) is not None:
            lost.setdefault((path.rpartition("/")[0], str(entry.type)), []).append(path)
    return [
        Difference(
            paths[0],
            reason=f"would be saved as a {kind} ({counted(len(paths), 'such value')}), of which the "
            f"target has none there, and only an object of that class can rebuild it. Let the "
            f"`state_dict` that returns it give plain values (tuples, lists, dicts, arrays), of which "
            f"`load_state_dict` makes the objects",
        )
        for (_, kind), paths in lost.items()
    ]


class TargetBaseline:
    """What the target had at first: numbers, arrays and None by path, sizes and keys of containers."""

    def __init__(self, walk: Walk | None = None) -> None:
        self._is_known = walk is not None
        walk = walk or Walk({})
        pairs = [*walk.pairs()]
        self._first, self._code, self._kinds = _first_paths(walk), walk.code, walk.kinds
        self._plain = {path for path, value in pairs if value is None or is_plain(value)}
        self._none = {path for path, value in pairs if value is None}
        # What a run may exchange for a plain value of another kind.
        self._before: dict[str, tuple[type, Any]]
        self._before = {path: _SCALAR for path, value in pairs if type(value) in SCALARS}
        self._others: set[tuple[str, type]] = set()  # values that do not give way
        for branch in reversed(walk.branches):  # a container has the path of its `Contents`
            path, value = branch.path, branch.structure
            if not (may_change_kind(value) or isinstance(branch.node, Contents)):
                self._others.add((path, type(value)))
            elif path or not isinstance(value, Mapping):  # the root gains no keys
                self._before[path] = _form(value)
        self._attributes = {
            branch.path: (type(branch.value), {name for name, _ in branch.node.children})
            for branch in walk.user_objects()
            if isinstance(branch.node, Node)
        }
        self._structures = {path for path, form in self._before.items() if form is not _SCALAR}
        objects = {b.path for b in walk.branches if is_user_class(type(b.value)) and b.path}
        self._shapes = {
            path: (getattr(value, "dtype", None), getattr(value, "shape", None))
            for path, value in (pairs if objects else ())
            if _may_change_shape(value) and nearest(path, objects) is not None
        }

    def describe(self, walk: Walk, leaves: Leaves) -> None:
        """Add to `leaves` the entries of containers that a restore cannot infer from the target."""
        containers, orders = dict[str, Container](), dict[str, Container]()
        for path, value in self._changed(walk, leaves):
            if nearest(path, containers) is None:
                kind, size = self._before.get(path, _SCALAR)
                found, live = _made(value, path, self._kinds)
                is_same, is_mapping = kind is type(value), isinstance(value, Mapping)
                is_filled = bool(size) and (is_mapping or not is_same)
                is_sorted = is_same and is_mapping and set(size) == value.keys()
                if is_sorted and (
                    live or any(e.arrays == "jax" for e in found.containers.values())
                ):
                    # Only the order of the keys differs (`jit` sorts): each part has its target.
                    orders[path] = Container(found.containers[path].kind, keys=tuple(value))
                elif live:
                    parts: Any = [*value] if isinstance(value, Mapping) else None
                    parts = len(value) if isinstance(value, (list, tuple)) else parts
                    if not (is_filled and kind is not type(value) and parts == size):
                        new = [*value] if is_same and is_mapping else []
                        new = [join_key(path, str(key)) for key in new if key not in size]
                        if is_same and isinstance(size, int) and parts > size:
                            new = [join_key(path, str(size))]
                        self._refuse(walk, live[0], path, new[0] if new else live[0])
                else:
                    if is_filled:
                        _require_default_device(walk, found)
                    containers |= _grown(found, path)
        containers |= self._require_same_objects(walk)
        built = {path for path, entry in containers.items() if entry.grown}
        branches: dict[str, list[Branch]] = {path: [] for path in self._attributes}
        for branch in walk.branches if branches else ():
            if branch.path in branches:  # a wrapper has the path of the wrapped object
                branches[branch.path].append(branch)
        for path, (kind, names) in self._attributes.items():
            at = branches[path]
            is_there = bool(at) or path in leaves or path in walk.objects
            if not is_there or nearest(path, built) is not None:
                continue
            same = next((branch for branch in at if type(branch.value) is kind), None)
            if same is not None:
                found = self._new_attributes(same, names, walk)
            else:  # exchanged for another one
                value = at[0].value if at else walk.by_path.get(path)
                value = walk.objects[path].target if path in walk.objects else value
                found = _grown(self._described(walk, value, path), path)
            built |= {inside for inside, entry in found.items() if entry.grown}
            containers |= found
        for path, before in self._shapes.items():
            now: Any = walk.by_path.get(path)
            is_array = hasattr(now, "dtype") and _may_change_shape(now)
            if is_array and (now.dtype, now.shape) != before:
                grown = Container("array", arrays=_class_of(now), grown=True)
                containers.setdefault(path, grown)
        self._require_same_code(walk)
        for path in self._none & leaves.keys():
            if leaves[path].dtype[:3] != SCALAR_PREFIX and path not in containers:
                containers[path] = Container("array", arrays=_class_of(walk.by_path[path]))
        owns = current_rank_context().owns
        for start, stop in walk.runs if self._plain else ():
            if is_plain(walk.values[start]):  # of one type, and nearly always very many
                continue
            for path, value in zip(walk.paths[start:stop], walk.values[start:stop], strict=True):
                if path in self._plain and value is not None and not owns(path):
                    containers.setdefault(path, Container("array", arrays=_class_of(value)))
        leaves.containers |= orders | containers

    def _require_same_code(self, walk: Walk) -> None:
        if not self._is_known or self._code == walk.code:
            return
        for path in sorted(self._code.keys() | walk.code.keys(), reverse=True):
            now, before = walk.code.get(path), self._code.get(path)
            if now == before:
                continue
            if all(each is None or isinstance(each, Structure) for each in (now, before)):
                raise UnsupportedLeafError(
                    f"{path or '(the state itself)'}: this module of Equinox had another structure "
                    f"here when the program gave the state to the restore (None, an array, a "
                    f"container of another class or length). A restore makes the module as it was "
                    f"then. Give the field an array from the start (of zeros, of NaN), keep the value "
                    f"outside of the module, or save the same part of it (`eqx.partition`) that the "
                    f"restore is given."
                )
            raise UnsupportedLeafError(
                f"{path}: this was another function, model or owner when the program gave the "
                f"state to the restore. It is in no checkpoint, so that a resumed program would "
                f"have the first one. Choose between functions by a number or a text."
            )

    def _require_same_objects(self, walk: Walk) -> dict[str, Container]:
        """Refuse two paths of which the target has one object and the run two, or the other way round,
        unless a restore can make such an object: it changes others in place, so that both would get the
        values of one. Returns the entries of those to be made."""
        now, first = (_first_paths(walk) if self._first else {}), self._first
        both = sorted(now.keys() & first.keys())
        if all(now[path] == first[path] for path in both):  # nearly always
            return {}
        records = {b.path: b.value for b in walk.user_objects()}
        made, taken = dict[str, Container](), dict[str, str]()
        # An object of the target becomes that at the first of its paths; others there are made.
        for path in sorted(both, key=lambda path: first[path] != path):
            one, before = now[path], first[path]
            is_in_place = taken.setdefault(before, one) == one
            if one == before or (is_in_place and path in records):
                continue  # a restore makes one object for all paths that have it
            if path in records:
                found, live = _made(records[path], path, self._kinds)
                if not live:
                    made |= _grown(found, path)
                    continue
            found = f"another object than {before}, and both were one"
            if one != path:
                found = f"one object with {one}, and both were two objects"
            raise UnsupportedLeafError(
                f"{path}: is {found} when the program gave the state to the restore, which changes "
                f"objects in place. Copy the values from one object into the other, or keep which of "
                f"them is meant as a number."
            )
        return made

    def _changed(self, walk: Walk, leaves: Leaves) -> Iterator[tuple[str, Any]]:
        last = None
        for branch in walk.branches:
            path, value, kind = branch.path, branch.structure, type(branch.value)
            if path == last or (path, kind) in self._others:
                continue
            last = path
            before = self._before.get(path)
            has_no_target = not self._is_known and kind in ANY_LENGTH
            if has_no_target or (before and (kind in ANY_LENGTH or before != _form(value))):
                yield path, value
        for path in self._before.keys() & walk.objects.keys():
            yield path, walk.objects[path].target
        gone = self._structures & leaves.keys()
        for path in gone.difference(branch.path for branch in walk.branches if gone):
            yield path, walk.by_path[path]

    def _described(self, walk: Walk, value: Any, path: str) -> Leaves:
        found, live = _made(value, path, self._kinds)
        if live:
            self._refuse(walk, live[0], path)
        return found

    def _new_attributes(
        self, branch: Branch, before: Collection[str], walk: Walk
    ) -> dict[str, Container]:
        """The entries of an object that has got or lost attributes, and of its new attributes."""
        node, path = branch.node, branch.path
        if not isinstance(node, Node) or not node.in_place:
            return {}
        now = dict(node.children)
        if now.keys() == before:
            return {}
        names, containers = [*now], dict[str, Container]()
        for name in now.keys() - before:
            if is_process_resource(now[name]):
                names.remove(name)
                continue
            inside = join_key(path, name)
            containers |= _grown(self._described(walk, now[name], inside), inside)
        entry = Container("object", keys=tuple(names), type=type_name(branch.value))
        return containers | {path: entry}

    def _refuse(self, walk: Walk, path: str, changed: str, new: str | None = None) -> None:
        """Raise `UnsupportedLeafError` for a value in what a restore makes at `changed`, which it
        could not put there; `new` is the entry that has changed it."""
        found = {b.path: b.value for b in reversed(walk.branches)}
        found |= {inside: node.target for inside, node in walk.objects.items()}
        name = type_name(found.get(path))
        reason = f"there was no {name} here"
        if path in self._first and path != changed:
            reason = f"{changed} had another class, length or set of keys"
        if new not in (None, path):
            reason = f"there was nothing here ({changed} had another length or set of keys)"
        raise UnsupportedLeafError(
            f"{new or path}: {reason} when the program gave the state to the restore, which would have "
            f"to make this {name}, and makes plain values, arrays, containers, named tuples, "
            f"dataclasses without static fields, and objects of the program whose class is at the top "
            f"level of a module. Make each {name} with the state and leave it in its place there (a "
            f"number or a name can say which ones are in use), or store its values."
        )


_SCALAR = NoneType, None


def _form(value: Any) -> tuple[type, Any]:
    """The class of a value, and the length of a list or a tuple or the keys of a mapping."""
    kind = type(value)
    if isinstance(value, (list, tuple)) and not hasattr(kind, "_fields"):
        return kind, len(value)
    return kind, [*value] if isinstance(value, Mapping) else kind not in ANY_LENGTH


def described(
    value: Any,
    path: str,
    takers: Sequence[TakeLeaf] | None = None,
    *,
    makes_objects: bool = False,
    kinds: Collection[type] = (),
) -> tuple[Leaves, list[str]]:
    """The leaves and the entries of a value and of all in it, and the paths of those in it that they
    cannot rebuild."""
    found = Leaves()
    flattener = ObjectFlattener(
        found, loaded_adapters(), makes_objects=makes_objects, takers=takers, kinds=kinds
    )
    flattener.add(Stateful(value), path, value)
    return found, flattener.live_paths


def _first_paths(walk: Walk) -> dict[str, str]:
    """By the path of each object that a restore changes in place, the first path that has it."""
    objects = [(path, node.target) for path, node in walk.objects.items()]
    objects += [
        (branch.path, branch.value)
        for branch in walk.branches
        if isinstance(branch.node, Node) and branch.node.in_place
    ]
    first: dict[int, str] = {}
    return {path: first.setdefault(id(value), path) for path, value in objects}


def _made(value: Any, path: str, kinds: Collection[type]) -> tuple[Leaves, list[str]]:
    """As `described`, without bytes, for values that a restore makes, also objects of the program."""
    return described(value, path, [_without_bytes], makes_objects=True, kinds=kinds)


def _grown(found: Leaves, path: str) -> dict[str, Container]:
    """The entries of the value at `path`, which a restore builds."""
    entry = found.containers.get(path, Container("array"))  # of a number
    return found.containers | {path: msgspec.structs.replace(entry, grown=True)}


def _require_default_device(walk: Walk, paths: Iterable[str]) -> None:
    """Refuse an array of JAX that a restore without a target would put on other devices."""
    jax_state: Any = sys.modules.get("perdure.state.jax_state")
    if jax_state is None:
        return
    for path in paths:
        if where := jax_state.elsewhere(walk.by_path.get(path)):
            raise UnsupportedLeafError(
                f"{path}: expected an array whole on the default device, found it on {where}, in a "
                f"container that had other keys when the program gave the state to the restore. Only "
                f"arrays of that state say where a restore puts them. Make the container with all its "
                f"keys from the start, or keep arrays in it that NumPy has (`jax.device_get`)."
            )


def _may_change_shape(value: Any) -> bool:
    """Whether a leaf of an object of the program may get another shape or become an array: no
    parameter of a module."""
    torch = sys.modules.get("torch")
    kinds = (np.ndarray, int, float) if torch is None else (np.ndarray, int, float, torch.Tensor)
    return type(value) in kinds or isinstance(value, np.generic)


def _class_of(value: Any) -> Any:
    return array_class_name(value) if hasattr(value, "dtype") else None


def flatten(
    state: Any, baseline: TargetBaseline | None = None, adapters: Sequence[Adapter] | None = None
) -> Leaves:
    """Every leaf of a state (or of its `Walk`) by its path, sharing memory with the live arrays."""
    is_walked = adapters is None or isinstance(state, (Walk, LazyWalk))
    walk = Walk.of(state) if is_walked else Walk(state, adapters=adapters)
    leaves = walk.leaves(adapters)
    flattener = ObjectFlattener(leaves, adapters or walk.adapters, enters=True)
    try:
        for path, node in walk.objects.items():
            if path not in walk.states:
                walk.states[path] = read_state(node, path)
            flattener.inside.clear()
            flattener.add(node, path, walk.states[path])
            if is_user_class(type(node.target)):
                walk.inside += flattener.inside
    except RecursionError:
        raise nested_too_deeply() from None
    if adapters is None:
        (baseline or TargetBaseline()).describe(walk, leaves)
    return leaves


def snapshot(
    state: Any, into: SnapshotBuffer | None = None, baseline: TargetBaseline | None = None
) -> Leaves:
    """`flatten`, with copies of memory that may change, valid until the next snapshot `into` it."""
    with gc_paused():
        return (into or SnapshotBuffer()).copy(flatten(state, baseline))


def unflatten(leaves: Mapping[str, Leaf]) -> Any:
    """Leaves as nested dicts of NumPy arrays and Python scalars, for use without a target."""
    return nested((path, plain_value(leaf)) for path, leaf in leaves.items())


def metadata_tree(entries: Iterable[LeafEntry]) -> Any:
    """Nested dicts of `jax.ShapeDtypeStruct` (without JAX: `LeafSpec`) and Python scalars."""
    return nested((entry.path, _describe(entry)) for entry in entries)


def _describe(entry: LeafEntry) -> Any:
    if entry.text is not None:
        return plain_value(Leaf(entry.dtype, (), memoryview(entry.text.encode())))
    spec = LeafSpec.of(entry)
    if "jax" not in sys.modules:
        return spec
    jax: Any = adapter("jax")
    return jax.abstract(spec, is_weak=entry.dtype.startswith(WEAK_PREFIX))


def is_state(value: Any) -> bool:
    """Whether `value` is a leaf or a container of leaves; a callable only if a framework takes it."""
    adapters = loaded_adapters()
    if callable(value) and is_plain_object(value):
        adapters = adapters[:-1]
    try:
        return leaf_adapter(value, adapters) is not None or bool(node_of(value, "", adapters, None))
    except StateError:
        return False
