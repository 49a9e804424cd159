"""Small random JAX functions, made from a seed, which a strategy must compute as plain `jit` does.

Constants come in pairs that differ in the last bit, arrays in pairs whose texts are equal, and every
dtype is explicit, so that the functions can be traced under any promotion rule.
"""
# ruff: noqa: ARG005  all of them take (state, share, key)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Fn = Callable[[Any, Any, Any], Any]

SPECIAL = (np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-40, 0.1)


def state() -> dict[str, Any]:
    rng = np.random.default_rng(11)
    return {
        "w": rng.normal(size=(4, 3)).astype(np.float32),
        "n": rng.integers(-5, 9, 6).astype(np.int32),
        "h": rng.normal(size=6).astype(jnp.bfloat16),
    }


def share(replica: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(replica).normal(size=(5, 4)).astype(np.float32)}


def _neighbours(rng: Any, dtype: Any) -> tuple[Any, Any]:
    """Two constants that differ in the last bit of their dtype."""
    one = np.asarray(rng.normal() * 10.0 ** rng.integers(-5, 3), dtype)
    bits = one.view(f"u{one.dtype.itemsize}")
    return one[()], (bits + bits.dtype.type(1)).view(one.dtype)[()]


def _tables(rng: Any, size: int) -> tuple[Any, Any]:
    """Two arrays that differ in the last bit of one element in the middle."""
    one = rng.normal(size=size).astype(np.float32)
    other = one.copy()
    other[size // 2] = np.nextafter(other[size // 2], np.float32(np.inf))
    return one, other


def arithmetic(rng: Any) -> Fn:
    a, b = _neighbours(rng, np.float32)
    op = [jax.lax.mul, jax.lax.add, jax.lax.div, jax.lax.sub][rng.integers(4)]
    return lambda s, b_, k: {
        "a": op(b_["x"], jnp.full_like(b_["x"], a)),
        "b": op(b_["x"], jnp.full_like(b_["x"], b)),
        "difference": b_["x"] * a - b_["x"] * b,
    }


def averages(rng: Any) -> Fn:
    """Moving averages with decays that print alike."""
    fast, slow = float(10.0 ** -rng.integers(3, 5)), float(10.0 ** -rng.integers(5, 7))
    return lambda s, b, k: [s["w"] * (1 - d) + b["x"].sum() * d for d in (fast, slow)]


def rounded(rng: Any) -> Fn:
    one, other = np.float32(0.000123456), np.float32(0.000123459)
    return lambda s, b, k: (s["w"] * one, s["w"] * other)


def special(rng: Any) -> Fn:
    one, other = (np.float32(SPECIAL[n]) for n in rng.permutation(len(SPECIAL))[:2])
    payload = np.uint32(0x7FC00000 + rng.integers(1, 99)).view(np.float32)
    return lambda s, b, k: (
        jnp.where(b["x"] > 0, b["x"], one),
        jnp.where(b["x"] > 0, b["x"], other),
        jax.lax.max(s["w"], jnp.full_like(s["w"], other)),
        jnp.full((3,), payload),
        s["w"] * np.float32(0.0) + np.float32(-0.0),
    )


def narrow(rng: Any) -> Fn:
    dtype = [jnp.bfloat16, jnp.float16][rng.integers(2)]
    a, b = _neighbours(rng, dtype)
    return lambda s, batch, k: (
        s["h"].astype(dtype) * a,
        s["h"].astype(dtype) * b,
        (s["h"].astype(dtype) * b).astype(jnp.float32),
    )


def integers(rng: Any) -> Fn:
    a = int(rng.integers(1, 5))
    return lambda s, b, k: (
        s["n"] * np.int32(a),
        s["n"].astype(np.int8) * np.int8(a),
        s["n"] // np.int32(a),
        s["n"].astype(np.float32) * np.float32(a),
        (s["n"] > a) & np.True_,
        jax.lax.integer_pow(b["x"], a),
        jax.lax.integer_pow(b["x"], a + 1),
    )


def weak(rng: Any) -> Fn:
    a = float(rng.normal())
    return lambda s, b, k: (s["h"] * a, b["x"] * a, b["x"] * np.float32(a), s["n"] * 2)


def attention(rng: Any) -> Fn:
    scale, other = _neighbours(rng, np.float32)

    def fn(s: Any, b: Any, k: Any) -> Any:
        def loss(w: Any, scale: Any) -> Any:
            q = b["x"] @ w
            a = jax.nn.softmax(q @ q.T * scale)
            return (a @ q).sum() + jax.nn.logsumexp(q)

        return jax.grad(loss)(s["w"], scale), jax.grad(loss)(s["w"], other)

    return fn


def indexing(rng: Any) -> Fn:
    rows = rng.integers(0, 4, 7).astype(np.int32)
    return lambda s, b, k: (
        s["w"][rows],
        s["w"].at[rows[:3]].add(np.float32(1)),
        jax.lax.dynamic_slice(b["x"], (s["n"][0] % 3, np.int32(1)), (2, 2)),
        jnp.take_along_axis(s["w"], jnp.argsort(s["w"], 0), 0),
    )


def reductions(rng: Any) -> Fn:
    axis = int(rng.integers(2))
    return lambda s, b, k: (
        b["x"].sum(axis) / b["x"].sum(axis),
        b["x"].mean(axis) - b["x"].mean(1 - axis).sum(),
        jnp.cumsum(b["x"], axis),
        jnp.sort(b["x"], axis),
        b["x"].max(axis),
        (s["w"] - s["w"].mean(0)) * jax.lax.rsqrt(s["w"].var(0) + np.float32(1e-5)),
    )


def loops(rng: Any) -> Fn:
    a, b = _neighbours(rng, np.float32)
    one, other = _tables(rng, 3)

    def fn(s: Any, batch: Any, k: Any) -> Any:
        def walk(c: Any, table: Any) -> Any:
            return jax.lax.scan(lambda h, row: (h * c + row, h.sum() * table), s["w"][0], s["w"])

        def grow(c: Any) -> Any:
            return jax.lax.while_loop(lambda v: v[1] < 3, lambda v: (v[0] * c, v[1] + 1), (x, 0))[0]

        x = batch["x"].sum()
        return (
            walk(a, one),
            walk(b, other),
            grow(a),
            grow(b),
            jax.lax.cond(x > 0, lambda x: x * a, lambda x: x * b, x),
            jax.lax.cond(x > 0, lambda x: x * b, lambda x: x * a, x),
            jax.lax.map(lambda row: row * one, s["w"]),
            jax.lax.map(lambda row: row * other, s["w"]),
        )

    return fn


def draws(rng: Any) -> Fn:
    number = int(rng.integers(99))

    def fn(s: Any, b: Any, k: Any) -> Any:
        one, other = jax.random.split(jax.random.fold_in(k, number))
        with jax.threefry_partitionable(False):
            old = jax.random.bits(one, (3,))
        with jax.threefry_partitionable(True):
            new = jax.random.bits(one, (3,))
        return {
            "one": jax.random.normal(one, (4,), np.float32),
            "again": jax.random.normal(one, (4,), np.float32),
            "other": jax.random.uniform(other, (4,), np.float32),
            "coin": jax.random.bernoulli(other, np.float32(0.3), (4,)),
            "bits": (old, new),
        }

    return fn


def captured(rng: Any) -> Fn:
    (a, b), (c, d) = _tables(rng, 12), _tables(rng, 1200)
    on_device = jnp.asarray(c), jnp.asarray(d)
    return lambda s, batch, k: (
        [batch["x"].sum() * table for table in (a, b)],
        [batch["x"].sum() * table for table in on_device],
        a * b,
    )


def derivatives(rng: Any) -> Fn:
    a, b = _neighbours(rng, np.float32)

    @jax.custom_vjp
    def scaled(x: Any, c: Any) -> Any:
        return x * c

    scaled.defvjp(lambda x, c: (x * c, (x, c)), lambda res, ct: (ct * res[1], ct * res[0]))

    @jax.custom_jvp
    def bent(x: Any) -> Any:
        return jnp.sin(x) * a

    bent.defjvp(lambda p, t: (bent(*p), jnp.cos(*p) * t[0] * b))

    def fn(s: Any, batch: Any, k: Any) -> Any:
        x = batch["x"]
        inner = jax.checkpoint(lambda x: (jnp.sin(x) * jnp.sin(x) * a).sum())
        return (
            jax.grad(lambda x: scaled(x, jnp.full_like(x, a)).sum())(x),
            jax.grad(lambda x: scaled(x, jnp.full_like(x, b)).sum())(x),
            jax.grad(lambda x: bent(x).sum())(x),
            jax.grad(inner)(x),
            jax.jit(lambda x: x * a)(x),
            jax.jit(lambda x: x * b)(x),
            bent(x),
        )

    return fn


QUICK = (arithmetic, averages, rounded, special, narrow, integers, weak, captured)
# They take longest to compile: one of each kind in a group, and some kinds in every fourth group.
SLOW = (attention, indexing, draws, derivatives)
SLOWEST = (loops, reductions)


def functions(count: int, seed: int) -> list[Fn]:
    rng = np.random.default_rng(seed)
    kinds = [SLOW[seed % len(SLOW)], SLOWEST[seed % len(SLOWEST)]]
    kinds += [QUICK[n % len(QUICK)] for n in range(count - len(kinds))]
    return [kind(rng) for kind in kinds]


def together(fns: list[Fn]) -> Fn:
    """One function that computes all of them, for use as the `grad` of a step."""
    return lambda state, share, key: [fn(state, share, key) for fn in fns]


def as_bytes(tree: Any) -> list[Any]:
    """Path, dtype, shape and bytes of every leaf."""
    return [
        (jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
