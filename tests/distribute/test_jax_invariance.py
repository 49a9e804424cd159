"""JAX: one digest on any devices and processes, and controls that show that it could differ."""

from __future__ import annotations

from typing import Any

import group
import pytest

MODELS = ("cnn", "nnx", "reduce")
# To compile a model for another number of devices takes 5 s, so eight devices only reduce. Three
# devices run 3, 3 and 2 replicas. The matrix of `make proof-distribute` has both models on all
# topologies.
DEVICES = (1, 3, 8)
# Eight devices with one replica each add one after another, as one device does without the tree.
CONTROLS = (1, 3)


def with_8_devices(compiled: dict[str, str], *options: str) -> Any:
    """One process; its strategies share what is compiled for one and the same device."""
    env = {"JAX_NUM_CPU_DEVICES": "8", **compiled}
    (out,) = group.results("jax_worker.py", 1, *options, env=env, forked="jax")
    return out


@pytest.fixture(scope="module")
def alone(compiled: dict[str, str]) -> Any:
    devices, controls = (",".join(map(str, counts)) for counts in (DEVICES, CONTROLS))
    return with_8_devices(compiled, "--devices", devices, "--controls", controls)


@pytest.fixture(scope="module")
def compared(compiled: dict[str, str]) -> Any:
    """A process of its own, so that no fixture of a busy machine reaches the limit of a group."""
    return with_8_devices(compiled, "--compared", "1")


@pytest.fixture(scope="module")
def pair(compiled: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two interpreters of their own, which use nothing that the process of `alone` has compiled.

    Each has two devices. test_models_matrix.py trains other models on two processes of one device.
    """
    directory = tmp_path_factory.mktemp("compiled")
    return group.results(
        "jax_worker.py",
        2,
        *("--devices", "2", "--unmeasured", "1"),
        env={
            **compiled,
            "JAX_NUM_CPU_DEVICES": "2",
            "PERDURE_FAST_ON": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(directory),
        },
    )


@pytest.mark.parametrize("devices", DEVICES)
def test_one_process_with_any_devices(alone: Any, devices: int) -> None:
    models = MODELS if devices < 8 else ("reduce",)
    assert alone[str(devices)] == {model: alone["1"][model] for model in models}


def test_different_models_have_different_digests(alone: Any) -> None:
    assert len({alone["1"][model] for model in MODELS}) == len(MODELS)


def test_two_processes_have_the_digest_of_one(alone: Any, pair: Any) -> None:
    expected = {model: alone["1"][model] for model in ("cnn", "reduce")}
    assert [process["2"] for process in pair] == [expected] * 2


def test_device_order_does_not_matter(alone: Any) -> None:
    assert alone["reversed"] == alone["1"]["cnn"]


def test_topology_may_change_between_steps(alone: Any) -> None:
    assert alone["in parts"] == alone["1"]["cnn"]


def test_the_recipe_leaves_out_the_topology(alone: Any, pair: Any) -> None:
    assert pair[0]["recipe"] == pair[1]["recipe"] == alone["recipe"]


@pytest.mark.parametrize("control", ["psum", "rng by device", "strided rows"])
def test_negative_controls_depend_on_the_topology(alone: Any, control: str) -> None:
    digests = {alone[f"controls {devices}"][control] for devices in CONTROLS}
    assert len(digests) == len(CONTROLS)


@pytest.mark.parametrize("control", ["rng by device", "strided rows"])
def test_negative_controls_on_one_device_are_the_real_thing(alone: Any, control: str) -> None:
    # So only the missing guard makes the difference above.
    assert alone["controls 1"][control] == alone["1"]["cnn"]


def test_a_lost_worker_is_reported_and_nothing_hangs() -> None:
    survivor, victim = group.launch("jax_worker.py", 2, "--die-at", "3", forked="jax")
    assert victim[0] == -9, "the fault did not fire"
    assert survivor[0] == 0, survivor[2][-4000:]
    assert "Save nothing" in survivor[1]["lost"]
    assert "restart the whole group from the last checkpoint" in survivor[1]["lost"]


@pytest.mark.parametrize("model", ["tiny", "scan", "attention"])
def test_devices_run_together_if_the_compiled_programs_are_equal(compared: Any, model: str) -> None:
    digests, answers = compared["by comparison"][model]["compared"]
    assert digests == 1
    assert answers
    assert all(answers)


def test_control_programs_that_differ_are_refused(compared: Any) -> None:
    """XLA's partitioner, if it may clean up, merges the values of an attention."""
    models = compared["by comparison"]["attention, cleaned up"]
    digests, answers = models["compared"]
    assert digests == 1
    assert False in answers
    # Without the comparison the bits differ.
    assert models["not compared"][0] > 1
    # On a platform that was not measured, the first step finds them, and has the bits of the reference.
    assert models["both ways"][0] == 1
    (warning,) = models["warned"]
    assert "on cpu a step computed both ways had other bits in new state w on " in warning


def test_several_devices_that_were_not_measured(compared: Any) -> None:
    (expected, slow), (found, explained) = compared["both ways"].values()
    assert slow.startswith("Not fast: it has been measured on ")
    assert found == expected
    assert explained.startswith("Fast: ")
    assert explained.endswith("steps, computed both ways, had equal bits.")


def test_a_group_has_no_fast_steps_that_its_processes_could_decide_on(pair: Any) -> None:
    explained = {process["explained"] for process in pair}
    assert explained == {"Not fast: the sum goes through 2 processes."}


def test_shares_are_placed_with_the_bytes_that_device_put_places(compared: Any) -> None:
    """Two that change places are the control: their bytes are not the expected ones."""
    placed = compared["placed"]
    assert {equal for _, equal, _ in placed.values()} == {True}
    assert {exchanged for *_, exchanged in placed.values()} == {False}
    without_device_put = [name for name, (calls, *_) in placed.items() if calls]
    assert without_device_put == ["floats", "strided", "bool", "numbers"]


def test_generated_functions_give_one_digest_on_1_and_2_devices(compared: Any) -> None:
    assert len(set(compared["generated"])) == 1
