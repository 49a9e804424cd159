"""The adapter of plain Python and NumPy: scalars, arrays, containers, objects, random generators."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy import ndarray

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Contents, Node, Stateful
from perdure.state.containers import (
    ANY_LENGTH,
    PLAIN_MAPPINGS,
    build_record,
    describe_container,
    is_static,
    record_class,
)
from perdure.state.generators import (
    SEED_SEQUENCE,
    is_generator,
    read_generator,
    seed_from,
    seed_text,
    write_generator,
)
from perdure.state.iterator import PositionedIterator, is_positioned
from perdure.state.leaf_spec import LeafSpec, type_name
from perdure.state.leaf_values import (
    BUFFER_DTYPES,
    COPIED_BYTES,
    SCALARS,
    array_leaf,
    array_spec,
    leaf_array,
    memory_axes,
    plain_value,
    scalar_leaf,
)
from perdure.state.paths import key_text
from perdure.state.program_code import (
    is_code,
    is_computed,
    is_plain_object,
    is_process_resource,
    slot_names,
    slots_of,
)
from perdure.state.value_forms import (
    Form,
    attributes_of,
    encode_forms,
    form_of,
    is_named,
    listed_form,
    made_value,
    mapping_like,
    masked_array,
)
from perdure.store.leaf import Leaf
from perdure.store.manifest import Container

_is_row_major = attrgetter("flags.c_contiguous")
_DTYPE, _SHAPE, _NBYTES = map(attrgetter, ("dtype", "shape", "nbytes"))

_DEFAULTS = (type(None), bool, int, float, complex, str)
# Mappings that `mapping_like` rebuilds exactly. Any other class is tried at the save.
_MAPPINGS = {*PLAIN_MAPPINGS, MappingProxyType, Form}


@dataclasses.dataclass(frozen=True)
class StateWithExtras:
    """A state and further members. The leaves of `main` have the paths that they have without it."""

    main: Any
    extras: Mapping[str, Any]


class AttributeState:
    """Base of a class whose instances are states: every attribute is a member with its own path."""

    def implied_members(self) -> dict[str, Any]:
        """Values that members imply and that are no members; restored if the checkpoint has them."""
        return {}


class Builtin(Adapter):
    """Turns values of Python and NumPy into leaves and nodes, and back. Needs no framework."""

    def spec(self, value: Any) -> LeafSpec | None:
        if type(value) is ndarray and (name := BUFFER_DTYPES.get(value.dtype)) is not None:
            return LeafSpec(name, value.shape)
        if type(value) in SCALARS:
            return LeafSpec(SCALARS[type(value)].dtype, ())
        if isinstance(value, (np.ndarray, np.generic)) and type(value) is not np.ma.MaskedArray:
            return array_spec(value)
        return None

    def leaf(self, value: Any) -> Leaf | None:
        if type(value) is ndarray:  # nearly every leaf, so in line
            name, size = BUFFER_DTYPES.get(value.dtype), value.nbytes
            is_row_major = value.flags.c_contiguous
            if name is None or not size:
                return array_leaf(value)
            if size <= COPIED_BYTES:
                axes = None if is_row_major else memory_axes(value.shape, value.strides)
                return Leaf(name, value.shape, value.tobytes(), True, axes=axes)
            return (
                Leaf(name, value.shape, value.data.cast("B")) if is_row_major else array_leaf(value)
            )
        if type(value) in SCALARS:
            return scalar_leaf(value)
        if isinstance(value, (np.ndarray, np.generic)) and type(value) is not np.ma.MaskedArray:
            return array_leaf(value)
        return None

    def specs(self, values: Sequence[Any]) -> Sequence[LeafSpec] | None:
        names = _dtype_names(values)
        return None if names is None else list(map(LeafSpec, names, map(_SHAPE, values)))

    def leaves(self, values: Sequence[Any]) -> Sequence[Leaf] | None:
        names = _dtype_names(values)
        if names is None:
            return None
        sizes = list(map(_NBYTES, values))
        if not 0 < min(sizes) <= max(sizes) <= COPIED_BYTES or not all(map(_is_row_major, values)):
            return None
        return list(
            map(Leaf, names, map(_SHAPE, values), map(ndarray.tobytes, values), repeat(True))
        )

    def load(self, like: Any, leaf: Leaf) -> Any:
        if leaf.is_scalar:
            return plain_value(leaf)
        array = leaf_array(leaf)
        if isinstance(like, np.generic) or type(like) in SCALARS:
            return array[()]
        if leaf.axes is not None:
            ordered = array.transpose(leaf.axes).astype(like.dtype, order="C")
            return ordered.transpose(np.argsort(leaf.axes))
        if like.flags.c_contiguous:
            # In the byte order of the target. Frozen bytes are read-only, so the array is a copy.
            return array.astype(like.dtype, copy=not array.flags.writeable)
        # In the memory order of the target: the order in which NumPy adds depends on it.
        ordered = np.empty_like(like)
        ordered[...] = array
        return ordered

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        if type(value) is dict or isinstance(value, Mapping):
            return _mapping_node(value)
        if isinstance(value, (list, tuple)):
            return _sequence_node(value)
        if type(value) is bytearray:
            return Node([("", bytes(value))], lambda new: bytearray(new[0]))
        if isinstance(value, ANY_LENGTH):
            return _collection_node(value)
        if isinstance(value, AttributeState):
            return _object_node(value, stored)
        if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
            return Stateful(value)
        if is_positioned(value):
            return PositionedIterator(value)
        if isinstance(value, StateWithExtras):
            return Node(
                [("", value.main), *value.extras.items()],
                lambda new: StateWithExtras(new[0], dict(zip(value.extras, new[1:], strict=True))),
            )
        if is_generator(value):
            state = read_generator(value, has_seed=stored is None or SEED_SEQUENCE in stored)
            return Node([("", state)], lambda new: write_generator(value, new[0]), in_place=True)
        if type(value) is np.random.SeedSequence:
            return Node([("", seed_text(value))], lambda new: seed_from(new[0]))
        if type(value) is np.ma.MaskedArray:
            return _masked_array_node(value, stored)
        is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if is_data or is_plain_object(value):
            return _object_node(value, stored)
        # Of a path, a date or a member of an enumeration.
        form = None if callable(value) else encode_forms(value)
        return _mapping_node(form) if type(form) is Form else None


def _object_node(value: Any, stored: Mapping[str, LeafSpec] | None = None) -> Node:
    """An object whose attributes are its state, changed in place; a frozen dataclass is made again."""
    kind, implied = type(value), dict[str, Any]()
    names = _own_names(value)
    if dataclasses.is_dataclass(kind):  # a default may be stored on the class alone
        fields = [field.name for field in dataclasses.fields(kind)]
        names += [name for name in fields if name not in names and hasattr(value, name)]
    if (now := getattr(stored, "attributes", None)) is not None:
        names = [n for n in names if n in now or is_fixed(getattr(value, n))]
        names += [n for n in now if n not in names]
    if isinstance(value, AttributeState):
        implied = value.implied_members()
        if stored is not None and implied:
            first = {path.partition("/")[0] for path in stored}
            implied = {name: each for name, each in implied.items() if name in first}
    children = [(name, _attribute_of(value, name)) for name in names]
    if is_frozen(kind):
        typed = {n: each for n, each in attributes_of(value).items() if n.startswith("__")}
        make = partial(build_record, kind)
        return Node(children, lambda new: make(typed | dict(zip(names, new, strict=True))))
    return attributes_in_place(value, names)._replace(children=[*children, *implied.items()])


def _own_names(value: Any) -> list[str]:
    """The attributes of an object, without cached properties, which can be computed again."""
    names = [*getattr(value, "__dict__", ()), *slots_of(value)]
    return [name for name in names if not (name.startswith("__") or is_computed(value, name))]


def is_fixed(value: Any) -> bool:
    """Whether a restore keeps the target's attribute: code without a name, a process resource."""
    return is_process_resource(value) or (is_code(value) and form_of(value) is None)


def describe_object(value: Any) -> tuple[Container, list[tuple[str, Any]]] | None:
    """As `describe_record`, of an object of the program or a dataclass with slots."""
    if isinstance(value, Mapping) or record_class(type_name(value)) is not type(value):
        return None
    is_data = dataclasses.is_dataclass(value) and bool(slots_of(value))
    is_data = is_data and not any(map(is_static, dataclasses.fields(value)))
    if not (is_data or is_plain_object(value)):
        return None
    names = _own_names(value)
    entry = Container("object", keys=tuple(names), type=type_name(value))
    return entry, [(name, _attribute_of(value, name)) for name in names]


def _attribute_of(value: Any, name: str) -> Any:
    try:
        return encode_forms(getattr(value, name, None))
    except UnsupportedLeafError as error:
        error.args = (f"its attribute {name!r}: {error}",)
        raise


def _dtype_names(arrays: Sequence[Any]) -> list[str] | None:
    if set(map(type, arrays)) != {ndarray}:
        return None
    names = list(map(BUFFER_DTYPES.get, map(_DTYPE, arrays)))
    return None if None in names else names  # type: ignore[return-value]


def _mapping_node(value: Mapping[Any, Any]) -> Node:
    if type(value) not in _MAPPINGS:
        is_default = isinstance(value, defaultdict)
        items = defaultdict(value.default_factory, value) if is_default else dict(value)
        return _contents_node(value, items, partial(mapping_like, value))
    form = value if type(value) is Form else None
    if type(value) in PLAIN_MAPPINGS and not is_named(value):
        form = listed_form(value)
    if form is not None:
        return Node(form.items(), lambda new: made_value(dict(zip(form, new, strict=True))))
    keys = list(value)
    # Non-empty strings need no check of each: there may be very many.
    strings = set(map(type, keys)) == {str} and "" not in keys
    names = keys if strings else list(map(key_text, keys))
    if names != keys and len(set(names)) < len(names):
        duplicate = next(name for name, count in Counter(names).items() if count > 1)
        raise UnsupportedLeafError(
            f"a mapping has several keys that are {duplicate!r} in a leaf path, such as a number "
            f"and its text. Rename all but one of them."
        )
    return Node(
        dict(zip(names, value.values(), strict=True)).items(),
        lambda new: mapping_like(value, dict(zip(keys, new, strict=True))),
    )


def _sequence_node(value: list[Any] | tuple[Any, ...]) -> Node:
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and fields is not None:
        make = type(value)._make  # type: ignore[attr-defined]
        if getattr(value, "__dict__", None):
            _check_rebuilt(value, make, tuple(value))
        return Node([(field, getattr(value, field)) for field in fields], make)
    if type(value) not in (list, tuple):
        items = list(value) if isinstance(value, list) else tuple(value)
        return _contents_node(value, items, type(value))
    return Node([(str(i), child) for i, child in enumerate(value)], type(value))


def _contents_node(value: Any, items: Any, make: Callable[[Any], Any]) -> Node:
    _check_rebuilt(value, make, items)
    return Contents([("", items)], lambda new: make(new[0]))


def _check_rebuilt(value: Any, rebuild: Callable[[Any], Any], items: Any) -> None:
    try:
        copy = rebuild(items)
        same = type(copy) is type(value) and len(copy) == len(value)
        same = same and getattr(copy, "__dict__", {}) == getattr(value, "__dict__", {})
    except Exception:  # noqa: BLE001 - a constructor of the user's may raise anything
        same = False
    if not same:
        raise UnsupportedLeafError(
            f"a {type_name(value)} cannot be made again from its items alone. "
            f"Convert it to a plain dict, list or tuple, or register it as a JAX pytree node."
        )


def _collection_node(value: Any) -> Node:
    """A deque or a set; of a class of the program, its items and attributes change in place."""
    if type(value) in ANY_LENGTH and (described := describe_container(value)) is not None:
        make = partial(deque, maxlen=value.maxlen) if type(value) is deque else type(value)
        return Node(described[1], make)
    if isinstance(value, frozenset):
        _check_rebuilt(value, type(value), [*value])
        return Node([("", frozenset(value))], lambda new: type(value)(new[0]))
    plain: Any = deque if isinstance(value, deque) else set
    add: Any = deque.extend if plain is deque else set.update
    attributes = getattr(value, "__dict__", {})

    def rebuild(new: Sequence[Any]) -> None:
        plain.clear(value)  # not what the class may have made of it
        add(value, new[0])
        attributes.clear()
        attributes.update(new[1])

    items = deque(value, value.maxlen) if isinstance(value, deque) else set(value)
    before = {"items": items, "attributes": dict(attributes)}
    undo = partial(rebuild, [*before.values()])
    return Node([*before.items()], rebuild, in_place=True, undo=undo)


def _masked_array_node(value: Any, stored: Mapping[str, LeafSpec] | None) -> Node:
    """A masked array, with the data under its mask. Without a mask, the mask is a single `False`."""
    mask = value.mask
    if stored is not None and "mask" in stored:  # a mask may appear and vanish as a program runs
        mask = np.zeros(stored["mask"].shape, bool)
    children = {
        "data": value.data,
        "mask": np.asarray(mask),
        "fill_value": value.fill_value,
        "hard_mask": value.hardmask,
    }

    return Node(list(children.items()), lambda new: masked_array(*new))


def is_frozen(kind: type) -> bool:
    """Whether objects of a class are exchanged and not changed."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return issubclass(kind, tuple) or (parameters is not None and parameters.frozen)


def attributes_in_place(value: Any, names: Sequence[str]) -> Node:
    """An object that is changed in place, because others may refer to it: it gets exactly these
    attributes."""
    held, before = getattr(value, "__dict__", {}), attributes_of(value)
    in_slots = slot_names(type(value))

    def put(attributes: Mapping[str, Any]) -> None:
        for name, each in attributes.items():
            if name in in_slots:
                object.__setattr__(value, name, each)
            else:
                held[name] = each

    def remove(gone: Iterable[str]) -> None:
        for name in gone:
            if not name.startswith("__"):  # set by `typing`
                object.__delattr__(value, name)

    def undo() -> None:
        remove(attributes_of(value).keys() - before.keys())
        put(before)

    def rebuild(new: Sequence[Any]) -> None:
        put(dict(zip(names, new, strict=False)))  # implied ones are changed in place
        remove(before.keys() - {*names})

    return Node([], rebuild, in_place=True, undo=undo)


ADAPTER = Builtin()
