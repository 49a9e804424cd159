"""The callbacks on each backend: the behaviour of Keras's tests, and a `fit` killed in an epoch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module", params=["jax", "tensorflow", "torch"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The JSON of `backend_worker.py` on one backend; it takes seconds, so it is started once."""
    backend = request.param
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed here")
    directory = tmp_path_factory.mktemp(backend)
    settings = {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "backend_worker.py"), str(directory)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["backend"] == backend
    return results


def test_a_killed_fit_resumes_with_the_bits_of_an_undisturbed_one(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("test_examples.py kills keras_fit.py on JAX; test_fit_resume.py has PyTorch")
    resumed = report["resumed"]
    assert resumed["killed"] == -9
    assert resumed["equal"]
    assert 0 < resumed["left"] < resumed["all"]


def test_what_a_pipeline_draws_from_variables_is_a_part_of_the_position(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("it needs TensorFlow")
    assert report["augmented"] == {"(1, 2)": True, "(2, 0)": True}


def test_what_a_loss_changes_comes_back(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("test_fit_state.py has PyTorch; on JAX a loss changes nothing")
    names = ("variable", "attribute", "compiled")
    assert report["losses"] == {name: [True, ""] for name in names}


def test_a_layer_that_a_callback_unfreezes_stays_unfrozen(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("test_fit_state.py has PyTorch; on JAX Keras refuses it without `compile`")
    assert report["unfrozen"]


def test_a_model_whose_step_makes_its_variables_resumes(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("elsewhere Keras itself refuses a model without `call`")
    refused = report["late"].pop("refused")
    assert report["late"] == {"False": True, "True": True}
    assert "'decoder'" in refused
    assert "`layer.build(input_shape)`" in refused


def test_a_pipeline_that_returns_other_batches_is_named(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("it needs TensorFlow")
    plain, seeded, unseeded, python, shared, kept, twice, noisy, *one_seed = report["unsound"]
    assert [plain, seeded, kept, noisy] == ["", "", "", ""], "controls"
    assert [text.count("from which the model draws, too") for text in one_seed] == [1, 1]
    assert "draws without a seed (RandomUniform)" in unseeded
    assert "calls Python" in python
    assert "parts of one shuffled" in shared
    assert "before and one after its cache" in twice


def test_the_program_of_the_guide_from_tf_train_resumes(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("it is TensorFlow's guide")
    assert report["migrated"]["steps"] == 30
    assert len(set(report["migrated"]["ends"])) == 1


def test_a_source_of_tf_data_in_a_state_is_refused_with_its_remedy(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("it is TensorFlow's data")
    message = report["migrated"]["refused"]
    assert message.startswith("data: a value of type tensorflow.python.data.")
    assert "`dataset.skip(start)`" in message
    assert "state_dict" not in message


def test_variables_of_tensorflow_that_keras_does_not_count_are_refused(report: Any) -> None:
    if report["backend"] != "tensorflow":
        pytest.skip("it needs TensorFlow")
    errors = report["refused"]
    assert len(errors) == 4
    for error, path in zip(errors, ("extra", "extra.0", "extra.key.0", "extra"), strict=True):
        assert re.search(rf"of TensorFlow \(dense\w*\.{re.escape(path)}\)", error), error
        assert "self.add_weight" in error


def test_the_callbacks_behave_as_the_tests_of_keras_require(report: Any) -> None:
    assert len(report["behaviours"]) == 14
    failed = {name: error for name, error in report["behaviours"].items() if error}
    assert not failed, "\n".join(failed.values())
