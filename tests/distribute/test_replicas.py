"""`strategy.run`: what each replica sees, and collectives in the middle of the function."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy_engine import NumpyEngine

from messages import unnamed
from perdure.data import ArrayDataset
from perdure.distribute import (
    PerReplica,
    ReduceOp,
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from perdure.distribute.engine import Stream
from perdure.errors import NonFiniteError, StateError, TopologyError

V = 6


def make_strategy(devices: int = 1, replicas: int | None = V, seed: int = 0) -> Strategy:
    return Strategy(NumpyEngine(devices), replicas, seed=seed)


def replica_context() -> Any:
    context = get_replica_context()
    assert context is not None
    return context


def test_scope_and_replica_context() -> None:
    def stands() -> tuple[bool, bool, bool]:
        return has_strategy(), get_replica_context() is not None, in_cross_replica_context()

    assert stands() == (False, False, False)
    with pytest.raises(TopologyError) as error:
        get_strategy()
    assert "no strategy here: expected a call in `with strategy.scope():`" in str(error.value)
    strategy = make_strategy()
    with strategy.scope() as entered:
        assert entered is strategy
        assert get_strategy() is strategy
        assert stands() == (True, False, True)
        with strategy.scope():
            assert get_strategy() is strategy
        with pytest.raises(TopologyError) as error, make_strategy().scope():
            pass
        assert "was entered in that of another" in str(error.value)
        assert strategy.run(stands).values == ((True, True, False),) * V
    assert stands() == (False, False, False)
    numbers = strategy.run(
        lambda: (replica_context().replica_id_in_sync_group, replica_context().num_replicas_in_sync)
    )
    assert numbers.values == tuple((replica, V) for replica in range(V))
    assert (
        strategy.run(
            lambda: replica_context().strategy is strategy and get_strategy() is strategy
        ).values
        == (True,) * V
    )
    assert strategy.run(stands).values == ((True, True, False),) * V
    assert stands() == (False, False, False)
    assert strategy.cluster_resolver is None


def test_random_numbers_of_a_replica_follow_the_step_of_an_argument() -> None:
    strategy = make_strategy(seed=3)
    data = ArrayDataset(np.arange(24.0), 12)
    strategy.run(lambda batch: batch, (strategy.batch(data, 5),))
    strategy.run(lambda key: key, kwargs={"key": strategy.keys(7)})
    strategy.run(lambda: None)
    engine: Any = strategy._engine
    streams = [stream for verb, stream in engine.calls if verb == "call"]
    assert streams[:V] == [Stream(3, 5, replica) for replica in range(V)]
    assert streams[V:] == [Stream(3, 7, replica) for replica in range(V)] + [None] * V


def test_without_a_collective_no_thread_is_started() -> None:
    threads = set(make_strategy(2).run(threading.current_thread).values)
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("op", ["sum", "MEAN", ReduceOp.MEAN])
def test_all_reduce_equals_reduce(op: Any) -> None:
    def fn(key: Any) -> Any:
        values = {"a": key.normal(size=3), "b": key.normal(size=())}
        first = replica_context().all_reduce(op, values)
        second = replica_context().all_reduce("sum", first["a"] * key.normal(size=3))
        return values, first, second

    results = set()
    for devices in (1, 2, 4, V):
        strategy = make_strategy(devices)
        out = strategy.run(fn, (strategy.keys(1),)).values
        expected = strategy.reduce(
            op, PerReplica(tuple(o for o, _, _ in out), strategy.local_replicas)
        )
        for _, first, second in out:
            assert {k: v.tobytes() for k, v in first.items()} == {
                k: v.tobytes() for k, v in expected.items()
            }
            results.add(second.tobytes())
    assert len(results) == 1


def replica_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "perdure-replica"]


def test_replicas_run_in_turns_between_collectives() -> None:
    seen: list[tuple[str, int]] = []

    threads: set[int] = set()

    def fn() -> None:
        for part in ("first", "second", "last"):
            seen.append((part, replica_context().replica_id_in_sync_group))
            threads.add(len(replica_threads()))
            if part != "last":
                replica_context().all_reduce("sum", np.ones(()))

    make_strategy(3).run(fn)
    assert seen == [(part, r) for part in ("first", "second", "last") for r in range(V)]
    assert max(threads) == V - 1
    assert not replica_threads()


def test_all_gather_and_gather() -> None:
    for devices in (1, 4):
        strategy = make_strategy(devices)

        def rows() -> Any:
            number = replica_context().replica_id_in_sync_group
            return {"x": np.full((number % 2 + 1, 2), number), "y": np.array([number])}

        values = strategy.run(rows)
        expected = [r for r in range(V) for _ in range(r % 2 + 1)]
        joined = strategy.gather(values, axis=0)
        assert joined["x"][:, 0].tolist() == expected
        assert joined["y"].tolist() == list(range(V))
        for inside in strategy.run(lambda: replica_context().all_gather(rows(), 0)).values:
            assert inside["x"].tobytes() == joined["x"].tobytes()
        wide = strategy.run(lambda: np.zeros((2, replica_context().replica_id_in_sync_group)))
        assert strategy.gather(wide, axis=-1).shape == (2, sum(range(V)))


def test_merge_call_sees_all_replicas_at_once() -> None:
    strategy = make_strategy(2)

    def merge(across: Strategy, numbers: PerReplica, *, plus: PerReplica) -> PerReplica:
        assert in_cross_replica_context()
        total = across.reduce("sum", numbers)
        return PerReplica(tuple(total + p for p in plus.values), numbers.replicas)

    def fn() -> Any:
        number = replica_context().replica_id_in_sync_group
        one = replica_context().merge_call(merge, (np.array(number),), {"plus": number})
        return one, replica_context().merge_call(lambda _: "same")

    assert strategy.run(fn).values == tuple((sum(range(V)) + r, "same") for r in range(V))


# ---------------------------------------------------------------- what goes wrong


def assert_clean(strategy: Strategy) -> None:
    """Assert that no thread and no context is left, and that the strategy still works."""
    assert not replica_threads()
    assert not has_strategy()
    assert strategy.run(lambda: replica_context().all_reduce("sum", np.ones(()))).values == (V,) * V


@pytest.mark.parametrize(
    ("who", "says"),
    [
        (0, 'replica 0 reached the end; replicas 1, 2, 3, 4, 5 reached all_reduce("sum")'),
        (3, 'replicas 0, 1, 2, 4, 5 reached all_reduce("sum"); replica 3 reached the end'),
    ],
)
def test_a_replica_that_skips_a_later_collective_is_named(who: int, says: str) -> None:
    strategy = make_strategy(2)

    def uneven() -> Any:
        replica_context().all_reduce("sum", np.ones(()))
        return (
            None
            if replica_context().replica_id_in_sync_group == who
            else replica_context().all_reduce("sum", np.ones(()))
        )

    with pytest.raises(StateError) as error:
        strategy.run(uneven)
    assert f"the replicas of uneven diverge: {says}. Every replica must call" in str(error.value)
    assert_clean(strategy)


def test_a_first_replica_that_calls_no_collective_is_named() -> None:
    strategy = make_strategy()

    def uneven() -> Any:
        if replica_context().replica_id_in_sync_group == 2:
            replica_context().all_gather(np.ones(1), 0)

    with pytest.raises(StateError) as error:
        strategy.run(uneven)
    assert "replica 2 reached all_gather(axis=0); replica 0 ended without it" in str(error.value)
    assert_clean(strategy)


def test_replicas_that_call_different_collectives_are_named() -> None:
    strategy = make_strategy()

    def uneven() -> Any:
        op = "mean" if replica_context().replica_id_in_sync_group in (1, 4) else "sum"
        return replica_context().all_reduce(op, np.ones(()))

    with pytest.raises(StateError) as error:
        strategy.run(uneven)
    assert (
        'replicas 0, 2, 3, 5 reached all_reduce("sum"); replicas 1, 4 reached all_reduce("mean")'
    ) in str(error.value)
    assert_clean(strategy)


def test_structures_that_differ_in_a_collective_are_refused() -> None:
    strategy = make_strategy()

    def fn(call: Any) -> Any:
        number = replica_context().replica_id_in_sync_group
        return call({"a": np.ones((2, 3 if number == 4 else 2))})

    with pytest.raises(StateError) as error:
        strategy.run(fn, (lambda value: replica_context().all_reduce("sum", value),))
    assert "a: float64[2, 2] in replica 0, float64[2, 3] in replica 4" in str(error.value)
    with pytest.raises(StateError) as error:
        strategy.run(fn, (lambda value: replica_context().all_gather(value, 0),))
    assert not unnamed(error.value, "axis 0", "a of logical replica 4", "[2, 3]", "[2, 2]")
    assert_clean(strategy)


@pytest.mark.parametrize("meetings", [0, 1, 2])
@pytest.mark.parametrize("who", [0, 4])
def test_an_exception_in_one_replica_ends_the_others(who: int, meetings: int) -> None:
    strategy = make_strategy(2)
    ended: list[int] = []

    def fn() -> None:
        number = replica_context().replica_id_in_sync_group
        try:
            for _ in range(meetings):
                replica_context().all_reduce("sum", np.ones(()))
            if number == who:
                raise KeyError("lost")
            replica_context().all_reduce("sum", np.ones(()))
        except Exception:
            # The error of another replica must not reach this handler.
            assert number == who
            raise
        finally:
            ended.append(number)

    with pytest.raises(KeyError) as error:
        strategy.run(fn)
    assert error.value.__notes__ == [f"in logical replica {who}"]
    # Replicas after it have not started if no collective waits for them.
    assert sorted(ended) == list(range(V if meetings else who + 1))
    assert_clean(strategy)


def test_a_function_that_swallows_everything_does_not_hide_the_error() -> None:
    strategy = make_strategy()

    def fn() -> str:
        try:
            replica_context().all_reduce(
                "sum" if replica_context().replica_id_in_sync_group else "mean", np.ones(())
            )
        except BaseException:  # noqa: BLE001  the habit that must not hide an error
            return "fine"
        return "reduced"

    with pytest.raises(StateError, match="diverge"):
        strategy.run(fn)
    assert_clean(strategy)


def test_collectives_for_all_replicas_are_refused_in_one() -> None:
    strategy = make_strategy()
    values = strategy.run(lambda: np.ones(1))
    for call, name in [
        (lambda: strategy.reduce("sum", values), "reduce"),
        (lambda: strategy.gather(values, 0), "gather"),
        (lambda: strategy.run(lambda: 1), "run"),
    ]:
        with pytest.raises(TopologyError) as error:
            strategy.run(call)
        assert f"strategy.{name} was called in a logical replica" in str(error.value)
        assert "all_reduce" in str(error.value)


def test_gather_refuses_values_that_are_not_per_replica() -> None:
    strategy = make_strategy()
    for value, says in [
        (np.ones(2), "gather: expected a PerReplica, such as strategy.run returns, found ndarray"),
        (make_strategy(replicas=3).keys(0), "(0, 1, 2): it was made by another strategy"),
    ]:
        with pytest.raises(TopologyError) as error:
            strategy.gather(value, 0)  # type: ignore[arg-type]
        assert says in str(error.value)
    with pytest.raises(StateError) as scalar:
        strategy.gather(strategy.run(lambda: np.ones(())), 0)
    assert "the value of logical replica 0 has the shape [], which has no such axis" in str(
        scalar.value
    )
    with pytest.raises(StateError) as names:
        strategy.gather(
            strategy.run(lambda: {f"n{replica_context().replica_id_in_sync_group}": np.ones(1)}), 0
        )
    assert "logical replica 1 gives another structure than replica 0: ['n1'] and ['n0']" in str(
        names.value
    )
    with pytest.raises(TopologyError) as axis:
        strategy.reduce("sum", strategy.run(lambda: np.ones(2)), axis=1)
    assert "reduce over axis 1: a value has the shape [2]" in str(axis.value)
    with pytest.raises(TopologyError) as op:
        strategy.run(lambda: replica_context().all_reduce("max", np.ones(1)))
    assert '"sum" or "mean"' in str(op.value)


class Two:
    """Process 0 of two; `answer(message)` is what the other one sends."""

    index, count, is_chief = 0, 2, True

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.said: list[dict[str, Any]] = []

    def agree(self, data: bytes, decide: Any) -> bytes:
        return decide([data, data])

    def channel(self, name: str) -> Any:
        assert name == "run"
        return SimpleNamespace(gather=self.answered)

    def answered(self, data: bytes) -> list[bytes]:
        message = msgspec.msgpack.decode(data)
        self.said.append(message)
        return [data, msgspec.msgpack.encode(self.answer(message))]


def in_a_group(replicas: int, answer: Any) -> tuple[Strategy, Two]:
    engine: Any = NumpyEngine(1)
    engine.processes, engine.devices_per_process = Two(answer), (1, 1)
    return Strategy(engine, replicas), engine.processes


@pytest.mark.parametrize("replicas", [2, 6])
def test_processes_agree_on_every_collective_and_on_the_end(replicas: int) -> None:
    strategy, processes = in_a_group(replicas, lambda message: message)

    def count(_: Strategy) -> int:
        return 1

    def meets(meetings: int) -> None:
        for _ in range(meetings):
            replica_context().merge_call(count)

    strategy.run(meets, (0,))
    assert processes.said == [], "without a collective no process waits"
    strategy.run(meets, (2,))
    assert [message["call"] for message in processes.said] == [
        "merge_call(count) with 0 arguments (meeting 0 of meets)",
        "merge_call(count) with 0 arguments (meeting 1 of meets)",
        "the end (meeting 2 of meets)",
    ]


def test_an_error_of_another_process_ends_the_run() -> None:
    strategy, processes = in_a_group(
        6, lambda _: {"call": "the end (meeting 0 of fn)", "error": None}
    )

    def fn() -> None:
        replica_context().all_reduce("sum", np.ones(1))

    with pytest.raises(StateError) as error:
        strategy.run(fn)
    assert not unnamed(
        error.value, 'process 0 reached all_reduce("sum")', "process 1 reached the end"
    )
    strategy, processes = in_a_group(6, lambda _: {"call": "", "error": "ValueError: odd"})
    with pytest.raises(StateError) as error:
        strategy.run(fn)
    assert str(error.value) == "fn failed in process 1: ValueError: odd"
    assert len(processes.said) == 1, "the other process knows its own error"
    strategy, processes = in_a_group(6, lambda message: message)

    def odd() -> None:
        if replica_context().replica_id_in_sync_group == 1:
            raise ValueError("odd")
        replica_context().all_reduce("sum", np.ones(1))

    with pytest.raises(ValueError, match="odd"):
        strategy.run(odd)
    assert [message["error"] for message in processes.said] == [
        "ValueError: odd in logical replica 1"
    ]


# ---------------------------------------------------------------- inside of a step


def test_the_replica_context_in_grad_and_update() -> None:
    strategy = make_strategy()
    data = ArrayDataset(np.arange(24.0), 12)
    seen: dict[str, Any] = {}

    def refused(call: Any) -> str:
        with pytest.raises(TopologyError) as error:
            call()
        return str(error.value)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        context = replica_context()
        seen["grad"] = context.num_replicas_in_sync, in_cross_replica_context()
        seen["errors"] = [
            refused(lambda: context.replica_id_in_sync_group),
            refused(lambda: context.all_reduce("sum", state)),
            refused(lambda: context.all_gather(state, 0)),
            refused(lambda: context.merge_call(print)),
            refused(lambda: context.strategy),
        ]
        return {"w": batch[0].sum()}

    def update(state: Any, total: Any) -> Any:
        seen["update"] = get_replica_context(), in_cross_replica_context()
        return state + total["w"], {}

    strategy.step(grad, update)(np.zeros(()), strategy.batch(data, 0))
    assert seen["grad"] == (V, False)
    assert seen["update"] == (None, True)
    number, reduce, gather, merge, asked = seen["errors"]
    assert "grad is one program for all logical replicas, so it has no replica number" in number
    assert "in grad: the replicas of a step meet once" in reduce
    assert "in grad" in gather
    assert "in grad" in merge
    assert "grad is compiled once for all strategies" in asked
    assert not has_strategy()


@pytest.mark.parametrize("devices", [1, 2])
def test_contributions_that_are_not_finite_are_refused(devices: int) -> None:
    strategy = make_strategy(devices)
    data = ArrayDataset(np.arange(24.0), 12, shuffle=False)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        x = np.where(np.isin(batch[0], (14.0, 22.0)), np.nan, batch[0])
        return {"grads": (state * x.sum(), np.ones(2)), "n": 1}

    def update(state: Any, total: Any) -> Any:
        return total["grads"][0], {}

    watched = strategy.step(grad, update, check_finite=True)
    plain = strategy.step(grad, update)
    state = np.ones(())
    after, _ = watched(state, strategy.batch(data, 0))
    assert after.tobytes() == plain(state, strategy.batch(data, 0))[0].tobytes()
    assert np.isnan(plain(state, strategy.batch(data, 1))[0]), "the fault did not fire"
    for _ in range(2):
        with pytest.raises(NonFiniteError) as error:
            watched(state, strategy.batch(data, 1))
        assert not unnamed(
            error.value,
            "step 1: NaN",
            "grads/0 of logical replica 1, grads/0 of logical replica 5",
            "state has not changed",
        )
    assert watched(state, strategy.batch(data, 0))[0] == after


def test_a_step_that_is_repeated_after_an_error_is_checked_for_nan() -> None:
    """Whatever the error was, and in whatever order steps failed."""
    strategy = make_strategy()
    data = ArrayDataset(np.arange(24.0), 12, shuffle=False)
    fails = True

    def grad(state: Any, batch: Any, key: Any) -> Any:
        if fails and batch[0][0] == 14.0:  # in the middle of step 1
            raise RuntimeError("on purpose")
        if (
            fails and batch[0][-1] == 11.0
        ):  # in the last replica of step 0, which is found after the replica has run
            return {"sum": state, "more": state}
        return {"sum": np.where(batch[0] == 0.0, np.nan, batch[0]).sum() * state}

    watched = strategy.step(grad, lambda _, total: (total, {}), check_finite=True)
    with pytest.raises(StateError, match="replica 5"):
        watched(np.ones(()), strategy.batch(data, 0))
    with pytest.raises(RuntimeError, match="on purpose"):
        watched(np.ones(()), strategy.batch(data, 1))
    fails = False
    with pytest.raises(NonFiniteError, match="step 0: NaN or infinity in sum of logical replica 0"):
        watched(np.ones(()), strategy.batch(data, 0))
