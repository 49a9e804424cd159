"""A traced function with each common subexpression computed once.

Owns the form in which a user's function is handed to XLA. Invariant: it computes what the function
computes, by the same operations under the same settings, less those that were there twice.

XLA partitions a program for several devices by a pass that also removes common subexpressions, before
its algebraic simplifier looks at the number of users of a value. For one device there is no such pass,
and the simplifier may turn `x / broadcast(y)` into `x * broadcast(1 / y)` where the partitioned program
keeps the division: other bits. Without common subexpressions both begin with the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

# Elementwise primitives with several operands, which may be of length 1 along an axis of the result:
# each use would be lowered to a broadcast of its own.
_BROADCASTING = frozenset((
    "add", "add_any", "and", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne",
    "nextafter", "or", "pow", "rem", "select_n", "sub", "xor",
))  # fmt: skip
# Calls whose bodies XLA puts in their place, before it partitions.
_CALLS = frozenset(["jit", "pjit"])


def computed_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of trees of arrays, to be called where JAX traces. Bodies of loops stay as they are."""

    @functools.wraps(fn)
    def once(*args: Any) -> Any:
        config: Any = jax.config
        if config.jax_disable_jit:  # nothing is traced then, and values are concrete
            return fn(*args)
        closed, form = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = _Evaluation().run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(form), results)

    return once


class _Evaluation:
    def __init__(self) -> None:
        # By what is computed from which operands: the operands, kept so that an identity stands for
        # one value to the end, and the results.
        self._known: dict[Any, tuple[Any, Any]] = {}

    def run(self, closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self._results(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in _CALLS:
            with _origin(equation):
                return self.run(equation.params["jaxpr"], operands)
        if name in _BROADCASTING:
            out: Any = equation.outvars[0].aval
            operands = [self._broadcast(operand, out.shape) for operand in operands]
        if (key := _key(equation, operands)) is None:
            return _bind(equation, operands)
        if key not in self._known:
            self._known[key] = operands, _bind(equation, operands)
        return self._known[key][1]

    def _broadcast(self, value: Any, shape: tuple[int, ...]) -> Any:
        if np.ndim(value) == 0 or np.shape(value) == shape:
            return value
        key = id(value), shape
        if key not in self._known:
            axes = tuple(range(len(shape)))
            self._known[key] = value, jax.lax.broadcast_in_dim(value, shape, axes)
        return self._known[key][1]


def _key(equation: core.JaxprEqn, operands: list[Any]) -> Any:
    """What decides an equation's results; None where it is more than a function of its operands."""
    if equation.effects or any(True for _ in core.jaxprs_in_params(equation.params)):
        return None
    # Beside its value the text of a parameter, because 1, 1.0 and True are equal.
    params = tuple((name, value, repr(value)) for name, value in sorted(equation.params.items()))
    try:
        hash(params)
    except TypeError:
        return None
    # The context holds settings under which an operation gives other bits (threefry_partitionable).
    where = repr(equation.ctx)
    return equation.primitive, params, where, tuple(map(_identity, equation.invars, operands))


def _identity(atom: Any, operand: Any) -> Any:
    if isinstance(atom, core.Literal) and np.ndim(operand) == 0:
        return str(atom.aval), bool(getattr(atom.aval, "weak_type", False)), repr(atom.val)
    return id(operand)


def _bind(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    bound: Any = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # older releases
    with _origin(equation), equation.ctx.manager:
        results = equation.primitive.bind(*functions, *operands, **params)
    return results if equation.primitive.multiple_results else [results]


def _origin(equation: core.JaxprEqn) -> Any:
    """Under which errors and profiles name the user's line and scope."""
    origin = equation.source_info
    stack = source_info_util.current_name_stack() + origin.name_stack
    return source_info_util.user_context(origin.traceback, name_stack=stack)
