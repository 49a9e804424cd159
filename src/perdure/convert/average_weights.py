"""The weights of checkpoints in an average, exactly rounded so that they are equal on every machine.

Rational arithmetic and one rounding at the end: the power and cosine functions of C libraries differ in
their last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from perdure.errors import ArgumentError

SCHEDULES = ("uniform", "linear", "cosine", "sqrt")
"""The names that `schedule_weights` knows."""

_PI = Fraction("3.14159265358979323846264338327950288419716939937510")


def ema_weights(count: int, decay: float) -> list[float]:
    """The weights of an exponential moving average that starts with the first checkpoint.

    `average = decay * average + (1 - decay) * checkpoint` for each later one (PMA, arXiv 2505.12082,
    writes alpha for 1 - decay).

    Raises:
        ArgumentError: `decay` is not between 0 and 1.
    """
    if not 0 <= decay < 1:
        raise ArgumentError(f"ema: expected a decay from 0 to below 1, found {decay}.")
    exact = Fraction(decay)
    weights = [exact ** (count - 1)]
    weights += [(1 - exact) * exact ** (count - 1 - i) for i in range(1, count)]
    return [float(weight) for weight in weights]


def schedule_weights(count: int, schedule: str) -> list[float]:
    """The weights of a schedule by its name, the oldest checkpoint first.

    "uniform" is the simple moving average of PMA (arXiv 2505.12082), and "linear" its weighted one:
    checkpoint i of n has weight i. "cosine" and "sqrt" are schedules of WSM (arXiv 2507.17634): the
    average is what a decaying learning rate would have reached, under which the update between
    checkpoints i - 1 and i counts w(i / n) times. For "cosine", w(t) = (1 + cos(pi t)) / 2, for "sqrt"
    w(t) = 1 - sqrt(t). A learning rate that decays linearly, w(t) = 1 - t, gives uniform weights.

    Raises:
        ArgumentError: There is no such schedule.
    """
    if schedule == "uniform":
        return [1.0] * count
    if schedule == "linear":
        return [float(i) for i in range(1, count + 1)]
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}."
        )
    decay = _cosine_decay if schedule == "cosine" else _sqrt_decay
    factors = [decay(Fraction(i, count)) for i in range(count)] + [Fraction(0)]
    return [float(factors[i] - factors[i + 1]) for i in range(count)]


def checked_weights(weights: Sequence[float], count: int) -> list[float]:
    """Weights that a user gave; raises `ArgumentError` unless each checkpoint has a usable one."""
    if len(weights) != count:
        raise ArgumentError(
            f"weights: expected one for each of the {count} checkpoints, in their order, found "
            f"{len(weights)}."
        )
    try:
        values = [float(weight) for weight in weights]
        is_usable = 0 < math.fsum(values) < math.inf
    except (TypeError, ValueError, OverflowError):  # no number, or a sum above every float64
        values, is_usable = [], False
    if not is_usable:
        raise ArgumentError(
            f"weights: expected finite numbers whose sum is above 0 and finite, found "
            f"{', '.join(map(str, weights))}."
        )
    return values


def _sqrt_decay(t: Fraction) -> Fraction:
    digits = 10**50
    return 1 - Fraction(math.isqrt(t.numerator * digits * digits // t.denominator), digits)


def _cosine_decay(t: Fraction) -> Fraction:
    """The Taylor series of (1 + cos(pi t)) / 2 for t from 0 to 1; the error is below 1e-40."""
    term = total = Fraction(1)
    square = (_PI * t) ** 2
    for n in range(1, 26):
        term *= -square / ((2 * n - 1) * (2 * n))
        total += term
    return (1 + total) / 2
