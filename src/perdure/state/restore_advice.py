"""What to do about a target that does not fit a checkpoint: the ways out that would help."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from perdure.errors import StateError
from perdure.state.leaf_spec import MAX_LINES, Difference, LeafSpec
from perdure.state.leaf_values import cast_leaf, is_cast
from perdure.state.restore_plan import RestorePlan
from perdure.state.restore_request import RestoreRequest
from perdure.text import counted

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
_MOST_PAIRS = 200
"""How many leaves of each side are looked at for a rename."""


def advice(lines: Sequence[Difference]) -> str:
    """What helps in any case."""
    is_dtype_only = any(
        line.expected
        and line.stored
        and line.expected != line.stored
        and line.expected.partition("[")[2] == line.stored.partition("[")[2] != ""
        for line in lines
    )
    return _REBUILD + (_DTYPE if is_dtype_only else "") + state_dict_advice(lines)


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


def ways_out(plan: RestorePlan, other: RestorePlan, request: RestoreRequest) -> str:
    """A sentence on those arguments of `CheckpointManager.restore` that would help; "" if none would.

    Args:
        plan: the plan that has differences.
        other: the plan of the same restore that is not strict.
        request: what the caller asked for.
    """
    lines = plan.differences
    ways = []
    if not request.cast and any(_can_cast(plan, other, line) for line in lines[:MAX_LINES]):
        ways.append("`cast=True` converts dtypes")
    if branches := _lacking(lines, other):
        names = repr(branches[0] if len(branches) == 1 else branches)
        ways.append(f"`leaves={names}` restores only what the target has")
    if (pair := _rename(lines, other)) is not None:
        ways.append(f"`rename={{{pair[0]!r}: {pair[1]!r}}}` moves leaves of the checkpoint")
    if request.strict and not other.differences and other.leaves:
        ways.append(
            f"`strict=False` restores the {counted(len(other.leaves), 'leaf', 'leaves')} that fit and "
            f"keeps what the target has elsewhere, which is no exact resume"
        )
    return f" `CheckpointManager.restore` has ways out: {'; '.join(ways)}." if ways else ""


def _can_cast(plan: RestorePlan, other: RestorePlan, line: Difference) -> bool:
    expected, leaf = other.expected.get(line.path), plan.leaves.get(line.path)
    if expected is None or leaf is None or expected.shape != leaf.shape:
        return False
    if expected == LeafSpec.of(leaf):  # then something else does not fit
        return False
    if leaf.shards is not None:  # the values of other processes are not here
        return is_cast(leaf.dtype, expected.dtype)
    try:
        cast_leaf(leaf, expected)
    except StateError:
        return False
    return True


def _lacking(lines: Sequence[Difference], plan: RestorePlan) -> list[str]:
    """The top branches of the target, if only leaves of other branches differ, which it lacks."""
    fits = sorted({path.partition("/")[0] for path in plan.leaves})
    foreign = {line.path.partition("/")[0] for line in lines}
    if any(line.reason or line.expected is not None for line in lines) or foreign & {*fits, ""}:
        return []
    return fits


def _rename(lines: Sequence[Difference], plan: RestorePlan) -> tuple[str, str] | None:
    """The rename of a branch (or of a leaf) that would place the most leaves without a place."""
    missing: dict[str, LeafSpec] = {}
    unused: dict[str, LeafSpec] = {}
    for line in lines:
        if line.stored is None and line.path in plan.expected and not line.reason:
            missing[line.path] = plan.expected[line.path] or LeafSpec("", ())
        elif line.expected is None and line.path in plan.specs and not line.reason:
            unused[line.path] = plan.specs[line.path]
    pairs: Counter[tuple[str, str]] = Counter()
    for old, spec in list(unused.items())[:_MOST_PAIRS]:
        for new, expected in list(missing.items())[:_MOST_PAIRS]:
            if spec == expected and (pair := _moved(old, new)) is not None:
                pairs[pair] += 1
    if not pairs:
        return None
    return max(pairs, key=lambda pair: (pairs[pair], -len(pair[0]) - len(pair[1]), pair))


def _moved(old: str, new: str) -> tuple[str, str] | None:
    """The branches in which two paths differ; None if they do not even end alike."""
    first, second = old.split("/"), new.split("/")
    if first[-1] != second[-1]:
        return None
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return "/".join(first), "/".join(second)
