"""A strategy computes the user's functions as written: random ones compared with plain `jit`.

generated_functions.py makes the functions; the settings around them change how values
are printed, promoted, multiplied or drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import generated_functions as generated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from perdure.data import ArrayDataset
from perdure.distribute.jax.fused import hlo
from perdure.distribute.jax.programs import grad_program, make_key, words
from perdure.distribute.run.context import ReplicaFunction
from perdure.distribute.values import PerReplica
from perdure.jax import MirroredStrategy, OneDeviceStrategy

SEED, STEP = 5, 3
IN_A_GROUP = 5
# One group each; proof_distribute.py tries 25 in a group. Every group runs under print options that
# hide most digits.
SETTINGS: list[dict[str, Any]] = [
    {},
    {},
    {"numpy_rank_promotion": "warn"},
    {"numpy_dtype_promotion": "strict"},
    {"enable_x64": True},
    {"threefry_partitionable": False},
    {"default_matmul_precision": "bfloat16"},
    {"default_matmul_precision": "highest", "softmax_custom_jvp": False},
]


@contextlib.contextmanager
def under(settings: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            np.printoptions(precision=2, suppress=True, threshold=0, edgeitems=1, floatmode="fixed")
        )
        for name, value in settings.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def plain(fn: generated.Fn) -> Any:
    """The contributions of replica 0 under `jit` and nothing else."""

    @jax.jit
    def alone(state: Any, share: Any, step: Any) -> Any:
        return fn(state, share, make_key(words(SEED), step, np.uint32(0)))

    return alone(generated.state(), generated.share(), np.uint32(STEP))


def by_strategy(fn: generated.Fn, grad: Callable[..., Any] | None = None) -> Any:
    """The same values as the logs of a step."""
    strategy = OneDeviceStrategy(replicas=1, seed=SEED)
    step = strategy.step(grad or fn, lambda state, total: (state, total))
    batch = PerReplica((generated.share(),), strategy.local_replicas, STEP)
    _, logs = step(generated.state(), batch)
    return logs


def both_ways(group: int, count: int) -> tuple[list[Any], list[Any]]:
    """The results of `count` functions together under the settings of a group: by plain `jit`, and by
    perdure."""
    with under(SETTINGS[group]):
        fn = generated.together(generated.functions(count, group))
        expected = generated.as_bytes(plain(fn))
        if SETTINGS[group]:
            actual = grad_program(ReplicaFunction(fn, 1, "grad"))(
                generated.state(), generated.share(), words(SEED), np.uint32(STEP), np.uint32(0)
            )
        else:  # a whole step, whose programs are compared and fused
            actual = by_strategy(fn)
        return expected, generated.as_bytes(actual)


@pytest.mark.parametrize("group", range(len(SETTINGS)))
def test_functions_give_the_bits_of_plain_jit(group: int) -> None:
    expected, actual = both_ways(group, IN_A_GROUP)
    assert actual == expected
    assert len(expected) > 2 * IN_A_GROUP


def merged_by_text(fn: generated.Fn) -> generated.Fn:
    """`fn` with operations merged if their operands print alike, which perdure once did by mistake."""

    def merged(*args: Any) -> Any:
        closed, form = jax.make_jaxpr(fn, return_shape=True)(*args)
        known: dict[Any, Any] = {}
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        def text(atom: Any) -> Any:
            is_literal = isinstance(atom, core.Literal)
            return (str(atom.aval), repr(atom.val)) if is_literal else id(values[atom])

        for equation in closed.jaxpr.eqns:
            bound: Any = equation.primitive.get_bind_params(equation.params)
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            key = equation.primitive, str(equation.params), *map(text, equation.invars)
            if key not in known:
                operands = [read(atom) for atom in equation.invars]
                with equation.ctx.manager:
                    output = equation.primitive.bind(*functions, *operands, **params)
                known[key] = output if equation.primitive.multiple_results else [output]
            values |= dict(zip(equation.outvars, known[key], strict=True))
        results = [read(atom) for atom in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(form), results)

    return merged


@pytest.mark.parametrize("hostile", [False, True])
def test_negative_control_constants_merged_by_their_text_are_caught(hostile: bool) -> None:
    fn = generated.together(generated.functions(10, 0))
    with under({}) if hostile else contextlib.nullcontext():
        expected = generated.as_bytes(plain(fn))
        actual = generated.as_bytes(by_strategy(fn, merged_by_text(fn)))
    assert [one[:3] for one in actual] == [one[:3] for one in expected]
    assert actual != expected


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_moving_averages_are_not_merged(replicas: int, hostile: bool) -> None:
    """Decays of 0.001 and 0.0001 print alike with two digits, 0.000123456 and ...459 always do."""
    decays = (0.001, 0.0001, 0.000123456, 0.000123459)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"x": batch[0].sum()}

    def update(state: Any, total: Any) -> Any:
        return [old * (1 - d) + d * total["x"] for old, d in zip(state, decays, strict=True)], {}

    data = ArrayDataset(np.full((8, 2), 4, np.float32), 4)
    with under({}) if hostile else contextlib.nullcontext():
        strategy = MirroredStrategy(1, replicas)
        train_step, state = strategy.step(grad, update), [jnp.zeros(())] * len(decays)
        expected, alone = state, jax.jit(update)
        for number in range(3):
            state, _ = train_step(state, strategy.batch(data, number))
            expected, _ = alone(expected, {"x": jnp.float32(32)})
    assert generated.as_bytes(state) == generated.as_bytes(expected)
    assert len({float(value) for value in state}) == len(decays)


def test_effects_happen_as_often_as_written() -> None:
    seen: list[float] = []

    def grad(state: Any, batch: Any, key: Any) -> Any:
        for _ in range(2):
            jax.debug.callback(lambda x: seen.append(float(x)), batch["x"].sum(), ordered=True)
        drawn = [jax.lax.rng_uniform(np.float32(0), np.float32(1), (64,)) for _ in range(2)]
        return {"differ": (drawn[0] != drawn[1]).any()}

    strategy = OneDeviceStrategy(replicas=2)
    step = strategy.step(grad, lambda state, total: (state, total))
    shares = PerReplica((generated.share(0), generated.share(1)), (0, 1), 0)
    _, logs = step(jnp.zeros(()), shares)
    jax.effects_barrier()
    assert len(seen) == 4
    assert bool(logs["differ"]), "two draws of a generator with a state are two"


@dataclasses.dataclass(frozen=True)
class Inverse:
    """A function object that is equal, with an equal hash, for 0.0 and -0.0 and for 1 and True."""

    value: Any

    def __call__(self, state: Any, batch: Any, key: Any) -> Any:
        return {"x": 1 / (batch["x"][0, 0] ** 2 * self.value)}


def test_equal_function_objects_are_not_confused() -> None:
    assert Inverse(0.0) == Inverse(-0.0)
    results = []
    for value in (0.0, -0.0):
        strategy = OneDeviceStrategy(replicas=2)

        def update(state: Any, total: Any) -> Any:
            return state, total

        shares = PerReplica((generated.share(0), generated.share(1)), (0, 1), 0)
        fn = Inverse(np.float32(value))
        results.append(float(strategy.step(fn, update)(jnp.zeros(()), shares)[1]["x"]))
    expected = [
        float(jax.jit(Inverse(np.float32(v)))(0, generated.share(), 0)["x"]) for v in (0.0, -0.0)
    ]
    assert results == expected
    assert len(set(results)) == 2


def test_a_setting_that_changes_between_two_steps_takes_effect() -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"x": (batch["x"] * batch["x"][0]).sum()}

    strategy = OneDeviceStrategy(replicas=1)
    step = strategy.step(grad, lambda state, total: (state, total))
    batch = PerReplica((generated.share(),), (0,), 0)
    step(jnp.zeros(()), batch)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        step(jnp.zeros(()), batch)


def compiled(table: Any, scope: str = "a") -> Any:
    def fn(x: Any) -> Any:
        with jax.named_scope(scope):
            return x * table

    return jax.jit(fn).lower(jnp.ones(len(table))).compile()


def same(one: Any, other: Any) -> bool:
    return not hlo.difference(one, other, ["x"])


def test_large_constants_are_part_of_the_comparison() -> None:
    one, other = generated._tables(np.random.default_rng(0), 40)
    assert "constant({...})" in compiled(one).as_text(), "the text of a program leaves them out"
    assert same(compiled(one), compiled(one))
    assert not same(compiled(one), compiled(other))


def test_named_scopes_hide_no_operation_from_the_comparison() -> None:
    one, other = np.full(4, 0.1, np.float32), np.full(4, 0.2, np.float32)
    for scope in ('"', 'a"}, metadata={op_name="', "}\n"):
        assert same(compiled(one, scope), compiled(one))
        assert not same(compiled(one, scope), compiled(other))
