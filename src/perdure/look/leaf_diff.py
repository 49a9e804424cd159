"""How two leaves of one dtype and shape differ, from the chunks that differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perdure.look.elements import (
    as_float64,
    bits,
    integer_distance,
    is_integer,
    parts_dtype,
    ulp_distance,
)
from perdure.look.fixed_order import ScaledSum, blocks, exponent_of, ratio, root_ratio
from perdure.look.leaf_reader import KEY_PREFIX, element_shape, is_scalar, scalar_value
from perdure.store.manifest import LeafEntry

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LeafDiff:
    """How a leaf differs. Figures that have no meaning for it are None.

    Attributes:
        path: The leaf.
        first, second: dtype and shape on both sides.
        count: Elements of the leaf; of the first side if the shapes differ.
        compared: Those in chunks that differ; all others are equal, and were not read.
        differing: Elements whose bits differ. NaN equals NaN of the same bits; -0.0 is not 0.0.
        first_index: The place of the first of them.
        first_values: Their texts on both sides.
        not_finite: Differing pairs with NaN or an infinity; the next five leave these out. In these six
            figures a complex number counts as two numbers, its parts.
        max_ulp: The largest distance in units in the last place (see `elements.ulp_distance`).
        max_abs: The largest absolute difference; infinite if it is above the largest float64.
        max_rel: The largest of: absolute difference divided by the larger absolute value.
        rel_norm: The norm of the difference divided by the norm of the first side, both over the
            elements compared.
        cosine: The cosine of the angle between both sides, over the elements compared.
        problem: Why the elements were not compared.
    """

    path: str
    first: str
    second: str
    count: int = 1
    compared: int = 0
    differing: int | None = None
    first_index: tuple[int, ...] | None = None
    first_values: tuple[str, str] | None = None
    not_finite: int | None = None
    max_ulp: int | None = None
    max_abs: float | int | None = None
    max_rel: float | None = None
    rel_norm: float | None = None
    cosine: float | None = None
    problem: str | None = None


class Comparison:
    """Compares the elements of two leaves of one dtype and shape, a chunk at a time."""

    def __init__(self, entry: LeafEntry) -> None:
        self._entry = entry
        self._shape = element_shape(entry)
        self._keys = entry.dtype.startswith(KEY_PREFIX)
        self._compared = self._differing = self._not_finite = 0
        self._first: tuple[int, str, str] | None = None
        self._ulp: int | None = None
        self._abs: float | int | None = None
        self._rel: float | None = None
        self._sums = {name: ScaledSum() for name in ("dd", "xx", "yy", "xy")}

    def add(self, start: int, first: Array, second: Array) -> None:
        """Compare the elements from number `start` on, one-dimensional on both sides."""
        offset = 0
        for x, y in blocks(first, second):
            self._add_block(start + offset, x, y)
            offset += x.size

    def result(self) -> LeafDiff:
        """What was found."""
        first_index, texts = None, None
        if self._first is not None:
            number, *values = self._first
            first_index = tuple(int(i) for i in np.unravel_index(number, self._shape or (1,)))
            first_index = first_index if self._shape else ()
            texts = values[0], values[1]
        sums = self._sums
        numbers = self._abs is not None
        return LeafDiff(
            self._entry.path,
            describe(self._entry),
            describe(self._entry),
            math.prod(self._shape),
            self._compared,
            self._differing,
            first_index,
            texts,
            None if self._keys else self._not_finite,
            self._ulp,
            self._abs,
            self._rel,
            root_ratio(sums["dd"], sums["xx"]) if numbers else None,
            ratio(sums["xy"], sums["xx"], sums["yy"]) if numbers else None,
        )

    def _add_block(self, start: int, x: Array, y: Array) -> None:
        width = 2 if x.dtype.kind == "c" else 1
        dtype = parts_dtype(x.dtype)
        x_parts, y_parts = x.view(dtype), y.view(dtype)
        differs = bits(x_parts) != bits(y_parts)
        elements = differs.reshape(-1, 2).any(axis=1) if width == 2 else differs
        self._compared += x.size
        if count := int(np.count_nonzero(elements)):
            self._differing += count
            if self._first is None:
                place = int(np.argmax(elements))
                self._first = (start + place, *value_texts(x[place], y[place]))
        if not self._keys:
            self._measure(x_parts, y_parts, differs)

    def _measure(self, x: Array, y: Array, differs: Array) -> None:
        a = as_float64(x)
        if not differs.any():
            self._add_equal(a[np.isfinite(a)])
            return
        b = as_float64(y)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            self._not_finite += int(np.count_nonzero(differs & ~finite))
            numbers = ~(np.isnan(a) | np.isnan(b))
            self._steps(x[differs & numbers], y[differs & numbers])
            x, y, a, b, differs = x[finite], y[finite], a[finite], b[finite], differs[finite]
        if not a.size:
            return
        scales = exponent_of(a), exponent_of(b)
        for name, left, right, scale in (
            ("xx", a, a, (scales[0], scales[0])),
            ("yy", b, b, (scales[1], scales[1])),
            ("xy", a, b, scales),
        ):
            self._sums[name].add(left, right, scale)
        if not differs.all():  # a copy of everything would take long
            x, y, a, b = x[differs], y[differs], a[differs], b[differs]
        self._steps(x, y)
        self._distances(x, y, a, b)

    def _add_equal(self, a: Array) -> None:
        """Add finite elements that are the same on both sides, with the bits of any other way."""
        if a.size:
            squares = ScaledSum()
            squares.add(a, a)
            for name in ("xx", "yy", "xy"):
                self._sums[name].merge(squares.value, squares.exponent)
            self._abs = self._abs or 0

    def _distances(self, x: Array, y: Array, a: Array, b: Array) -> None:
        """Measure pairs that differ, in their own dtype and as float64."""
        largest: float | int = 0
        if a.size:
            halvings = 0
            with np.errstate(over="ignore", under="ignore"):
                distance = b - a
                relative = np.abs(distance)
                largest = float(relative.max())
                larger = np.maximum(np.abs(a), np.abs(b))
                relative /= np.where(larger > 0, larger, 1.0)
                if largest == math.inf:  # a distance above the largest float64
                    halvings, distance = 1, b / 2 - a / 2
                    halves = np.abs(distance) / np.where(larger > 0, larger / 2, 1.0)
                    relative = np.where(np.isfinite(relative), relative, halves)
            self._rel = max(self._rel or 0.0, float(relative.max()))
            squares = ScaledSum()
            squares.add(distance, distance)
            self._sums["dd"].merge(squares.value, squares.exponent + 2 * halvings)
            if is_integer(x.dtype):
                largest = integer_distance(x, y)
        self._abs = largest if self._abs is None else max(self._abs, largest)

    def _steps(self, x: Array, y: Array) -> None:
        if x.size and not is_integer(x.dtype):
            self._ulp = max(self._ulp or 0, ulp_distance(x, y))


def diff_scalars(first: LeafEntry, second: LeafEntry) -> LeafDiff:
    """How two scalars differ, of which at least one has another text or type."""
    values = scalar_value(first), scalar_value(second)
    types = {type(value) for value in values}
    measured = LeafDiff(first.path, "", "")
    if types == {float} or types == {complex}:
        dtype = "float64" if types == {float} else "complex128"
        comparison = Comparison(LeafEntry(first.path, dtype))
        comparison.add(0, np.array([values[0]]), np.array([values[1]]))
        measured = comparison.result()
    elif types == {int}:
        distance = abs(values[0] - values[1])
        largest = max(abs(values[0]), abs(values[1]))
        measured = replace(measured, max_abs=distance, max_rel=distance / largest, not_finite=0)
    return replace(
        measured,
        first=describe(first),
        second=describe(second),
        compared=1,
        differing=1,
        first_index=(),
        first_values=(first.text or "", second.text or ""),
    )


def describe(entry: LeafEntry) -> str:
    """dtype and shape of a leaf: `float32[3,4]`, or `int` for a scalar."""
    if is_scalar(entry):
        return entry.dtype.removeprefix("py:")
    return f"{entry.dtype}[{','.join(map(str, entry.shape))}]"


def value_texts(first: Any, second: Any) -> tuple[str, str]:
    """Texts of two elements whose bits differ; with their bits if the texts are the same."""
    texts = str(first), str(second)
    if texts[0] != texts[1]:
        return texts
    words = (int.from_bytes(value.tobytes(), "little") for value in (first, second))
    return tuple(f"{text} (0x{word:x})" for text, word in zip(texts, words, strict=True))  # type: ignore[return-value]
