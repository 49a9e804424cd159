"""Functions of the kinds that people train, and whether `strategy.explain` calls their steps fast.

Each case is small. `test_jax_fast_steps.py` compiles some of them as one step; `explained_worker.py`
compiles each alone, on one and on several devices, for `make proof-distribute`.
"""

# ruff: noqa: ARG005  all of them take (parameters, share, key)

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata

from perdure.distribute.values import PerReplica

Grad = Callable[[Any, Any, Any], Any]
Update = Callable[[Any, Any], Any]
# (parameters, the rows of a share, key) -> predictions, whose squares are the loss
Apply = Callable[[Any, Any, Any], Any]

ROWS, WIDTH = 6, 4
OUTSIDE = np.linspace(0, 1, 24, dtype=np.float32).reshape(ROWS, WIDTH)
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9)))


class Case(NamedTuple):
    """A step, and the key phrase of the reason if it is not fast."""

    grad: Grad
    update: Update
    why: str = ""


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    return {
        "w": draw(3, WIDTH, WIDTH),
        "b": draw(WIDTH),
        "k": draw(3, 3, 1, WIDTH),
        "k2": draw(3, 3, WIDTH, WIDTH),
        "table": draw(9, WIDTH),
    }


def first_state() -> dict[str, Any]:
    own = parameters()
    return {
        "params": own,
        "mean": jax.tree.map(jnp.copy, own),
        "opt": ADAM.init(own),
        "scale": jnp.float32(8),
        "n": jnp.ones(3, jnp.int4),
        "steps": jnp.int32(0),
    }


def share(step: int, replica: int) -> dict[str, Any]:
    rng = np.random.default_rng((step, replica))
    return {
        "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": rng.integers(0, 9, ROWS, dtype=np.int32),
    }


def shares(step: int, replicas: int) -> PerReplica:
    values = tuple(share(step, replica) for replica in range(replicas))
    return PerReplica(values, tuple(range(replicas)), step)


# ---------------------------------------------------------------- forward passes


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return x * 3


scaled.defvjp(lambda x: (x * 3, x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.sin(x)


bent.defjvp(lambda p, t: (bent(*p), t[0] * p[0]))


def layer(h: Any, w: Any) -> tuple[Any, None]:
    return jnp.tanh(h @ w), None


def gru(p: Any, x: Any, key: Any) -> Any:
    def cell(h: Any, row: Any) -> tuple[Any, Any]:
        z, r = jax.nn.sigmoid(row @ p["w"][0] + h), jax.nn.sigmoid(row @ p["w"][1])
        h = (1 - z) * h + z * jnp.tanh((r * h) @ p["w"][2])
        return h, h

    return jax.lax.scan(cell, jnp.zeros(WIDTH), x["x"])[1]


def lstm(p: Any, x: Any, key: Any) -> Any:
    def cell(carry: Any, row: Any) -> tuple[Any, Any]:
        h, c = carry
        i, f, o = (jax.nn.sigmoid(row @ w + h) for w in p["w"])
        c = f * c + i * jnp.tanh(row + p["b"])
        h = o * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(cell, (jnp.zeros(WIDTH), jnp.zeros(WIDTH)), x["x"])[1]


def convolved(p: Any, x: Any) -> Any:
    dimensions = ("NHWC", "HWIO", "NHWC")
    h = x["x"][:4].reshape(1, 4, 4, 1)
    for kernel in (p["k"], p["k2"]):
        h = jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
    return h


def normalized(h: Any, axes: tuple[int, ...]) -> Any:
    mean, variance = h.mean(axes, keepdims=True), h.var(axes, keepdims=True)
    return jax.nn.relu((h - mean) * jax.lax.rsqrt(variance + 1e-5))


def pooled(p: Any, x: Any, key: Any) -> Any:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(convolved(p, x), -jnp.inf, jax.lax.max, window, window, "VALID")


def attention(p: Any, x: Any, key: Any) -> Any:
    q, k, v = (x["x"] @ w for w in p["w"])
    heads = lambda h: h.reshape(ROWS, 2, 2).transpose(1, 0, 2)  # noqa: E731
    q, k, v = heads(q), heads(k), heads(v)
    scores = jnp.where(jnp.tri(ROWS, dtype=bool), q @ k.transpose(0, 2, 1) / 2, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).transpose(1, 0, 2).reshape(ROWS, WIDTH)


def dropped(p: Any, x: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.8, (ROWS, WIDTH))
    return jnp.where(kept, x["x"] @ p["w"][0] / 0.8, 0)


def reparameterized(p: Any, x: Any, key: Any) -> Any:
    mean, deviation = x["x"] @ p["w"][0], jnp.exp(x["x"] @ p["w"][1] / 9)
    return mean + deviation * jax.random.normal(key, mean.shape)


def experts(p: Any, x: Any, key: Any) -> Any:
    """Each row goes to the two experts with the largest scores."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x["x"] @ p["w"][0][:, :3]), 2)
    return jnp.einsum("rk,rkw->rw", weights, jnp.einsum("rw,rkwv->rkv", x["x"], p["w"][chosen]))


def spread(p: Any, x: Any, key: Any) -> Any:
    return jnp.zeros((9, WIDTH)).at[x["y"]].add(x["x"] @ p["w"][0])


def narrow(p: Any, x: Any, key: Any) -> Any:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (p["w"], x["x"]))
    return jax.nn.gelu(half[1] @ half[0][0]).astype(jnp.float32) @ p["w"][1]


def mapped(p: Any, x: Any, key: Any) -> Any:
    return jax.vmap(lambda row, k: jnp.tanh(row @ p["w"][0]) * jax.random.uniform(k))(
        x["x"], jax.random.split(key, ROWS)
    )


def iterated(p: Any, x: Any, key: Any) -> Any:
    """As many turns as the values ask for; no gradient flows through them."""
    start = jax.lax.stop_gradient(x["x"] @ p["w"][0])
    more = lambda h: jnp.abs(h).max() > 0.1  # noqa: E731
    return jax.lax.while_loop(more, lambda h: h * 0.5, start) + x["x"] @ p["w"][1]


def solved(p: Any, x: Any, key: Any) -> Any:
    matrix = p["w"][0] @ p["w"][0].T + jnp.eye(WIDTH)
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), x["x"].T)


def transformer(p: Any, x: Any, key: Any) -> Any:
    h = p["table"][x["y"]] + p["b"]
    h = h + attention(p, {"x": normalized(h, (1,))}, key)
    return h + jax.nn.silu(normalized(h, (1,)) @ p["w"][0]) @ p["w"][1]


def depthwise(p: Any, x: Any, key: Any) -> Any:
    kernel, dimensions = p["k2"][:, :, :1], ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        convolved(p, x), kernel, (2, 2), "SAME", None, None, dimensions, feature_group_count=WIDTH
    )


def quantized(p: Any, x: Any, key: Any) -> Any:
    """Integer products of rounded values, with the gradient of the exact ones."""
    exact = x["x"] @ p["w"][0]
    rows, weights = (
        jnp.round(jnp.clip(v * 9, -99, 99)).astype(jnp.int8) for v in (x["x"], p["w"][0])
    )
    product = jax.lax.dot(rows, weights, preferred_element_type=jnp.int32).astype(jnp.float32) / 81
    return exact + jax.lax.stop_gradient(product - exact)


def printed(p: Any, x: Any, key: Any) -> Any:
    jax.debug.callback(np.sin, x["x"][0, 0])
    return x["x"] @ p["w"][0]


APPLIED: dict[str, Apply] = {
    "linear": lambda p, x, key: x["x"] @ p["w"][0] + p["b"],
    "layers in a scan": lambda p, x, key: jax.lax.scan(layer, x["x"], p["w"])[0],
    "remat in a scan": lambda p, x, key: jax.lax.scan(jax.checkpoint(layer), x["x"], p["w"])[0],
    "GRU": gru,
    "LSTM": lstm,
    "associative scan": lambda p, x, key: jax.lax.associative_scan(
        jnp.multiply, jnp.tanh(x["x"] @ p["w"][0])
    ),
    "convolution and pooling": pooled,
    "GroupNorm": lambda p, x, key: normalized(convolved(p, x).reshape(1, 4, 4, 2, 2), (1, 2, 4)),
    "BatchNorm": lambda p, x, key: normalized(convolved(p, x), (0, 1, 2)),
    "LayerNorm": lambda p, x, key: normalized(x["x"] @ p["w"][0], (1,)),
    "RMSNorm and a gate": lambda p, x, key: (
        jax.nn.silu(x["x"] @ p["w"][0])
        * (x["x"] * jax.lax.rsqrt((x["x"] ** 2).mean(-1, keepdims=True) + 1e-6))
    ),
    "remat": lambda p, x, key: jax.checkpoint(lambda h: jnp.sin(jnp.sin(h)))(x["x"] @ p["w"][0]),
    "custom_vjp": lambda p, x, key: scaled(x["x"] @ p["w"][0]),
    "custom_jvp": lambda p, x, key: bent(x["x"] @ p["w"][0]),
    "stop_gradient, straight through": lambda p, x, key: (
        (h := x["x"] @ p["w"][0]) + jax.lax.stop_gradient(jnp.round(h) - h)
    ),
    "attention": attention,
    "transformer block": transformer,
    "embedding": lambda p, x, key: p["table"][x["y"]],
    "scatter": spread,
    "segment sums": lambda p, x, key: jax.ops.segment_sum(x["x"] @ p["w"][0], x["y"], 9),
    "mixture of experts, top_k": experts,
    "sort": lambda p, x, key: jnp.sort(x["x"] @ p["w"][0], axis=0)[jnp.array([2, 0, 1])],
    "dropout": dropped,
    "a sample of a normal distribution": reparameterized,
    "vmap": mapped,
    "while loop": iterated,
    "cond": lambda p, x, key: jax.lax.cond(x["x"].sum() > 0, jnp.sin, jnp.tanh, x["x"] @ p["w"][0]),
    "switch": lambda p, x, key: jax.lax.switch(
        x["y"][0] % 3, [jnp.sin, jnp.tanh, jnp.cos], x["x"] @ p["w"][0]
    ),
    "bfloat16 products": narrow,
    "cumsum": lambda p, x, key: jnp.cumsum(x["x"] @ p["w"][0], axis=0),
    "FFT": lambda p, x, key: jnp.abs(jnp.fft.rfft(x["x"] @ p["w"][0], axis=0)),
    "cholesky and a solve": solved,
    "QR": lambda p, x, key: jnp.linalg.qr(p["w"][0])[1] + x["x"][:4],
    "SVD": lambda p, x, key: jnp.linalg.svd(p["w"][0], compute_uv=False) + x["x"],
    "logsumexp": lambda p, x, key: jax.nn.logsumexp(x["x"] @ p["w"][0], axis=-1),
    "gradient in the loss": lambda p, x, key: jax.grad(lambda h: jnp.tanh(h @ p["w"][0]).sum())(
        x["x"]
    ),
    "eigenvalues": lambda p, x, key: jnp.linalg.eigvalsh(p["w"][0] + p["w"][0].T) + x["x"],
    "depthwise convolution": depthwise,
    "transposed convolution": lambda p, x, key: jax.lax.conv_transpose(
        convolved(p, x), p["k2"], (2, 2), "SAME"
    ),
    "resized image": lambda p, x, key: jax.image.resize(convolved(p, x), (1, 7, 7, WIDTH), "cubic"),
    "one-hot product": lambda p, x, key: jax.nn.one_hot(x["y"], 9) @ p["table"],
    "dynamic slice": lambda p, x, key: jax.lax.dynamic_slice(
        p["table"] * 2, (x["y"][0], 0), (3, WIDTH)
    ),
    "fori_loop": lambda p, x, key: jax.lax.fori_loop(
        0, 3, lambda n, h: jnp.tanh(h @ p["w"][n]), x["x"]
    ),
    "lax.map": lambda p, x, key: jax.lax.map(lambda row: jnp.tanh(row @ p["w"][0]), x["x"]),
    "nested jit": lambda p, x, key: jax.jit(jnp.tanh)(jax.jit(jnp.dot)(x["x"], p["w"][0])),
    "a barrier": lambda p, x, key: jax.lax.optimization_barrier(x["x"] @ p["w"][0]) * 2,
    "a table from outside": lambda p, x, key: x["x"] @ p["w"][0] * OUTSIDE,
    "permuted rows": lambda p, x, key: jax.random.permutation(key, x["x"]) @ p["w"][0],
    "sampled tokens": lambda p, x, key: p["table"][jax.random.categorical(key, x["x"])],
    "augmented rows": lambda p, x, key: (
        jnp.where(jax.random.bernoulli(key), jnp.flip(x["x"], 1), x["x"]) @ p["w"][0]
    ),
    "contrastive loss": lambda p, x, key: jax.nn.log_softmax((h := x["x"] @ p["w"][0]) @ h.T / 0.1),
    "int8 products": quantized,
    "debug.print": printed,
}


def gradient(apply: Apply) -> Grad:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            return (apply(params, batch, key) ** 2).sum()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"grads": grads, "loss": value, "n": jnp.float32(ROWS)}

    return grad


linear = gradient(APPLIED["linear"])


# ---------------------------------------------------------------- updates


def length(tree: Any) -> Any:
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


def sgd(state: Any, total: Any) -> Any:
    params = jax.tree.map(lambda p, g: p - 0.1 * g / total["n"], state["params"], total["grads"])
    return {**state, "params": params, "steps": state["steps"] + 1}, total["loss"] / total["n"]


def adamw_clipped(state: Any, total: Any) -> Any:
    grads = jax.tree.map(lambda g: g / total["n"], total["grads"])
    changes, opt = ADAM.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    return {**state, "params": params, "opt": opt}, length(grads)


def averaged(state: Any, total: Any) -> Any:
    new, loss = sgd(state, total)
    mean = jax.tree.map(lambda m, p: 0.99 * m + 0.01 * p, state["mean"], new["params"])
    return {**new, "mean": mean}, loss


def loss_scaled(state: Any, total: Any) -> Any:
    """Halves the scale and leaves the parameters alone if a gradient is not finite."""
    finite = jnp.isfinite(length(total["grads"]))
    new, loss = jax.lax.cond(finite, lambda: sgd(state, total), lambda: (state, total["loss"]))
    return {**new, "scale": jnp.where(finite, state["scale"], state["scale"] / 2)}, loss


def every_second(state: Any, total: Any) -> Any:
    new, loss = sgd(state, total)
    due = state["steps"] % 2 == 1
    params = jax.tree.map(partial(jnp.where, due), new["params"], state["params"])
    return {**new, "params": params}, {"loss": loss, "due": due}


def int4_changed(state: Any, total: Any) -> Any:
    new, loss = sgd(state, total)
    return {**new, "n": state["n"] + jnp.int4(1)}, loss


def orthogonalized(state: Any, total: Any) -> Any:
    """Newton-Schulz iterations on the gradients of the layers, as in Muon."""
    new, loss = sgd(state, total)
    g = total["grads"]["w"] / jnp.linalg.norm(total["grads"]["w"])
    for _ in range(2):
        g = 1.5 * g - 0.5 * g @ g.transpose(0, 2, 1) @ g
    return {**new, "params": {**new["params"], "w": state["params"]["w"] - 0.1 * g}}, loss


def narrow_master(state: Any, total: Any) -> Any:
    new, loss = sgd(state, total)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), new["params"])
    return {**new, "mean": half}, loss


UPDATES = {
    "AdamW, clipping, a schedule": adamw_clipped,
    "moving average of the parameters": averaged,
    "loss scale with a condition": loss_scaled,
    "every second step": every_second,
    "int4 state": int4_changed,
    "orthogonalized gradients": orthogonalized,
    "bfloat16 copy": narrow_master,
}

FAST: dict[str, Case] = {
    **{name: Case(gradient(apply), sgd) for name, apply in APPLIED.items()},
    **{name: Case(linear, update) for name, update in UPDATES.items()},
}
"""Fast on any number of devices with several replicas: as one program, or in turns."""


# ---------------------------------------------------------------- refused


def with_value(value: Callable[[Any], Any], update: Any = sgd) -> Case:
    """`linear`, with a contribution more."""
    return Case(lambda s, b, k: {**linear(s, b, k), "extra": value(b)}, update)


def not_inlined(batch: Any) -> Any:
    with set_xla_metadata(inlineable="false"):
        return jax.jit(lambda x: x.sum() ** 2)(batch["x"])


def from_python(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), x)


def logged_from_python(state: Any, total: Any) -> Any:
    new, loss = sgd(state, total)
    return {**new, "scale": from_python(loss)}, io_callback(
        np.sin, jax.ShapeDtypeStruct((), np.float32), loss
    )


REFUSED = with_value(not_inlined)._replace(
    why="grad, the sum and update are not three computations to XLA"
)
"""If a device has one replica; several take turns."""

REFUSED_ON_SEVERAL: dict[str, Case] = {
    "pure_callback": Case(
        lambda s, b, k: {**linear(s, b, k), "loss": from_python(b["x"].sum())},
        sgd,
        "grad calls Python for a value or in order",
    ),
    "io_callback in update": Case(
        linear, logged_from_python, "update calls Python for a value or in order"
    ),
    "bfloat16 contributions": with_value(lambda b: b["x"].astype(jnp.bfloat16))._replace(
        why="the contribution extra is bfloat16, and XLA may keep a chain of narrow sums"
    ),
    "complex contributions": with_value(lambda b: jnp.fft.fft(b["x"]))._replace(
        why="the contribution extra is complex64, which XLA does not add between devices"
    ),
    "ordered effects": Case(
        lambda s, b, k: [jax.debug.callback(np.sin, b["x"][0, 0], ordered=True), linear(s, b, k)][
            1
        ],
        sgd,
        "grad calls Python for a value or in order",
    ),
}
"""Fast on one device."""
