"""Comparison of optimized XLA programs by how each of their results is made.

Two results are the same if the same instructions make them of the same values. What is not understood
is the same as nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from perdure.distribute.jax.fused.hlo_graph import graph_of, tuple_size
from perdure.distribute.jax.fused.hlo_values import Call, Program, Value

# Raised by reading if another release of XLA gives its programs in another form.
_NOT_UNDERSTOOD = (KeyError, ValueError, IndexError, AttributeError, TypeError)
NOT_UNDERSTOOD = "XLA gives its programs in a form that perdure does not know"

# (contributions of all turns, the sum of two) -> their sum, in the tree
Tree = Callable[[list[Any], Callable[[Any, Any], Any]], Any]


class SinglePrograms(NamedTuple):
    """The compiled programs of a step for one device, and the paths of what grad and update return.

    All of them take every argument. grad takes the state first, then its other arguments; update takes
    the state and the total.
    """

    grad: Any
    add: Any
    update: Any
    contributions: list[str]
    results: list[str]


def difference(one: Any, other: Any, paths: Sequence[str]) -> str:
    """The path of the first result that two programs make in different ways; "" if there is none."""
    with suppress(*_NOT_UNDERSTOOD):
        return _first(Program(one).results(), Program(other).results(), paths)
    return NOT_UNDERSTOOD


def instructions(program: Any) -> int:
    """How many instructions a program has; 0 if it is not understood."""
    with suppress(*_NOT_UNDERSTOOD):
        return sum(len(c.instructions) for c in graph_of(program).computations.values())
    return 0


def calls_python(program: Any) -> bool:
    """Whether Python computes values of a program, or is called in order (`jax.pure_callback`)."""
    with suppress(*_NOT_UNDERSTOOD):
        return any(
            i.opcode == "custom-call"
            and b"python_cpu_callback" in i.content
            and tuple_size(i.shape) != 0
            for computation in graph_of(program).computations.values()
            for i in computation.instructions
        )
    return True


def step_difference(
    whole: Any, single: SinglePrograms, turns: int, exchanges: bool, tree: Tree
) -> str:
    """What in the program of a whole step is not as in the programs for one device; "" for nothing.

    Args:
        whole: Takes the state, then the arguments of each turn, and makes the contributions of all
            turns. What follows are computations of their own that are called one after the other: the
            sum of several turns, the exchange, and the update.
        single: What it is compared with.
        turns: The number of replicas of a device.
        exchanges: Whether the sum goes through an exchange between devices.
        tree: The order of the additions.
    """
    with suppress(*_NOT_UNDERSTOOD):
        return _step_difference(whole, single, turns, exchanges, tree)
    return NOT_UNDERSTOOD


def _step_difference(
    whole: Any, single: SinglePrograms, turns: int, exchanges: bool, tree: Tree
) -> str:
    module, update = Program(whole), Program(single.update)
    calls: list[Call] = []
    ends = module.results(calls=calls)
    if len(calls) != (turns > 1) + exchanges + 1:
        return "grad, the sum and update are not three computations to XLA"
    count = len(single.contributions)
    state = update.parameters()[: len(update.parameters()) - count]
    grad, given = Program(single.grad), module.parameters()
    if given[: len(grad.parameters())] != grad.parameters():
        return "XLA takes the arguments in another form"
    values = _contributions(grad, given, len(state), turns)
    *before, last = calls
    for call in before:
        if path := _first(call.operands, values, single.contributions * (len(values) // count)):
            return f"XLA computes {path} of grad in another way"
        values = call.result.leaves
    if turns > 1:
        added = _added(Program(single.add), count, turns, tree)
        if path := _first(module.called(calls[0], opens=True), added, single.contributions):
            return f"XLA adds {path} in another way"
    paths = ["the state"] * len(state) + single.contributions
    if path := _first(last.operands, [*state, *values], paths):
        return f"XLA computes {path} of grad in another way"
    if path := _first(module.called(last), update.results(), single.results):
        return f"XLA computes {path} of update in another way"
    path = _first(ends, last.result.leaves, single.results)
    return path and f"{path} is not what update returned"


def _contributions(grad: Program, given: Sequence[Value], state: int, turns: int) -> list[Value]:
    """The results of grad for each turn; `given` is the state and then the arguments of all turns."""
    size = len(grad.parameters()) - state
    starts = (state + turn * size for turn in range(turns))
    return [
        value
        for start in starts
        for value in grad.results([*given[:state], *given[start : start + size]])
    ]


def _added(add: Program, count: int, turns: int, tree: Tree) -> list[Value]:
    """The sum of the contributions of several turns, made of copies of the program that adds two."""
    return tree(
        [add.parameters(turn * count)[:count] for turn in range(turns)],
        lambda left, right: add.results([*left, *right], opens=True),
    )


def _first(ones: Sequence[Value], others: Sequence[Value], paths: Sequence[str]) -> str:
    """The path of the first pair that differs."""
    for one, other, path in zip(ones, others, paths, strict=True):
        if one.made != other.made:
            return path
    return ""
