"""Common subexpressions of a traced function: which are computed once, and which are not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perdure.distribute.jax.subexpressions import computed_once

X = jnp.arange(6.0).reshape(2, 3) + 1


def primitives(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns)


def test_what_is_there_twice_is_computed_once() -> None:
    def fn(x: Any) -> Any:
        return jnp.sin(x) + jnp.sin(x), {"again": jax.jit(jnp.sin)(x)}

    assert primitives(computed_once(fn), X) == {"sin": 1, "add": 1}
    assert primitives(fn, X)["sin"] == 2, "nothing was there twice"
    jax.tree.map(np.testing.assert_array_equal, jax.jit(computed_once(fn))(X), jax.jit(fn)(X))


def test_operands_of_length_one_are_broadcast_once() -> None:
    def fn(x: Any) -> Any:
        y = jax.lax.broadcast_in_dim(x.sum(1), (2, 1), (0,))
        return jax.lax.div(x, y), jax.lax.mul(x, y)

    found = primitives(computed_once(fn), X)
    assert found["broadcast_in_dim"] == 2, "to a column, and that to the whole"


def test_operations_that_look_alike_stay_apart() -> None:
    def fn(x: Any) -> Any:
        ones = jnp.full_like(x, 1.0), jnp.full_like(x, 1, jnp.int32), jnp.full_like(x, True, bool)
        zeros = x * 0.0, x * -0.0
        powers = jax.lax.integer_pow(x, 2), jax.lax.integer_pow(x, 3)
        loops = jax.lax.map(lambda r: r * X[0], x), jax.lax.map(lambda r: r * X[1], x)
        return ones, zeros, powers, loops

    found, expected = jax.jit(computed_once(fn))(X), jax.jit(fn)(X)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_effects_happen_as_often_as_they_were_written() -> None:
    told: list[int] = []

    def fn(x: Any) -> Any:
        for _ in range(2):
            jax.debug.callback(lambda _: told.append(1), x)
        return x

    jax.jit(computed_once(fn))(X).block_until_ready()
    jax.effects_barrier()
    assert len(told) == 2


def test_keys_weak_types_and_errors_come_through() -> None:
    key = jax.random.key(1)
    fn = lambda key: (jax.random.normal(key, (4,)), key, 2.0)  # noqa: E731
    numbers, same, two = jax.jit(computed_once(fn))(key)
    np.testing.assert_array_equal(numbers, jax.jit(fn)(key)[0])
    assert jax.random.key_data(same).tolist() == jax.random.key_data(key).tolist()
    assert two.aval.weak_type
    with pytest.raises(ZeroDivisionError):
        computed_once(lambda _: 1 / 0)(X)


def test_settings_of_a_part_of_a_function_keep_it_apart() -> None:
    config: Any = jax.config

    def fn(key: Any) -> Any:
        one = jax.random.bits(key, (2,))
        with jax.threefry_partitionable(not config.jax_threefry_partitionable):
            return one, jax.random.bits(key, (2,))

    key = jax.random.key(1)
    found, expected = jax.jit(computed_once(fn))(key), jax.jit(fn)(key)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.array_equal(*expected), "the setting makes no difference"


def test_scopes_and_names_of_arguments_stay() -> None:
    def fn(share: Any) -> Any:
        with jax.named_scope("a_scope"):
            return jnp.sin(share["x"]) if float(share["y"]) else share["x"]

    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"share\['y'\]"):
        jax.jit(computed_once(fn))({"x": X, "y": X[0, 0]})
    scoped = jax.jit(computed_once(lambda x: fn({"x": x, "y": 1.0})))
    assert "a_scope" in str(scoped.lower(X).compile().as_text())


def test_custom_derivatives_and_rematerialization_come_through() -> None:
    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return 2 * x

    twice.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct * x,))

    def loss(x: Any) -> Any:
        body = jax.checkpoint(lambda x: jnp.sin(jax.nn.relu(x)) * jnp.sin(x))
        return (twice(x) + body(x)).sum() + jax.lax.scan(lambda c, r: (c + r, r), x[0], x)[0].sum()

    found = jax.jit(computed_once(jax.value_and_grad(loss)))(X)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(jax.value_and_grad(loss))(X))
    np.testing.assert_array_equal(jax.jit(computed_once(loss))(X), jax.jit(loss)(X))
