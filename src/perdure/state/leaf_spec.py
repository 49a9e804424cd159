"""dtypes and shapes of leaves, how a target and a checkpoint differ, and errors with their paths."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from posixpath import commonpath
from typing import Any, NamedTuple

from msgspec import Struct

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry
from perdure.text import counted

MAX_LINES = 20
_REBUILD = "Build the target with the code that saved it, or restore without a target."
_DTYPE = (
    " Where only the dtype of an array differs, the program may have changed it after the target was "
    "made: cast it back in the step, or give the target the dtype that the step returns (in JAX: "
    "`like=jax.eval_shape(step, state, batch)`)."
)
_STATE_DICT = (
    " Put the optimizer itself into the state: its `state_dict()` is a copy, which has more members "
    "after the first step and is not loaded back."
)
_MOMENT = re.compile(r"(^|/)state/\d+/[^/]+$")
_LR = "param_groups/0/lr"  # every state of an optimizer has it
FEW = 4
"""So many differences in one branch become one line, if there are more than `MAX_LINES`."""


class LeafSpec(Struct, frozen=True, gc=False):
    """dtype name and shape of a leaf, known without its data. Weak typing, which may change while a
    program runs, is left out."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Leaf | LeafEntry) -> LeafSpec:
        """The spec of a stored leaf, or of its record in a manifest."""
        return cls(leaf.dtype.removeprefix(WEAK_PREFIX), leaf.shape)

    def describe(self) -> str:
        """`float32[3,4]`, or `int` for a scalar."""
        return Leaf(self.dtype, self.shape, memoryview(b"")).describe().strip()


class Difference(NamedTuple):
    """A path at which a target and a checkpoint differ: descriptions of the leaf of each, None
    without one; or a `reason` that is neither structure, dtype nor shape."""

    path: str
    expected: str | None = None
    stored: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        path = self.path or "(the state itself)"
        if self.reason:
            return f"{path}: {self.reason}"
        if self.stored is None:
            return f"{path}: expected {self.expected}, the checkpoint has no such leaf"
        if self.expected is None:
            return f"{path}: the checkpoint has {self.stored}, the target no such leaf"
        return f"{path}: expected {self.expected}, found {self.stored}"


Check = Callable[[Mapping[str, Leaf]], list[Difference]]
"""Takes the stored leaves of an object, by relative paths, and returns the differences."""


def fits(expected: LeafSpec, stored: LeafSpec) -> bool:
    """Whether a stored leaf fits an expected one; a number takes a 0-d array of its kind."""
    kinds = {
        "py:int": ("int", "uint"),
        "py:float": ("float", "bfloat"),
        "py:complex": ("complex",),
        "py:bool": ("bool",),
    }
    return (
        expected == stored
        or (expected.dtype.startswith("py:") and stored.dtype.startswith("py:"))
        or (stored.shape == () and stored.dtype.startswith(kinds.get(expected.dtype, ("/",))))
    )


def mismatch_error(differences: Sequence[Difference], hint: str = "") -> MismatchError:
    """The error for a target that differs from the checkpoint, with what to do about it."""
    is_dtype_only = any(
        line.expected
        and line.stored
        and line.expected != line.stored
        and line.expected.partition("[")[2] == line.stored.partition("[")[2] != ""
        for line in differences
    )
    advice = _REBUILD + _DTYPE * is_dtype_only + state_dict_advice(differences) + hint
    return MismatchError(
        f"the target and the checkpoint differ in {counted(len(differences), 'leaf', 'leaves')}; "
        f"nothing was changed:\n{format_differences(differences)}\n{advice}"
    )


def state_dict_advice(lines: Sequence[Difference]) -> str:
    """A sentence for a program that has put `optimizer.state_dict()` into its state; else ""."""
    sided = [line for line in lines if not line.reason and None in (line.expected, line.stored)]
    grown = {
        (line.path[: found.end(1)], line.expected is None)
        for line in sided
        if (found := _MOMENT.search(line.path))
    }
    # A state that one side lacks as a whole has not grown.
    whole = {
        (line.path.removesuffix(_LR), line.expected is None)
        for line in sided
        if line.path.endswith(_LR)
    }
    return _STATE_DICT if grown - whole else ""


def format_differences(differences: Sequence[Difference]) -> str:
    """The differences as lines. If there are more than `MAX_LINES`, the paths that only one side has
    become one line for each branch, and the rest is counted."""
    lines = [str(difference) for difference in differences]
    if len(lines) > MAX_LINES:
        lines = _by_branch(differences)
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"and {len(lines) - MAX_LINES:,} more"]
    return "\n".join(f"  {line}" for line in lines)


def _by_branch(differences: Sequence[Difference]) -> list[str]:
    """A line for each difference, but only one for several in a top branch that one side lacks."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for line in differences:
        side = (
            "" if line.reason else "target" * (not line.stored) + "checkpoint" * (not line.expected)
        )
        branch = line.path.partition("/")[0] if side else line.path
        groups.setdefault((branch, side), []).append(line)
    lines = []
    for (_, side), group in groups.items():
        if len(group) < FEW:
            lines += map(str, group)
            continue
        prefix = commonpath([line.path.rpartition("/")[0] for line in group])
        lines.append(f"{prefix}: {len(group):,} leaves that only the {side} has")
    return lines


def type_name(value: Any) -> str:
    """The full name of a value's class, such as `torch.nn.modules.linear.Linear`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def add_path(error: StateError, path: str) -> None:
    """Put `path` in front of the message of `error`, unless it has a path already."""
    if not hasattr(error, "path"):
        error.path = path  # type: ignore[attr-defined]
        if not isinstance(error, MismatchError):
            error.args = (f"{path or '(the state itself)'}: {error}",)


class PathInErrors:
    """Adds `path` to every `StateError` inside, and with `reason` makes one of any other error."""

    def __init__(self, path: str, reason: str | None = None) -> None:
        self._path = path
        self._reason = reason

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StateError):
            add_path(error, self._path)
        elif self._reason is not None and isinstance(error, Exception):
            failure = StateError(f"{self._reason}: {type(error).__name__}: {error}")
            add_path(failure, self._path)
            raise failure from error


class AttributeErrors:
    """Names the class of `value` if its `__getattr__` does not know an attribute, and raises what
    Python does not expect of it: `KeyError`, where a dict has the attributes."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        has_own = error is not None and hasattr(type(self._value), "__getattr__")
        if has_own and isinstance(error, LookupError) and not isinstance(error, StateError):
            raise UnsupportedLeafError(
                f"a {type_name(self._value)} raises {type(error).__name__} for an attribute that it "
                f"does not have ({error}). Let its `__getattr__` raise AttributeError, which `hasattr` "
                f"and `copy` need, too."
            ) from error


def nested_too_deeply() -> UnsupportedLeafError:
    """The error for a state that exceeds Python's recursion limit."""
    return UnsupportedLeafError(
        f"the state contains itself, or is nested deeper than Python's recursion limit "
        f"({sys.getrecursionlimit()}). Save a tree of containers without such a loop."
    )


def duplicate_path(path: str) -> UnsupportedLeafError:
    """The error for two values with the same path."""
    return UnsupportedLeafError(f"two leaves have the path {path!r}; rename one of the keys.")
