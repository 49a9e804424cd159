"""The extra members of every checkpoint: values that decide the next step and are in no `state_dict`.

Extra members are process leaves: not in the fingerprint, and each process of a group has its own.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from perdure.errors import CorruptionError, MismatchError, UnsupportedLeafError
from perdure.runtime.process_group import Processes
from perdure.state.builtin import is_frozen
from perdure.state.leaf_spec import nested_too_deeply
from perdure.state.leaf_values import plain_value, scalar_leaf
from perdure.state.paths import join_dotted, join_key
from perdure.state.program_code import is_user_class
from perdure.state.structure import StateIdentities, memory_of, parameters_by_key, refuse_addresses
from perdure.state.walk import Walk
from perdure.store.format import EPOCH_ENDS
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import LeafEntry

R = TypeVar("R")


class Saving(NamedTuple):
    """A save of process number `process`. A member may still change `leaves`; `captured` has the leaves
    of the extra members before it."""

    walk: Walk
    leaves: Leaves
    process: int
    captured: Mapping[str, Leaf]


class Restoring(NamedTuple):
    """A restore for one process: the process leaves of the checkpoint, the function from a path in the
    checkpoint to the path in the state, the name in messages, and the processes of this run."""

    leaves: Mapping[str, Leaf]
    renamed: Callable[[str], str]
    where: str
    group: Processes

    def path(self, name: str) -> str:
        """The path of the leaf `name` of this process; of process 0 if fewer processes saved."""
        own = f"process/{self.group.index}/{name}"
        return own if own in self.leaves else f"process/0/{name}"

    def stored(self, name: str, decoder: msgspec.json.Decoder[R]) -> R | None:
        """The value of the JSON leaf `name`; None without the leaf."""
        path = self.path(name)
        if path not in self.leaves:
            return None
        try:
            return decoder.decode(self.leaves[path].data)
        except ValueError as error:  # of msgspec, or of Unicode
            raise CorruptionError(f"{self.where}: {path} cannot be read: {error}.") from error

    def by_path(self, name: str, decoder: msgspec.json.Decoder[dict[str, R]]) -> dict[str, R]:
        """The values by path of the JSON leaf `name`, by paths in the state; empty without the leaf."""
        found = self.stored(name, decoder) or {}
        return {self.renamed(path): value for path, value in found.items()}


def json_leaf(value: Any) -> Leaf:
    """The leaf of a value as JSON, which `Restoring.stored` reads."""
    return Leaf("py:str", (), msgspec.json.encode(value, order="sorted"), frozen=True)


class ExtraMember:
    """One kind of value that is saved beside the state, by each process of a group for itself."""

    def observe(self, walk: Walk) -> None:
        """Record what the state has when the program begins with it or restores into it; repeatable."""

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        """The leaves of a save; none if there is nothing to store."""
        return {}

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        """Give back to the restored state what `capture` has stored; returns warnings."""
        return []


_MEMBERS = {
    "perdure.state.extra_members:EpochEnds": None,
    "perdure.state.extra_members:SharedMembers": None,
    "perdure.state.class_values:ClassValues": None,
    "perdure.state.attributes:Attributes": None,
    "perdure.state.torch_gradients:Gradients": "torch",
    "perdure.state.torch_buffer_sync:DdpBufferSync": "torch",
    "perdure.state.keras_optimizers:LeftOutOptimizers": "keras",
    "perdure.state.tensorflow_state:Iterators": "tensorflow",
    "perdure.state.extra_members:MemoryOrders": None,
    "perdure.state.process_random:ProcessRandom": None,
}
"""The class of each member, and the framework without which it has nothing to store. Attributes come
before gradients, because a parameter has to require a gradient first; generators come last, because
the other members may draw random numbers."""

_RANDOM = "perdure.state.process_random:ProcessRandom"


class ExtraMembers:
    """The extra members of the states that a manager saves and restores."""

    def __init__(self, *, save_random_state: bool) -> None:
        self._names = [name for name in _MEMBERS if save_random_state or name != _RANDOM]
        self._made: dict[str, ExtraMember] = {}
        self._members()

    def begin(self) -> None:
        """The program begins: random numbers count from here on."""
        if (random := self._made.get(_RANDOM)) is not None:
            random.begin()  # type: ignore[attr-defined]

    def observe(self, state: Any) -> None:
        """See `ExtraMember.observe`; `state` may be a walk."""
        walk = Walk.of(state)
        for member in self._members():
            member.observe(walk)

    def capture(self, walk: Walk, leaves: Leaves, process: int) -> dict[str, Leaf]:
        """The process leaves of a save."""
        captured: dict[str, Leaf] = {}
        try:
            for member in self._members():
                captured |= member.capture(Saving(walk, leaves, process, captured))
        except RecursionError:
            raise nested_too_deeply() from None
        return captured

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        """Give back what was stored, after the state itself; returns warnings."""
        return [note for member in self._members() for note in member.restore(restoring, walk)]

    def _members(self) -> list[ExtraMember]:
        for name in self._names:
            framework = _MEMBERS[name]
            if name not in self._made and (framework is None or sys.modules.get(framework)):
                module, _, member = name.partition(":")
                self._made[name] = getattr(import_module(module), member)()
        return [self._made[name] for name in self._names if name in self._made]


_MUTABLE_TYPES = (dict, list, deque, set, bytearray, np.ndarray, np.random.SeedSequence)
_groups_of_paths = msgspec.json.Decoder(list[list[str]])


class SharedMembers(ExtraMember):
    """Stores which paths have one object or one memory; a restore makes them one again or refuses."""

    def __init__(self) -> None:
        self._in_one_memory: set[tuple[str, str]] | None = None

    def observe(self, walk: Walk) -> None:
        _refuse_views(walk)
        if self._in_one_memory is None:
            self._in_one_memory = _in_one_memory(walk)

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        walk = saving.walk
        _refuse_views(walk)
        _refuse_shared_moments(walk)
        at_first = self._in_one_memory or set()
        new = sorted(_in_one_memory(walk, at_first) - at_first)
        leaves = {f"process/{saving.process}/one_memory": json_leaf(new)} if new else {}
        known = None
        for branch in walk.branches if dict in walk.kinds else ():
            if type(branch.value) is dict and int in map(type, branch.value):
                known = known or StateIdentities(walk)
                refuse_addresses(branch.value, branch.path, known)
        containers = {kind for kind in walk.kinds if _is_mutable(kind)}
        found = [
            (each.path, each.value) for each in walk.branches if type(each.value) in containers
        ]
        found += [(path, value) for path, value in walk.inside if _is_mutable(type(value))]
        for path, node in walk.objects.items():
            if isinstance(shared := getattr(node.target, "param_groups", None), list):
                found.append((path, shared))
        paths, values = [path for path, _ in found], [value for _, value in found]
        torch = sys.modules.get("torch")
        kinds = (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)
        for start, stop in walk.runs:
            if isinstance(walk.values[start], kinds):
                paths += walk.paths[start:stop]
                values += walk.values[start:stop]
        if len(set(map(id, values))) == len(values):  # nearly always
            return leaves
        groups: dict[int, list[str]] = {}
        for path, value in zip(paths, values, strict=True):
            groups.setdefault(id(value), []).append(path)
        shared = sorted(paths for paths in groups.values() if len(paths) > 1)
        return {f"process/{saving.process}/shared": json_leaf(shared)} | leaves

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        """Let tensors that were in one memory share it again. `shared_groups` lets the restore make one
        object of several paths; compare the lists that it cannot make one."""
        if pairs := restoring.stored("one_memory", _groups_of_paths):
            tensors = {path: value for path, value, _ in _in_memory(walk, may_share=True)}
            for one, other in pairs:
                base, tensor = (tensors.get(restoring.renamed(path)) for path in (one, other))
                if base is not None and tensor is not None:
                    tensor.data = base.data
        lists = {p: getattr(node.target, "param_groups", None) for p, node in walk.objects.items()}
        first: dict[int, str] = {}
        for path, number in shared_groups(restoring).items():
            other = first.setdefault(number, path)
            if other in lists and lists.get(path) is not lists[other]:
                raise MismatchError(
                    f"{restoring.where}: {other} and {path} had one list of `param_groups` when they "
                    f"were saved, and the target has two, so that a scheduler of one would not change "
                    f"the other. Make the target as the run did that saved it (`self.param_groups = "
                    f"base.param_groups`), and restore again."
                )
        return []


def _refuse_views(walk: Walk) -> None:
    """Refuse two array objects that share elements: after a restore they would not, and a change of one
    in place would no longer reach the other."""
    torch = sys.modules.get("torch")
    tensors, arrays = list[tuple[str, Any]](), list[tuple[str, Any]]()
    for start, stop in walk.runs:
        if torch is not None and isinstance(walk.values[start], torch.Tensor):
            tensors += zip(walk.paths[start:stop], walk.values[start:stop], strict=True)
    for path, module in walk.torch_objects("nn.Module") if tensors else ():
        named = module.named_parameters()
        tensors += [(join_dotted(path, name), value) for name, value in named]
    of_numpy = [run for run in walk.runs if isinstance(walk.values[run[0]], np.ndarray)]
    # Nearly always no array is a view, and there may be very many arrays.
    if any(_is_on_numpy(value) for _, value in tensors) or any(
        value.base is not None for run in of_numpy for value in walk.values[slice(*run)]
    ):
        for start, stop in of_numpy:
            arrays += zip(walk.paths[start:stop], walk.values[start:stop], strict=True)
    found = [(_extent(value), path, value) for path, value in [*arrays, *tensors]]
    extents = [(extent, path, value) for extent, path, value in found if extent is not None]
    for one, other in pairwise(sorted(extents, key=itemgetter(0))):
        if one[2] is not other[2] and other[0][0] < one[0][1]:
            raise UnsupportedLeafError(
                f"{one[1]} and {other[1]} share memory, and would be two arrays after a restore. "
                f"Keep a copy (`clone()`, `copy()`, `copy.deepcopy(model.state_dict())`) if they are "
                f"to be two, or one of them in the state, and make the view again where it is used."
            )


def _in_one_memory(
    walk: Walk, at_first: set[tuple[str, str]] | None = None
) -> set[tuple[str, str]]:
    """The pairs of parameters that are two objects and begin at one address, and the pairs of tensors
    in the program's optimizers that share memory with another tensor. A pair that is not in `at_first`
    is refused if one of the two shows only a part of the other."""
    first: dict[int, tuple[str, Any]] = {}
    pairs: set[tuple[str, str]] = set()
    for path, value, start in _in_memory(walk):
        other, base = first.setdefault(start, (path, value))
        if not start or base is value:
            continue
        pairs.add((other, path))
        shown = {(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (base, value)}
        if at_first is not None and (other, path) not in at_first and len(shown) > 1:
            raise UnsupportedLeafError(
                f"{other} and {path} share memory, and did not when the program gave the state to the "
                f"restore or first saved it, so that they would be two tensors after a restore. Copy "
                f"the values (`copy_`, `clone()`), or make them one where the model is made."
            )
    return pairs


def _in_memory(walk: Walk, *, may_share: bool = False) -> list[tuple[str, Any, int]]:
    """Path, value and address of each parameter, and of each tensor in the program's optimizers. Empty
    if no two of them can share memory, unless `may_share`."""
    modules = walk.torch_objects("nn.Module")
    found = walk.torch_objects("optim.Optimizer")
    optimizers = [(path, part) for path, part in found if is_user_class(type(part))]
    if not (optimizers or may_share):  # nearly always nothing is shared, and there may be very many
        parts = [part for _, module in modules for part in module.modules()]
        unique = {id(each): each for part in parts for each in part._parameters.values()}
        starts = list(filter(None, map(_address, unique.values())))
        if len(set(starts)) == len(starts):
            return []
    found = [
        (join_dotted(path, name), value, _address(value))
        for path, module in modules
        for name, value in module.named_parameters()
    ]
    for path, optimizer in optimizers:
        pairs = enumerate(parameters_by_key(optimizer))
        numbers = {id(each): number for number, (_, each) in pairs}
        for key, state in getattr(optimizer, "state", {}).items():
            number = numbers.get(id(key), "other")
            for name, value in state.items() if isinstance(state, dict) else ():
                if hasattr(value, "untyped_storage"):
                    inside = join_dotted(f"{path}/state/{number}", name)
                    found.append((inside, value, memory_of(value)))
    return found


def _address(tensor: Any) -> int:
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except (RuntimeError, ValueError):  # of a subclass without memory of its own, or a lazy one
        return 0


def _is_on_numpy(tensor: Any) -> bool:
    """Whether the memory of a tensor may be that of a NumPy array (`torch.from_numpy`)."""
    return tensor.is_cpu and memory_of(tensor) != 0 and not tensor.untyped_storage().resizable()


def _refuse_shared_moments(walk: Walk) -> None:
    """Refuse a tensor in the states of two optimizers: after a restore there would be two tensors."""
    states = [(path, getattr(node.target, "state", None)) for path, node in walk.objects.items()]
    states = [(path, state) for path, state in states if isinstance(state, defaultdict)]
    first: dict[int, tuple[str, Any]] = {}
    for path, parts in ((path, parts) for path, state in states for parts in state.values()):
        for value in parts.values() if isinstance(parts, dict) else ():
            other, held = first.setdefault(id(value), (path, parts))
            if held is not parts and hasattr(value, "dtype"):
                raise UnsupportedLeafError(
                    f"{other} and {path} have a tensor of their state in common (of two parameters, or "
                    f"of two optimizers), and would have two after a restore. Keep one that all share "
                    f"in an attribute of the optimizer; give `load_state_dict`, which copies no "
                    f"tensor, a copy: `load_state_dict(copy.deepcopy(optimizer.state_dict()))`."
                )


def _extent(value: Any) -> tuple[int, int] | None:
    """The addresses at which the elements of an array begin and end."""
    if isinstance(value, np.ndarray):
        start, steps, size = value.__array_interface__["data"][0], value.strides, value.itemsize
    else:
        if not memory_of(value):
            return None
        value = getattr(value, "_local_tensor", value)
        start = value.data_ptr()
        size = value.element_size()
        steps = [step * size for step in value.stride()]
    if 0 in value.shape or not start:
        return None
    reach = [(length - 1) * step for length, step in zip(value.shape, steps, strict=True)]
    below, above = sum(n for n in reach if n < 0), sum(n for n in reach if n > 0)
    return start + below, start + above + size


@cache
def _is_mutable(kind: type) -> bool:
    """Whether values of a class can change in place: containers, user objects and NumPy arrays can."""
    is_object = is_user_class(kind) and not hasattr(kind, "load_state_dict")
    is_kept = issubclass(kind, _MUTABLE_TYPES) or is_dataclass(kind) or is_object
    return is_kept and not is_frozen(kind)


def shared_groups(restoring: Restoring) -> dict[str, int]:
    """The number of the object at each path that shares its object with other paths."""
    groups = restoring.stored("shared", _groups_of_paths) or []
    return {restoring.renamed(path): n for n, paths in enumerate(groups) for path in paths}


_orders = msgspec.json.Decoder(dict[str, tuple[int, ...]])


class MemoryOrders(ExtraMember):
    """Stores the memory order of arrays, on which the order of the additions in the next step depends.
    `load_orders` sets it, before the state is restored. Refuses nothing."""

    def __init__(self) -> None:
        self._has_others = False

    def observe(self, walk: Walk) -> None:
        self._has_others = self._has_others or any(map(_is_other, _arrays(walk)))

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        both = (saving.leaves, saving.captured)
        axes = {path: leaf.axes for each in both for path, leaf in each.items() if leaf.axes}
        # Without the leaf, arrays have the order of the target.
        if not axes and not self._has_others:
            return {}
        return {f"process/{saving.process}/orders": json_leaf(axes)}


def _arrays(walk: Walk) -> Iterator[Any]:
    for start, stop in walk.runs:
        if hasattr(walk.values[start], "strides") or hasattr(walk.values[start], "stride"):
            yield from walk.values[start:stop]
    for _, module in walk.torch_objects("nn.Module"):
        yield from module.parameters()
        yield from module.buffers()


def _is_other(array: Any) -> bool:
    """Whether an array of NumPy or PyTorch is not row-major."""
    if isinstance(array, np.ndarray):
        return not array.flags.c_contiguous
    if not hasattr(array, "stride"):
        return False
    from perdure.state.torch_tensors import axes_of

    return axes_of(array) is not None


def load_orders(restoring: Restoring, *loaded: dict[str, Leaf]) -> None:
    """Give the leaves the memory order that their arrays had, if the checkpoint has it."""
    axes = restoring.stored("orders", _orders)
    if axes is None:
        return
    for leaves in loaded:
        for path, leaf in leaves.items():
            rows = tuple(range(len(leaf.shape)))
            order = axes.get(path, rows)
            if tuple(sorted(order)) != rows:
                raise CorruptionError(
                    f"{restoring.where}: {path} has {len(rows)} axes, and an order of {len(order)}."
                )
            if len(rows) > 1 and leaf.shards is None:
                leaves[path] = msgspec.structs.replace(leaf, axes=order)


_ENDED = re.compile(rf"process/[0-9]+/{EPOCH_ENDS}")
_ORDER = re.compile(r"([1-9][0-9]{0,18}) ([0-9a-f]*)")
_POSITION = {"epoch", "batch", "step", "seed", "examples", "batches_per_epoch"}
_ended = msgspec.json.Decoder(list[str])


class EpochEnds(ExtraMember):
    """Stores the end of an epoch of a `ResumableLoader`, in one form whether a save is in the last
    iteration or after it. `load_epoch_ends` reads it, before the state is restored.

    Both positions, (epoch, batches) and (epoch + 1, 0), belong to one step, whose state may only be
    saved again with the same bits. So the first is stored, and the leaf says that the loop has ended.
    """

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        """Give positions after an epoch the form of its last batch; the leaf names them."""
        leaves, ended = saving.leaves, list[str]()
        # A million leaves are looked at in every save: the cheapest test first.
        for path in [path for path in leaves if path[-5:] == "order"]:
            parent, _, last = path.rpartition("/")
            found = {
                name: leaf for name in _POSITION if (leaf := leaves.get(join_key(parent, name)))
            }
            is_position = last == "order" and len(found) == len(_POSITION)
            if not is_position or {leaf.dtype for leaf in found.values()} != {"py:int"}:
                continue
            epoch, batch = plain_value(found["epoch"]), plain_value(found["batch"])
            parts = _ORDER.fullmatch(leaves[path].text) if leaves[path].dtype == "py:str" else None
            if parts is None or batch or not epoch:
                continue
            _put_position(leaves, parent, epoch - 1, int(parts[1]), parts[2])
            ended.append(parent)
        if not ended:
            return {}
        return {f"process/{saving.process}/{EPOCH_ENDS}": json_leaf(sorted(ended))}


def ended_order(batch: int, order: str) -> str:
    """The `order` of the position after an epoch that used `batch` batches with this `order`."""
    return f"{batch} {order}" if batch else ""


def load_epoch_ends(leaves: Leaves, process_leaves: Iterable[LeafEntry], where: str) -> None:
    """Give the positions that `EpochEnds` has stored the form that they have after the epoch."""
    parents: set[str] = set()
    for entry in process_leaves:
        if _ENDED.fullmatch(entry.path):
            try:
                parents.update(_ended.decode(entry.text or ""))
            except ValueError as error:  # of msgspec
                raise CorruptionError(f"{where}: {entry.path} cannot be read: {error}.") from error
    for parent in parents:
        names = [join_key(parent, name) for name in ("epoch", "batch", "order")]
        if all(name in leaves for name in names):  # else only others were read
            epoch, batch, order = (plain_value(leaves[name]) for name in names)
            _put_position(leaves, parent, epoch + 1, 0, ended_order(batch, order))


def _put_position(leaves: Leaves, parent: str, *values: Any) -> None:
    for name, value in zip(("epoch", "batch", "order"), values, strict=True):
        leaves[join_key(parent, name)] = scalar_leaf(value)
