"""Sums of float64 whose order of additions is fixed, so that they have the same bits everywhere.

`numpy.sum` and BLAS choose their order by the release and the processor. Here a block is halved again
and again, and its halves are added element by element; blocks are added in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BLOCK = 1 << 15
"""Elements of a block. It decides the order of additions, and so the last bits of every figure."""

_SAFE = 480
"""Squares of numbers between 2**-480 and 2**480 neither overflow nor vanish, nor do their sums."""


def blocks(*values: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays of one length, in blocks."""
    for start in range(0, values[0].size, BLOCK):
        yield tuple(array[start : start + BLOCK] for array in values)


def block_sum(values: Array) -> float:
    """The sum of a one-dimensional float64 array."""
    while values.size > 1:
        half = (values.size + 1) // 2
        added = values[:half].copy()
        added[: values.size - half] += values[half:]
        values = added
    return float(values[0]) if values.size else 0.0


def exponent_of(values: Array) -> int:
    """A power of two to divide by before `values` are squared; 0 if their squares are safe."""
    largest = float(np.abs(values).max(initial=0.0))
    exponent = math.frexp(largest)[1]
    return exponent if largest and abs(exponent) > _SAFE else 0


class ScaledSum:
    """A sum of products of finite numbers, as `value * 2**exponent`, that does not overflow."""

    def __init__(self) -> None:
        self.value = 0.0
        self.exponent = 0

    def add(self, left: Array, right: Array, scale: tuple[int, int] | None = None) -> None:
        """Add the sum of `left * right`, a block of each; `scale` are their exponents if known."""
        if scale is None:
            first = exponent_of(left)
            scale = first, first if left is right else exponent_of(right)
        first, second = scale
        with np.errstate(under="ignore"):
            left = np.ldexp(left, -first) if first else left
            right = np.ldexp(right, -second) if second else right
            self.merge(block_sum(left * right), first + second)

    def merge(self, value: float, exponent: int) -> None:
        """Add `value * 2**exponent`."""
        if not value:
            return
        if not self.value:
            self.value, self.exponent = value, exponent
            return
        most = max(self.exponent, exponent)
        self.value = math.ldexp(self.value, self.exponent - most) + math.ldexp(
            value, exponent - most
        )
        self.exponent = most

    def root(self) -> float:
        """The square root; infinite if it is above the largest float64."""
        value, exponent = self.value, self.exponent
        if exponent % 2:
            value, exponent = 2 * value, exponent - 1
        return times_power(math.sqrt(value), exponent // 2)


def added(sums: Iterable[ScaledSum]) -> ScaledSum:
    """The sum of sums, rounded once, whatever their order."""
    terms = [part for part in sums if part.value]
    total = ScaledSum()
    if terms:
        most = max(part.exponent for part in terms)
        value = math.fsum(math.ldexp(part.value, part.exponent - most) for part in terms)
        total.merge(value, most)
    return total


def root_ratio(part: ScaledSum, whole: ScaledSum) -> float | None:
    """`sqrt(part / whole)`; None if that is 0 divided by 0."""
    if not whole.value:
        return math.inf if part.value else None
    quotient = ScaledSum()
    quotient.merge(part.value / whole.value, part.exponent - whole.exponent)
    return quotient.root()


def ratio(part: ScaledSum, first: ScaledSum, second: ScaledSum) -> float | None:
    """`part / sqrt(first * second)`; None if that is 0 divided by 0."""
    if not first.value or not second.value:
        return None if not part.value else math.copysign(math.inf, part.value)
    exponent = 2 * part.exponent - first.exponent - second.exponent
    quotient = part.value / (math.sqrt(first.value) * math.sqrt(second.value))
    if exponent % 2:
        quotient, exponent = quotient * math.sqrt(2.0), exponent - 1
    return times_power(quotient, exponent // 2)


def times_power(value: float, exponent: int) -> float:
    """`value * 2**exponent`; infinite if that is above the largest float64."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)
