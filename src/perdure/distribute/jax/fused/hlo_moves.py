"""Instructions that only move elements: where each element of their result comes from.

A chain of them may be written in several ways (a bitcast and a copy, or a transposition in a fusion),
which make the same bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from perdure.distribute.jax.fused.hlo_graph import Instruction, Shape, dimensions, shape_of

OPCODES = ("copy", "bitcast", "reshape", "transpose")
MOST = 1 << 24
"""Larger arrays are not followed element by element."""


class Origin(NamedTuple):
    """The array whose elements a value has, and the place of each there; None for the same places."""

    made: str
    shape: bytes
    places: Any = None


def moved(instruction: Instruction, shape: bytes, origin: Origin) -> Origin | None:
    """The origin of the result, from that of the operand of shape `shape`; None if it is not known."""
    if instruction.opcode == "copy" and instruction.shape == shape:
        return origin  # of any shape: int4 elements, which share bytes, have a layout of their own
    one, other = shape_of(shape), shape_of(instruction.shape)
    if one is None or other is None or one.dtype != other.dtype or one.size > MOST:
        return None
    places = origin.places
    plain = one.is_plain and other.is_plain and places is None
    if instruction.opcode == "copy" or (plain and instruction.opcode != "transpose"):
        return origin
    places = np.arange(one.size, dtype=np.int32) if places is None else places
    places = places.reshape(one.dimensions)
    if instruction.opcode == "transpose":
        places = places.transpose(dimensions(instruction))
    elif instruction.opcode == "bitcast":
        places = _from_memory(places.transpose(one.major_to_minor).reshape(-1), other)
    places = np.ascontiguousarray(places).reshape(-1)
    if np.array_equal(places, np.arange(len(places), dtype=np.int32)):
        places = None
    return origin._replace(places=places)


def _from_memory(places: Any, shape: Shape) -> Any:
    """Elements in the order of memory as an array of a layout."""
    sizes = [shape.dimensions[axis] for axis in shape.major_to_minor]
    return places.reshape(sizes).transpose(np.argsort(shape.major_to_minor))
