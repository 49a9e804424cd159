"""Keras 3 on both backends: stable paths, exact resume, errors, and restores on the other backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked

BACKENDS = ("jax", "torch")

MODEL = [
    "conv2d/kernel",
    "conv2d/bias",
    "batch_normalization/gamma",
    "batch_normalization/beta",
    "batch_normalization/moving_mean",
    "batch_normalization/moving_variance",
    "seed_generator/seed_generator_state",
    "dense/kernel",
    "dense/bias",
    "seed_generator_1/seed_generator_state",
    "dense_1/kernel",
    "dense_1/bias",
]
TRAINED = [path for path in MODEL if "seed" not in path and "moving" not in path]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("keras")
    by_backend = {}
    for backend in BACKENDS:
        program = Path(__file__).with_name("keras_worker.py")
        environment = {**os.environ, "KERAS_BACKEND": backend}
        ((status, out, err),) = run_forked(
            f"keras-{backend}", program, [[str(where)]], [environment]
        )
        assert status == 0, err[-4000:]
        by_backend[backend] = json.loads(out.splitlines()[-1])
        assert by_backend[backend]["backend"] == backend
    return by_backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_paths_do_not_depend_on_earlier_models(reports: Any, backend: str) -> None:
    expected = [f"model/{path}" for path in MODEL]
    expected += ["optimizer/iteration", "optimizer/learning_rate"]
    slots = {f"optimizer/{slot}/{path}" for slot in ("momentum", "velocity") for path in TRAINED}
    for paths in (reports[backend]["paths"], reports[backend]["paths again"]):
        assert paths[: len(expected)] == expected
        assert set(paths[len(expected) :]) == slots
    assert (
        reports[backend]["custom"]
        == [
            [
                "dense/kernel",
                "dense/bias",
                "dense_1/kernel",
                "dense_1/bias",
                "dense_2/kernel",
                "dense_2/bias",
            ]
        ]
        * 2
    )
    assert reports[backend]["functional"] == ["head/kernel", "head/bias"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_attributes_come_back_where_each_step_reads_them(reports: Any, backend: str) -> None:
    changed, resumed = reports[backend]["attributes"]
    assert changed == [0.5, [1, 2], 6, 2.0]
    assert resumed == (changed if backend == "torch" else [0.3, [], 8, None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_by_keras_resumes_exactly(reports: Any, backend: str) -> None:
    assert reports[backend]["resumed equal"]
    assert reports[backend]["control: other weights"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_an_optimizer_of_keras_has_used_are_not_stored(
    reports: Any, backend: str
) -> None:
    assert [path for path in reports[backend]["extra"] if "/gradient/" in path] == []
    assert reports[backend].get("control: has gradients", True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_seeds_and_variables_are_restored_in_place(reports: Any, backend: str) -> None:
    assert list(reports[backend]["parts"]) == ["metric/total", "metric/count", "seed", "variable"]
    assert reports[backend]["parts changed"]
    assert reports[backend]["parts in place"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tree_of_a_strategy_and_the_model_are_one_state(reports: Any, backend: str) -> None:
    assert reports[backend]["stateless equal"]
    assert reports[backend]["written equal"]


def test_a_checkpoint_of_one_backend_restores_on_the_other(reports: Any) -> None:
    assert reports["jax"]["shared"] == reports["torch"]["shared"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mismatches_and_unbuilt_objects_are_named(reports: Any, backend: str) -> None:
    out = reports[backend]
    assert "dense_1/kernel: expected float32[4,4], found float32[4,3]" in out["misfit"]
    assert out["unbuilt model"].startswith("m: the Keras object 'sequential_")
    assert "call it once, or give it a `keras.Input`" in out["unbuilt model"]
    assert "`optimizer.build(model.trainable_variables)`" in out["unbuilt optimizer"]
    assert out["no optimizer"] == "apply needs an optimizer: Stateless(model, optimizer)"


def test_buffers_of_a_wrapped_torch_module_are_refused(reports: Any) -> None:
    assert "wraps a torch module with buffers" in reports["torch"]["buffers"]
    assert "running_mean" in reports["torch"]["buffers"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_manager_restores_the_generator_of_keras_seeds(
    reports: dict[str, Any], backend: str
) -> None:
    first, second = reports[backend]["drawn"]
    assert first != second
    assert reports[backend]["drawn again"] == [first, second]


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_head_is_kept_and_the_optimizer_is_never_half_restored(
    reports: Any, backend: str
) -> None:
    report = reports[backend]
    head = ["model/dense_1/bias", "model/dense_1/kernel"]
    assert report["part report"] == [head, ["optimizer"]]
    restored = {path for path in report["part restored"] if path.startswith("model/")}
    assert restored >= {f"model/{path}" for path in MODEL if "dense_1" not in path}
    assert not set(head) & restored
    assert set(head) <= set(report["part kept"])
    kept = {path for path in report["part kept"] if path.startswith("optimizer/")}
    assert "optimizer/learning_rate" in kept - set(report["part restored"])
    assert {f"optimizer/momentum/{path}" for path in TRAINED} <= kept
