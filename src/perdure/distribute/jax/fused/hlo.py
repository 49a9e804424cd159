"""Comparison of optimized XLA programs by how each of their results is made.

Two results are the same if the same instructions make them of the same values: each value has a
hash of the instruction and of its operands. An instruction that is not understood equals no other.
Neither names count nor the order of independent instructions; one kernel (a fusion, the addition of
a reduction) has its instructions in order. Chains that only move elements may be written in several
ways.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from perdure.distribute.jax.fused.hlo_graph import (
    Instruction,
    dimensions,
    graph_of,
    shape_of,
    tuple_size,
)

# Raised by reading if another release of XLA gives its programs in another form.
_NOT_UNDERSTOOD = (KeyError, ValueError, IndexError, AttributeError, TypeError)
NOT_UNDERSTOOD = "XLA gives its programs in a form that perdure does not know"

# (contributions of all turns, the sum of two) -> their sum, in the tree
Tree = Callable[[list[Any], Callable[[Any, Any], Any]], Any]


class SinglePrograms(NamedTuple):
    """The compiled programs of a step for one device, and the paths of the results of grad and update.

    All take every argument: grad the state first, update the state and the total.
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

    `whole` makes the contributions of all `turns` (the replicas of a device); what follows (the sum
    by `tree`, the exchange, the update) are computations of their own, called one after the other.
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
    size = len(grad.parameters()) - len(state)
    starts = (len(state) + turn * size for turn in range(turns))
    values = [
        value
        for start in starts
        for value in grad.results([*given[: len(state)], *given[start : start + size]])
    ]
    *before, last = calls
    for call in before:
        if path := _first(call.operands, values, single.contributions * (len(values) // count)):
            return f"XLA computes {path} of grad in another way"
        values = call.result.leaves
    if turns > 1:
        # The sum of the contributions of several turns, of copies of the program that adds two.
        add = Program(single.add)
        added = tree(
            [add.parameters(turn * count)[:count] for turn in range(turns)],
            lambda left, right: add.results([*left, *right], opens=True),
        )
        if path := _first(module.called(calls[0], opens=True), added, single.contributions):
            return f"XLA adds {path} in another way"
    paths = ["the state"] * len(state) + single.contributions
    if path := _first(last.operands, [*state, *values], paths):
        return f"XLA computes {path} of grad in another way"
    if path := _first(module.called(last), update.results(), single.results):
        return f"XLA computes {path} of update in another way"
    path = _first(ends, last.result.leaves, single.results)
    return path and f"{path} is not what update returned"


def _first(ones: Sequence[Value], others: Sequence[Value], paths: Sequence[str]) -> str:
    """The path of the first pair that differs."""
    for one, other, path in zip(ones, others, paths, strict=True):
        if one.made != other.made:
            return path
    return ""


OPCODES = ("copy", "bitcast", "reshape", "transpose")
LARGEST = 1 << 24
"""Larger arrays are not followed element by element."""

# Two of these are two, although nothing else tells them apart.
_STATEFUL = ("rng", "rng-get-and-update-state", "infeed", "outfeed", "send", "recv")
_SIDE_EFFECT = b"\x88\x04\x01"  # HloInstructionProto.custom_call_has_side_effect
_NOT_INLINED = b"\n\ninlineable\x12\x05false"  # frontend_attributes: {inlineable: "false"}


class Origin(NamedTuple):
    """The array whose elements a value has, and the position of each there; None if all are equal."""

    made: str
    shape: bytes
    positions: Any = None


class Value(NamedTuple):
    """A hash of how a value is made; of a tuple, also its parts; of a moved array, what was moved."""

    made: str
    parts: tuple[Any, ...] | None = None
    origin: Origin | None = None

    @property
    def leaves(self) -> list[Value]:
        return [self] if self.parts is None else list(self.parts)


class Call(NamedTuple):
    """A call of a computation that was not inlined: its operands, and its result by a name."""

    operands: list[Value]
    target: int
    result: Value


class Program:
    """An optimized program."""

    def __init__(self, compiled: Any) -> None:
        graph = graph_of(compiled)
        self._computations, self._entry = graph.computations, graph.entry
        self._kernels: dict[int, str] = {}
        self._unchanged: dict[int, list[bool]] = {}

    def parameters(self, first: int = 0) -> list[Value]:
        """The arguments, by their numbers, which begin with `first`."""
        return self._parameters(self._entry, first)

    def results(
        self,
        arguments: Sequence[Value] | None = None,
        *,
        opens: bool = False,
        calls: list[Call] | None = None,
    ) -> list[Value]:
        """The leaves of the result for `arguments`.

        With `opens` instructions in fusions count as if they stood outside; `calls` gets the kept
        computations.
        """
        arguments = self.parameters() if arguments is None else arguments
        return _Reading(self, opens, calls).result(self._entry, arguments).leaves

    def called(self, call: Call, *, opens: bool = False) -> list[Value]:
        """The leaves of the result of a kept computation, of its own parameters."""
        arguments = self._parameters(call.target)
        return _Reading(self, opens).result(call.target, arguments).leaves

    def _parameters(self, number: int, first: int = 0) -> list[Value]:
        found = (i for i in self._computations[number].instructions if i.opcode == "parameter")
        shapes = {i.number: i.shape for i in found}
        return [_parameter(first + n, shapes[n]) for n in range(len(shapes))]

    def instructions(self, number: int) -> tuple[Sequence[Instruction], int]:
        """The instructions of a computation, and the number of the one that is its result."""
        computation = self._computations[number]
        return computation.instructions, computation.root

    def moves(self, fusion: Instruction) -> bool:
        """Whether a fusion only moves elements."""
        instructions, _ = self.instructions(fusion.called[0])
        return all(i.opcode in (*OPCODES, "parameter") for i in instructions)

    def kernel(self, number: int) -> str:
        """A computation as the sequence of its instructions."""
        if number not in self._kernels:
            positions: dict[int, int] = {}
            made: list[Any] = []
            instructions, root = self.instructions(number)
            for position, i in enumerate(instructions):
                positions[i.id] = position
                near = [positions.get(other) for other in (*i.operands, *i.predecessors)]
                made.append((i.opcode, i.shape, i.content, near, *map(self.kernel, i.called)))
            self._kernels[number] = _hash(*made, positions[root])
        return self._kernels[number]

    def unchanged(self, body: int, count: int) -> list[bool]:
        """Which elements no turn of a loop changes."""
        if body not in self._unchanged:
            start = tuple(Value(f"element {index} of loop {body}") for index in range(count))
            turn = _Reading(self, opens=False).result(body, [_tuple(start)])
            self._unchanged[body] = [
                one.made == other.made for one, other in zip(start, turn.leaves, strict=True)
            ]
        return self._unchanged[body]


class _Reading:
    """One reading of a program."""

    def __init__(self, program: Program, opens: bool, calls: list[Call] | None = None) -> None:
        self._program = program
        self._opens = opens
        self._calls = calls
        self._depth = 0  # the loops around the current instruction
        self._stateful = itertools.count()

    def result(self, number: int, arguments: Sequence[Value]) -> Value:
        """What a computation makes of its arguments."""
        instructions, root = self._program.instructions(number)
        values: dict[int, Value] = {}
        shapes = {i.id: i.shape for i in instructions}
        for i in instructions:
            taken = [values[operand] for operand in i.operands]
            if i.opcode == "parameter":
                value = arguments[i.number]
            elif i.opcode in OPCODES and (value := _moved(i, taken[0], shapes[i.operands[0]])):
                pass
            elif i.opcode == "tuple":
                value = _tuple(taken)
            elif i.opcode == "get-tuple-element" and taken[0].parts is not None:
                value = taken[0].parts[i.number]
            else:
                before = [values[p].made for p in i.predecessors if p in values]
                value = self._made(i, taken, before)
            values[i.id] = value
        return values[root]

    def _made(self, i: Instruction, taken: list[Value], before: list[str]) -> Value:
        if i.opcode == "call" and self._calls is not None and _NOT_INLINED in i.attributes:
            value = _named(_hash("call", len(self._calls)), i.shape)
            self._calls.append(Call(taken, i.called[0], value))
            return value
        if i.opcode == "call" or (i.opcode == "fusion" and (self._opens or self._program.moves(i))):
            inside = self.result(i.called[0], taken)
            opened = self._opens or i.opcode == "fusion"
            return inside if opened else _each(inside, "call", i.content)
        if i.opcode == "while" and taken[0].parts is not None:
            return self._loop(i, taken[0].parts)
        if i.opcode == "conditional":
            condition, *given = taken
            branches = [self.result(n, [v]) for n, v in zip(i.called, given, strict=True)]
            columns = zip(*(branch.leaves for branch in branches), strict=True)
            chosen = [
                Value(_hash("conditional", i.content, condition.made, *(v.made for v in column)))
                for column in columns
            ]
            return chosen[0] if tuple_size(i.shape) is None else _tuple(chosen)
        number = None
        if i.opcode in _STATEFUL or _SIDE_EFFECT in i.content:
            number = next(self._stateful)
        kernels = map(self._program.kernel, i.called)
        operands = [value.made for value in taken]
        return _named(
            _hash(i.opcode, i.shape, i.content, operands, before, number, *kernels), i.shape
        )

    def _loop(self, i: Instruction, start: Sequence[Value]) -> Value:
        """What a loop ends with.

        An element that no turn changes is its start. The others are numbered without those: where
        they stand in the tuple depends on the order of the compiler's passes.
        """
        body, condition = i.called
        same = self._program.unchanged(body, len(start))
        self._depth += 1
        number = itertools.count()
        elements = [
            value if kept else Value(f"variable {next(number)} in depth {self._depth}")
            for value, kept in zip(start, same, strict=True)
        ]
        turn = self.result(body, [_tuple(elements)]).leaves
        more = self.result(condition, [_tuple(elements)])
        self._depth -= 1
        changed = [n for n, kept in enumerate(same) if not kept]
        begins, ends = ([values[n].made for n in changed] for values in (start, turn))
        whole = _hash("while", i.content, begins, ends, more.made)
        return _tuple(
            [
                value if kept else Value(_hash(whole, element.made))
                for value, kept, element in zip(start, same, elements, strict=True)
            ]
        )


def _parameter(number: int, shape: bytes) -> Value:
    """An argument of a program."""
    # It has the layout of the program's arguments: always the plain one.
    return _named(_hash("parameter", number, shape), shape)


def _tuple(parts: Sequence[Value]) -> Value:
    return Value(_hash("tuple", *(part.made for part in parts)), tuple(parts))


def _named(made: str, shape: bytes) -> Value:
    """A value, with names for its parts if it is a tuple."""
    if (size := tuple_size(shape)) is None:
        return Value(made)
    return Value(made, tuple(Value(_hash(made, index)) for index in range(size)))


def _moved(i: Instruction, operand: Value, shape: bytes) -> Value | None:
    """The result of an instruction that only moves elements; None if it is not understood."""
    origin = moved(i, shape, operand.origin or Origin(operand.made, shape))
    if origin is None:
        return None
    if origin.positions is None and origin.shape == i.shape:
        return Value(origin.made)  # the same bytes elsewhere
    positions = None if origin.positions is None else hashlib.blake2b(origin.positions).digest()
    return Value(_hash("moved", origin.made, positions, i.shape), None, origin)


def _each(value: Value, *how: Any) -> Value:
    if value.origin is not None:
        return value
    if value.parts is None:
        return Value(_hash(*how, value.made))
    return _tuple([_each(part, *how) for part in value.parts])


def _hash(*things: Any) -> str:
    return hashlib.blake2b(repr(things).encode(), digest_size=16).hexdigest()


def moved(instruction: Instruction, shape: bytes, origin: Origin) -> Origin | None:
    """The origin of the result, from the origin of the operand of shape `shape`; None if unknown."""
    if instruction.opcode == "copy" and instruction.shape == shape:
        return origin  # of any shape: int4 elements, which share bytes, have a layout of their own
    one, other = shape_of(shape), shape_of(instruction.shape)
    if one is None or other is None or one.dtype != other.dtype or one.size > LARGEST:
        return None
    positions = origin.positions
    plain = one.is_plain and other.is_plain and positions is None
    if instruction.opcode == "copy" or (plain and instruction.opcode != "transpose"):
        return origin
    positions = np.arange(one.size, dtype=np.int32) if positions is None else positions
    positions = positions.reshape(one.dimensions)
    if instruction.opcode == "transpose":
        positions = positions.transpose(dimensions(instruction))
    elif instruction.opcode == "bitcast":
        in_memory = positions.transpose(one.major_to_minor).reshape(-1)
        sizes = [other.dimensions[axis] for axis in other.major_to_minor]
        positions = in_memory.reshape(sizes).transpose(np.argsort(other.major_to_minor))
    positions = np.ascontiguousarray(positions).reshape(-1)
    if np.array_equal(positions, np.arange(len(positions), dtype=np.int32)):
        positions = None
    return origin._replace(positions=positions)
