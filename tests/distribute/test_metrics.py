"""Metrics: results worked out by hand, equal bits on every topology and engine, exact restores."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy_engine import NumpyEngine

import perdure
from perdure.data import ArrayDataset
from perdure.distribute import Strategy, get_replica_context, metrics
from perdure.distribute.metrics.metric import COUNTER, SUM, added, empty, read_value
from perdure.errors import StateError
from perdure.jax import OneDeviceStrategy as JaxStrategy
from perdure.torch import OneDeviceStrategy as TorchStrategy

ARRAYS = {"numpy": np.asarray, "jax": jnp.asarray, "torch": torch.as_tensor}
V = 3


@pytest.fixture(params=ARRAYS)
def array(request: Any) -> Any:
    return ARRAYS[request.param]


def make_strategy(devices: int = 1, replicas: int = V) -> Strategy:
    return Strategy(NumpyEngine(devices), replicas)


def once(metric: Any, *args: Any, **kwargs: Any) -> Any:
    """The result after one update, by both styles, which must agree."""
    metric.update_state(*args, **kwargs)
    functional = metric.result(metric.merge(metric.init(), metric.contribution(*args, **kwargs)))
    result = metric.result()
    assert np.asarray(functional).tobytes() == np.asarray(result).tobytes()
    return result


# ---------------------------------------------------------------- accumulators


def test_a_counter_is_exact_beyond_32_bits(array: Any) -> None:
    step, total = 2**30 - 1, 0
    counter: Any = empty((), COUNTER)
    for n in range(9):
        counter = added(counter, array(np.int32(step - n)))
        total += step - n
    assert read_value(counter) == total > 2**32
    for _ in range(12):
        counter = added(counter, array(np.int32(-step)))
        total -= step
    assert read_value(counter) == total < -(2**31)


def test_a_sum_keeps_what_float32_loses(array: Any) -> None:
    total: Any = empty((), SUM)
    plain = np.float32(0)
    for value in (2.0**25, *[1.0] * 100, -(2.0**25)):
        total = added(total, array(np.float32(value)))
        plain += np.float32(value)
    assert read_value(total) == 100.0
    assert plain == 0.0, "negative control: a plain sum loses them"


@pytest.mark.parametrize("dtype", [COUNTER, SUM])
def test_accumulators_have_the_same_bits_on_every_engine(dtype: str) -> None:
    rng = np.random.default_rng(0)
    steps = [(rng.normal(size=4) * 1e6).astype(dtype) for _ in range(200)]
    totals = set()
    compiled = jax.jit(added)
    for add, array in [
        (added, np.asarray),
        (added, torch.as_tensor),
        (compiled, jnp.asarray),
    ]:
        total: Any = empty((4,), dtype)
        for step in steps:
            total = add(total, array(step))
        assert str(total.dtype).endswith(dtype)
        totals.add(np.asarray(total).tobytes())
    assert len(totals) == 1


# ---------------------------------------------------------------- figures


def test_mean_and_sum(array: Any) -> None:
    assert once(metrics.Mean(), array([1.0, 3.0, 5.0, 7.0])) == 4.0
    weights = array([1.0, 1.0, 0.0, 0.5])
    assert once(metrics.Mean(), array([1.0, 3.0, 5.0, 7.0]), weights) == 7.5 / 2.5
    assert once(metrics.Mean(), array([[1.0, 3.0], [5.0, 7.0]]), array([1.0, 0.0])) == 2.0
    assert np.isnan(metrics.Mean().result())
    assert once(metrics.Sum(), array([0.5, 0.25])) == 0.75
    total = once(metrics.Sum(integer=True), array([2, 5]))
    assert (total, total.dtype) == (7, np.int64)


def test_accuracy(array: Any) -> None:
    scores = array([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4], [0.4, 0.4, 0.2]])
    labels, mask = array([1, 2, 2, 0]), array([1.0, 1.0, 0.0, 1.0])
    one_hot = array(np.eye(3)[[1, 2, 2, 0]])
    assert once(metrics.SparseCategoricalAccuracy(), labels, scores) == 0.75
    assert once(metrics.SparseCategoricalAccuracy(), labels[:, None], scores) == 0.75
    assert once(metrics.SparseCategoricalAccuracy(), labels, scores, mask) == 2 / 3
    assert once(metrics.CategoricalAccuracy(), one_hot, scores) == 0.75
    heavy = metrics.CategoricalAccuracy(weighted=True)
    assert once(heavy, one_hot, scores, array([0.5, 2.0, 1.0, 0.5])) == 0.5
    truth, guess = array([1, 0, 1, 1]), array([0.9, 0.5, 0.4, 0.51])
    assert once(metrics.BinaryAccuracy(), truth, guess) == 0.75
    assert once(metrics.BinaryAccuracy(threshold=0.3), truth, guess) == 0.75
    assert once(metrics.BinaryAccuracy(), truth.reshape(2, 2), guess.reshape(2, 2)) == 0.75


def test_top_k_accuracy(array: Any) -> None:
    scores = array([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4], [np.nan, 0.4, 0.2]])
    labels = array([0, 2, 0, 0])
    accuracies = [
        once(metrics.SparseTopKCategoricalAccuracy(k=k), labels, scores) for k in (1, 2, 3)
    ]
    # Of equal scores all count as in the top k; a NaN never does.
    assert accuracies == [0.0, 0.5, 0.75]
    one_hot = array(np.eye(3)[[0, 2, 0, 0]])
    assert once(metrics.TopKCategoricalAccuracy(k=2), one_hot, scores) == 0.5
    assert once(metrics.SparseTopKCategoricalAccuracy(k=2), array([9, -1]), scores[:2]) == 0.0


def test_confusion_matrix(array: Any) -> None:
    labels, guess = array([0, 1, 2, 2, 2]), array([0, 2, 2, 2, 0])
    matrix = once(metrics.ConfusionMatrix(3), labels, guess)
    assert matrix.tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 2]]
    assert matrix.dtype == np.int64
    scores = array(np.eye(3)[[0, 2, 2, 2, 0]])
    mask = array([1.0, 1.0, 0.0, 1.0, 0.0])
    matrix = once(metrics.ConfusionMatrix(3), labels, scores, mask)
    assert matrix.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    wrong = metrics.ConfusionMatrix(2)
    wrong.update_state(labels, guess)
    with pytest.raises(StateError) as error:
        wrong.result()
    assert "4 labels or predictions were outside of 0 to 1" in str(error.value)


def test_auc_worked_by_hand(array: Any) -> None:
    """The example of keras.metrics.AUC: thresholds -e, 0.5, 1 + e."""
    labels, guess = array([0, 0, 1, 1]), array([0.0, 0.5, 0.3, 0.9])
    # above each threshold: tp [2, 1, 0], fp [2, 0, 0]
    assert once(metrics.AUC(num_thresholds=3), labels, guess) == 0.75
    masked = array([1.0, 0.0, 0.0, 1.0])
    assert once(metrics.AUC(num_thresholds=3), labels, guess, masked) == 1.0
    weights = array([1.0, 0.0, 0.0, 1.0])
    assert once(metrics.AUC(num_thresholds=3, weighted=True), labels, guess, weights) == 1.0
    assert once(metrics.AUC(), array([1, 1]), array([0.2, 0.7])) == 0.0


def test_auc_has_the_counts_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 500)
    guess = np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1).astype(np.float32)
    for curve in ("ROC", "PR"):
        metric, theirs = metrics.AUC(curve=curve), keras.metrics.AUC(curve=curve)
        area = once(metric, labels, guess)
        theirs.update_state(labels, guess)
        read = {name: read_value(a) for name, a in metric.state_dict().items()}
        for name in ("true_positives", "false_positives"):
            expected = np.asarray(getattr(theirs, name).value)
            assert read[name].tolist() == expected.astype(int).tolist()
        # Keras integrates in float32, so only its first digits can agree.
        assert round(area, 5) == round(float(theirs.result()), 5)


def test_auc_is_the_sum_of_trapezoids() -> None:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 64)
    guess = rng.integers(0, 65, 64) / 64  # none of them on a threshold but 0 and 1
    metric = metrics.AUC(num_thresholds=8)
    exact = Fraction(0)
    rates = []
    for threshold in metric.thresholds:
        above = guess.astype(np.float32) > threshold
        rates.append(
            [Fraction(int((above & (labels == y)).sum()), int((labels == y).sum())) for y in (0, 1)]
        )
    for (x, y), (next_x, next_y) in itertools.pairwise(rates):
        exact += (x - next_x) * (y + next_y) / 2
    assert once(metric, labels, guess) == float(exact)


def test_auc_with_fine_bins_equals_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    # Each guess has its own bin, and 128 of each label make every rate exact.
    labels, guess = np.repeat([0, 1], 128), (rng.permutation(256) + 0.5) / 256
    expected = sklearn.roc_auc_score(labels, guess)
    assert once(metrics.AUC(num_thresholds=257), labels, guess) == expected


def test_bad_arguments_of_a_metric_are_refused() -> None:
    scores = np.eye(3)
    for metric, args, says in [
        (metrics.SparseCategoricalAccuracy(), (np.zeros(2, int), scores), "labels have the shape"),
        (metrics.CategoricalAccuracy(), (np.eye(4), scores), "[4, 4], expected [3, 3]"),
        (metrics.BinaryAccuracy(), (np.ones(3), np.ones((3, 1))), "[3], expected [3, 1]"),
        (metrics.Mean(), (np.ones(3), np.ones(2)), "sample_weight has the shape [2]"),
        (metrics.Sum(integer=True), (np.ones(3),), 'Sum "Sum" sums integers, found float64'),
    ]:
        with pytest.raises(StateError) as error:
            metric.update_state(*args)
        assert says in str(error.value)
    half = metrics.SparseCategoricalAccuracy("acc")
    half.update_state(np.arange(3), scores, np.array([1.0, 0.5, 0.25]))
    with pytest.raises(StateError) as error:
        half.result()
    assert str(error.value).startswith(
        'SparseCategoricalAccuracy "acc": 2 rows had a weight other than 0 and 1'
    )
    logits = metrics.AUC()
    logits.update_state(np.array([0, 1]), np.array([-3.0, 0.5]))
    with pytest.raises(StateError) as error:
        logits.result()
    assert "1 predictions were outside of 0 to 1; pass probabilities, not logits" in str(
        error.value
    )
    for make, says in [
        (lambda: metrics.AUC(curve="PRC"), 'curve: expected "ROC" or "PR", found \'PRC\''),
        (lambda: metrics.AUC(num_thresholds=1), "expected at least 2, found 1"),
    ]:
        with pytest.raises(StateError) as error:
            make()
        assert says in str(error.value)


# ---------------------------------------------------------------- in a strategy


def all_metrics() -> dict[str, Any]:
    return {
        "mean": metrics.Mean(),
        "seen": metrics.Sum(integer=True),
        "accuracy": metrics.SparseCategoricalAccuracy(),
        "top": metrics.SparseTopKCategoricalAccuracy(k=2),
        "matrix": metrics.ConfusionMatrix(4),
        "auc": metrics.AUC(num_thresholds=20),
    }


def contributions(by_name: dict[str, Any], batch: Any, scores: Any) -> dict[str, Any]:
    """For the functional style; `update` below does the same with objects."""
    y, w = batch["y"], batch["weight"]
    return {
        "mean": by_name["mean"].contribution(scores[:, 0], w),
        "seen": by_name["seen"].contribution(w != 0),
        "accuracy": by_name["accuracy"].contribution(y, scores, w),
        "top": by_name["top"].contribution(y, scores, w),
        "matrix": by_name["matrix"].contribution(y, scores, w),
        "auc": by_name["auc"].contribution(y == 1, scores[:, 1], w),
    }


def dataset() -> ArrayDataset:
    rng = np.random.default_rng(5)
    x = rng.dirichlet(np.ones(4), 100).astype(np.float32)
    return ArrayDataset({"x": x, "y": rng.integers(0, 4, 100).astype(np.int32)}, 12)


def by_objects(
    strategy: Strategy, steps: Any, by_name: dict[str, Any] | None = None
) -> dict[str, Any]:
    with strategy.scope():
        by_name = all_metrics() if by_name is None else by_name

    def fn(batch: Any) -> None:
        y, x, w = batch["y"], batch["x"], batch["weight"]
        by_name["mean"].update_state(x[:, 0], w)
        by_name["seen"].update_state(w != 0)
        for name in ("accuracy", "top", "matrix"):
            by_name[name].update_state(y, x, w)
        by_name["auc"].update_state(y == 1, x[:, 1], w)

    for step in steps:
        strategy.run(fn, (strategy.batch(dataset(), step),))
    return by_name


def digest(by_name: dict[str, Any]) -> dict[str, str]:
    return {name: _hex(metric.state_dict()) for name, metric in by_name.items()}


def _hex(state: dict[str, Any]) -> str:
    return ",".join(f"{key}:{np.asarray(state[key]).tobytes().hex()}" for key in sorted(state))


def test_metric_objects_have_the_same_bits_on_any_devices() -> None:
    runs = [by_objects(make_strategy(devices, 6), range(9)) for devices in (1, 2, 5, 6)]
    assert len({json.dumps(digest(one)) for one in runs}) == 1
    results = {name: metric.result() for name, metric in runs[0].items()}
    assert results["seen"] == 100
    assert int(results["matrix"].sum()) == 100
    assert results["accuracy"] == np.trace(results["matrix"]) / 100
    # The updates of many runs may wait for their tree together.
    assert digest(by_objects(make_strategy(1, 6), range(90))) == digest(
        by_objects(make_strategy(4, 6), range(90))
    )


def test_reading_a_result_changes_nothing() -> None:
    strategy = make_strategy(2, 6)
    by_name = by_objects(strategy, range(4))
    before = [metric.result() for metric in by_name.values()]
    assert len(before) == 6
    assert digest(by_objects(strategy, range(4, 9), by_name)) == digest(
        by_objects(strategy, range(9))
    )


def test_a_counter_of_seven_restores_as_seven_on_any_replicas(tmp_path: Any) -> None:
    """On 3 replicas, an integer mean over replicas would turn a counter of 7 into 6."""
    strategy = make_strategy(replicas=3)
    assert 7 // strategy.num_replicas_in_sync * strategy.num_replicas_in_sync == 6, (
        "negative control"
    )
    with strategy.scope():
        seen = metrics.Sum("seen", integer=True)
        counts = strategy.distribute_values_from_function(
            lambda context: np.array([3, 2, 2][context.replica_id_in_sync_group])
        )
        strategy.run(seen.update_state, (counts,))
    assert seen.result() == 7
    perdure.Checkpoint(seen=seen).save(tmp_path, 1)
    for replicas in (1, 2, 3, 5):
        with make_strategy(replicas=replicas).scope():
            again = metrics.Sum("seen", integer=True)
        perdure.Checkpoint(seen=again).restore(tmp_path)
        assert again.result() == 7
    alone = metrics.Sum("seen", integer=True)
    perdure.Checkpoint(seen=alone).restore(tmp_path)
    assert alone.result() == 7


def test_metrics_resume_on_another_topology_with_the_same_bits(tmp_path: Any) -> None:
    whole = by_objects(make_strategy(1, 6), range(9))
    perdure.Checkpoint(**by_objects(make_strategy(4, 6), range(5))).save(tmp_path, 5)
    other = make_strategy(3, 6)
    with other.scope():
        by_name = all_metrics()
    perdure.Checkpoint(**by_name).restore(tmp_path)
    assert digest(by_objects(other, range(5, 9), by_name)) == digest(whole)
    for metric in by_name.values():
        metric.reset_state()
    assert digest(by_name) == digest(all_metrics())


def functional(strategy: Strategy, steps: Any, wrap: Any) -> dict[str, Any]:
    mine = all_metrics()

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return contributions(mine, {k: wrap(v) for k, v in batch.items()}, wrap(batch["x"]))

    def update(state: Any, total: Any) -> Any:
        new = {name: metric.merge(state[name], total[name]) for name, metric in mine.items()}
        return new, {"accuracy": mine["accuracy"].result(new["accuracy"])}

    state: Any = {name: metric.init() for name, metric in mine.items()}
    train_step, logs = strategy.step(grad, update), {}
    for step in steps:
        state, logs = train_step(state, strategy.batch(dataset(), step))
    digests = {name: _hex({k: np.asarray(v) for k, v in s.items()}) for name, s in state.items()}
    assert round(float(logs["accuracy"]), 6) == round(mine["accuracy"].result(state["accuracy"]), 6)
    return digests


def test_both_styles_and_all_engines_have_the_same_counts() -> None:
    """The order of a sum within one share is each framework's own; counts have no order."""
    objects = digest(by_objects(make_strategy(2, 6), range(9)))
    for strategy, wrap in [
        (make_strategy(3, 6), np.asarray),
        (JaxStrategy(replicas=6), jnp.asarray),
        (TorchStrategy(replicas=6), torch.as_tensor),
    ]:
        digests = functional(strategy, range(9), wrap)
        assert digests.keys() == objects.keys()
        for name in digests.keys() - {"mean"}:
            assert digests[name] == objects[name], name


@pytest.mark.parametrize("make", [JaxStrategy, TorchStrategy])
def test_metric_objects_have_the_same_counts_on_the_engines(make: Any) -> None:
    expected = digest(by_objects(make_strategy(1, 6), range(3)))
    digests = digest(by_objects(make(replicas=6), range(3)))
    assert digests.keys() == expected.keys()
    for name in digests.keys() - {"mean"}:
        assert digests[name] == expected[name], name


# ---------------------------------------------------------------- what goes wrong


def test_a_metric_outside_its_scope_is_refused() -> None:
    strategy, other = make_strategy(), make_strategy()
    with strategy.scope():
        inside = metrics.Mean("loss")
    outside = metrics.Mean("loss")
    for call, says in [
        (
            lambda: strategy.run(outside.update_state, (1.0,)),
            "was made outside of the scope of the",
        ),
        (lambda: other.run(inside.update_state, (1.0,)), "the scope of another strategy than the"),
        (lambda: inside.update_state(1.0), "is updated outside of its scope; call update_state in"),
    ]:
        with pytest.raises(StateError) as error:
            call()
        assert str(error.value).startswith('Mean "loss"')
        assert says in str(error.value)
    with strategy.scope():
        inside.update_state(2.0)
    outside.update_state(2.0)
    assert inside.result() == outside.result() == 2.0


def test_reads_resets_and_uneven_updates_in_a_replica_are_refused() -> None:
    strategy = make_strategy()
    with strategy.scope():
        mean = metrics.Mean("loss")
    for call, what in [
        (mean.result, "result()"),
        (mean.reset_state, "reset_state()"),
        (mean.state_dict, "saving"),
    ]:
        with pytest.raises(StateError) as error:
            strategy.run(call)
        assert f'Mean "loss": {what} in a logical replica, which has only its own share' in str(
            error.value
        )

    def uneven() -> None:
        context = get_replica_context()
        assert context is not None
        for _ in range(2 if context.replica_id_in_sync_group == 1 else 1):
            mean.update_state(1.0)

    with pytest.raises(StateError) as error:
        strategy.run(uneven)
    assert "logical replica 0 updated it 1 times and replica 1 2 times in one run" in str(
        error.value
    )

    def failing() -> None:
        mean.update_state(1.0)
        raise KeyError

    with pytest.raises(KeyError):
        strategy.run(failing)
    assert np.isnan(mean.result()), "a run that fails leaves nothing behind"

    def grad(state: Any, batch: Any, key: Any) -> Any:
        mean.update_state(1.0)

    with pytest.raises(StateError) as error:
        strategy.step(grad, lambda state, total: (state, total))({}, strategy.batch(dataset(), 0))
    assert "update_state in grad of a step, which must be pure" in str(error.value)
    with pytest.raises(StateError) as error, strategy.scope():
        jax.jit(mean.update_state)(1.0)
    assert "update_state was called inside of jit" in str(error.value)


def test_accumulators_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    counts = metrics.ConfusionMatrix(3)
    perdure.Checkpoint(m=counts).save(tmp_path, 1)
    with pytest.raises(StateError) as error:
        perdure.Checkpoint(m=metrics.ConfusionMatrix(4)).restore(tmp_path)
    assert str(error.value).startswith("m: ConfusionMatrix")
    assert "expected the accumulators {'matrix': 'int32[2, 4, 4]'" in str(error.value)
    assert "found {'matrix': 'int32[2, 3, 3]'" in str(error.value)
    with pytest.raises(StateError) as state:
        metrics.Mean().load_state_dict(counts.state_dict())
    assert "expected the accumulators {'total': 'float32[2]'" in str(state.value)


def test_metrics_import_no_framework() -> None:
    probe = (
        "import sys, numpy as np\n"
        "from perdure.distribute import metrics, compute_average_loss\n"
        "mean = metrics.Mean()\n"
        "mean.update_state(np.ones(3))\n"
        "assert mean.result() == 1 and compute_average_loss(np.ones(2)) == 1\n"
        "print(sorted({'jax', 'torch', 'keras', 'tensorflow', 'flax'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_counts_of_another_threshold_or_k_are_refused() -> None:
    pairs = [
        (metrics.SparseTopKCategoricalAccuracy(k=2), metrics.SparseTopKCategoricalAccuracy(k=1)),
        (metrics.BinaryAccuracy(), metrics.BinaryAccuracy(threshold=0.7)),
    ]
    for one, other in pairs:
        with pytest.raises(StateError, match="expected the accumulators"):
            other.load_state_dict(one.state_dict())
        one.load_state_dict(one.state_dict())
