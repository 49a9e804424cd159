"""An optimized XLA program as a graph: its computations and instructions, without their names.

jaxlib has no classes for the parts of `HloModuleProto`. The few fields that make the structure are
read by their numbers, which never change; all others are kept as bytes, so that nothing unknown is
left out of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# Fields of HloInstructionProto.
_OPCODE, _SHAPE, _PARAMETER, _ELEMENT, _ID = 2, 3, 9, 13, 35
_OPERANDS, _PREDECESSORS, _CALLED, _ATTRIBUTES = 36, 37, 38, 68
# What does not change the result of an instruction: its name, its origin (7, 82), and its sharding
# (40), which has been applied by the time a program is optimized.
_LEFT_OUT = {1, 7, 40, 82, _SHAPE, _ID, _OPERANDS, _PREDECESSORS, _CALLED, _ATTRIBUTES}

_DIMENSIONS = 14
_TUPLE = 13  # a PrimitiveType


class Instruction(NamedTuple):
    """One instruction; operands, predecessors and computations are named by number.

    `content` is every field that decides what is computed and has no name here.
    """

    opcode: str
    shape: bytes
    content: bytes
    number: int
    id: int
    operands: tuple[int, ...]
    predecessors: tuple[int, ...]
    called: tuple[int, ...]
    attributes: bytes


class HloComputation(NamedTuple):
    """Instructions in the order in which they run, and the number of the one that is the result."""

    instructions: tuple[Instruction, ...]
    root: int


class Graph(NamedTuple):
    """All computations of a program by number, and the number of its entry."""

    computations: dict[int, HloComputation]
    entry: int


def graph_of(program: Any) -> Graph:
    """The graph of a compiled JAX program. Raises ValueError if it has not exactly one module."""
    (module,) = program.runtime_executable().hlo_modules()
    return read(module.as_serialized_hlo_module_proto())


def read(data: bytes) -> Graph:
    """The graph of a serialized HloModuleProto. Raises ValueError for bytes that are none."""
    computations: dict[int, HloComputation] = {}
    entry = 0  # a number that is 0 is left out
    for field, value, _ in _fields(data):
        if field == 3:
            number, computation = _computation(value)
            computations[number] = computation
        elif field == 6:
            entry = value
    if entry not in computations:
        raise ValueError("a serialized program has no entry computation")
    return Graph(computations, entry)


def tuple_size(shape: bytes) -> int | None:
    """The number of elements of a tuple, from its shape; None for other shapes."""
    fields = [(field, value) for field, value, _ in _fields(shape)]
    if (2, _TUPLE) not in fields:
        return None
    return sum(field == 4 for field, _ in fields)


class Shape(NamedTuple):
    """An array's dtype (a number of XLA's), dimensions, and their order in memory."""

    dtype: int
    dimensions: tuple[int, ...]
    major_to_minor: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dimensions)

    @property
    def is_plain(self) -> bool:
        return self.major_to_minor == tuple(range(len(self.dimensions)))


def shape_of(shape: bytes) -> Shape | None:
    """The shape of an array; None for other values, and for tiled or packed layouts."""
    dtype, sizes, order = 0, tuple[int, ...](), tuple[int, ...]()
    for field, value, _ in _fields(shape):
        if field == 2:
            dtype = value
        elif field == 3:
            sizes = (*sizes, *_numbers(value))
        elif field == 5:
            for part, content, _ in _fields(value):
                if part == 1:
                    order = (*order, *_numbers(content))
                elif part != 16:  # tail_padding_alignment_in_elements
                    return None
    if dtype in (0, _TUPLE) or sorted(order) != list(range(len(sizes))):
        return None
    return Shape(dtype, sizes, order[::-1])


def dimensions(instruction: Instruction) -> tuple[int, ...]:
    """The dimensions that an instruction names, such as the order of a transposition."""
    fields = _fields(instruction.content)
    return tuple(n for field, value, _ in fields if field == _DIMENSIONS for n in _numbers(value))


def _computation(data: bytes) -> tuple[int, HloComputation]:
    instructions, number, root = [], 0, 0
    for field, value, _ in _fields(data):
        if field == 2:
            instructions.append(_instruction(value))
        elif field == 5:
            number = value
        elif field == 6:
            root = value
    return number, HloComputation(tuple(instructions), root)


def _instruction(data: bytes) -> Instruction:
    known: dict[int, Any] = {}
    content = []
    for field, value, raw in _fields(data):
        if field in (_OPERANDS, _PREDECESSORS, _CALLED):
            known[field] = (*known.get(field, ()), *_numbers(value))
        else:
            known[field] = value
        if field not in _LEFT_OUT:
            content.append(raw)
    return Instruction(
        bytes(known[_OPCODE]).decode(),
        bytes(known[_SHAPE]),
        b"".join(content),
        known.get(_PARAMETER, 0) or known.get(_ELEMENT, 0),
        known.get(_ID, 0),
        known.get(_OPERANDS, ()),
        known.get(_PREDECESSORS, ()),
        known.get(_CALLED, ()),
        bytes(known.get(_ATTRIBUTES, b"")),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """(number, value, bytes of the whole field) of each field of a message."""
    start = 0
    while start < len(data):
        key, at = _varint(data, start)
        kind = key & 7
        if kind == 0:
            value, end = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            value, end = data[at : at + length], at + length
        elif kind in (1, 5):
            end = at + (8 if kind == 1 else 4)
            value = data[at:end]
        else:
            raise ValueError(f"a serialized program has a field of the unknown kind {kind}")
        if end > len(data):
            raise ValueError("a serialized program ends within a field")
        yield key >> 3, value, data[start:end]
        start = end


def _numbers(value: Any) -> Iterator[int]:
    """A repeated number: packed, or one field for each."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield number


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("a serialized program ends within a number")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
