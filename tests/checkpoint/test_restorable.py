"""The first save refuses a state that the program could never restore."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from perdure import CheckpointManager
from perdure.errors import CorruptionError, MismatchError, UnsupportedLeafError
from perdure.state import differences, flatten, snapshot, template_of
from perdure.state.restore_check import RestoreCheck
from perdure.state.walk import Walk
from perdure.store import Run
from perdure.store.format import hash_bytes, manifest_name


class Growing:
    def __init__(self) -> None:
        self.history: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = state["history"]


def test_a_state_that_does_not_fit_the_target_of_the_restore_is_refused_at_the_first_save(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore_or_initialize({"w": np.zeros(2, np.float32), "log": []})
        state["w"] = state["w"].astype(np.float64)
        state["log"].append(0.5)
        with pytest.raises(MismatchError, match="could never be restored") as caught:
            manager.save(1, state)
        assert "step 1" in str(caught.value)
        assert "log" not in str(caught.value)  # a list may have any length
        assert "w: expected float32[2], found float64[2]" in str(caught.value)
        manager.wait_until_finished()
        assert manager.all_steps() == []
        assert manager.save(1, {"w": np.ones(2, np.float32), "log": []})


def test_the_target_of_an_earlier_checkpoint_is_compared_as_well(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.zeros(2)})
    with CheckpointManager(tmp_path) as manager:
        manager.restore(like={"w": np.zeros(2)})
        manager.save(2, {"w": np.zeros(3)})
        with pytest.warns(UserWarning, match=r"w: expected float64\[2\], found float64\[3\]"):
            manager.wait_until_finished()


def test_a_layer_thawed_after_an_interruption_is_saved_as_without_one(tmp_path: Path) -> None:
    def make(step: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizer = torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9)
        if step > 2:
            optimizer.add_param_group({"params": parameters[1:]})
        return parameters[1], optimizer

    late, optimizer = make(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, {"o": optimizer})
    late, optimizer = make(2)
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"o": optimizer})
        optimizer.add_param_group({"params": [late]})
        manager.save(3, {"o": optimizer})
        with pytest.warns(UserWarning, match=r"o/param_groups: expected groups of \[1\]"):
            manager.wait_until_finished()
        assert manager.restore(like={"o": make(3)[1]}).step == 3


def test_a_state_that_fits_is_saved_without_a_warning(tmp_path: Path) -> None:
    grown = Growing()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    with CheckpointManager(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.restore_or_initialize({"g": grown, "o": optimizer, "best": None, "step": 0})
        for step in (1, 2):
            grown.history.append(step)
            parameter.grad = torch.ones(2)
            optimizer.step()
            manager.save(step, {"g": grown, "o": optimizer, "best": 0.5, "step": np.int64(step)})
        manager.wait_until_finished()
    fresh = {"g": Growing(), "o": torch.optim.Adam([parameter]), "best": None, "step": 0}
    with CheckpointManager(tmp_path) as manager:
        restored = manager.restore(like=fresh).state
    assert restored["g"].history == [1, 2]
    assert restored["best"] == 0.5


def test_a_structure_that_changes_later_warns_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"w": np.zeros(2)})
        manager.save(1, {"w": np.zeros(2)})
        manager.save(2, {"w": np.zeros(2), "more": 1})
        with pytest.warns(UserWarning, match="more: the checkpoint has int") as caught:
            manager.wait_until_finished()
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(3, {"w": np.zeros(2), "more": 2})
            manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]


def test_save_and_exit_saves_a_changed_structure(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"w": np.zeros(2)})
        with pytest.warns(UserWarning, match="could never be restored"), pytest.raises(SystemExit):
            manager.save_and_exit(1, {"w": np.zeros(3)})
        assert manager.all_steps() == [1]


def test_an_unchanged_structure_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(*args: Any) -> Any:
        compared.append(args)
        return differences(*args)

    monkeypatch.setattr("perdure.state.restore_check.differences", counted)
    state = {"w": np.zeros(2)}
    check = RestoreCheck()
    check.expect(state)
    check.check_first("here", Walk(state), flatten(state))
    for _ in range(3):
        assert check.changed("here", flatten(state)) is None
    assert len(compared) == 1


def test_the_target_is_not_kept_alive(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        target = np.zeros(3)
        gone = weakref.ref(target)
        manager.restore_or_initialize({"w": target})
        del target
        gc.collect()
        assert gone() is None


def test_the_manifest_holds_the_containers_of_a_state(tmp_path: Path) -> None:
    grown = Growing()
    grown.history = [1, {"b": (2,), "a": None}]
    with Run(tmp_path, create=True) as run:
        run.save(1, snapshot({"x": np.ones(3)}))
        manifest = run.save(2, snapshot({"g": grown, "x": np.ones(3)}))
        assert run.manifest(2).containers == manifest.containers == flatten({"g": grown}).containers
        assert run.load(2).leaves.containers == manifest.containers
        assert not run.load(2, lambda path: path == "x").leaves.containers


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"tree"}'),
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"list","keys":["0","1"]}'),
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"list","factory":"int"}'),
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"list","maxlen":3}'),
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"array","arrays":"numpy"}'),
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"object"}'),
        (b'"g/history":{"kind":"list"}', b'"g/history":{"kind":"list","arrays":"os.system"}'),
        (b'"g/history":{"kind":"list"}', b'"g":{"kind":"list"}'),
        (b'"keys":["b","a"]', b'"keys":["b"]'),
        (b'"keys":["b","a"]', b'"keys":["b","b"]'),
        (b'"keys":["b","a"]', b'"keys":["b","a","c"]'),
        (b'"keys":["b","a"]', b'"keys":["b",true]'),
    ],
)
def test_containers_that_do_not_fit_are_damage(tmp_path: Path, old: bytes, new: bytes) -> None:
    grown = Growing()
    grown.history = [1, {"b": (2,), "a": None}]
    with Run(tmp_path, create=True) as run:
        run.save(2, snapshot({"g": grown}))
    name = tmp_path / manifest_name(2)
    data = name.read_bytes()
    body = b"{" + data[77:].replace(old, new, 1)
    assert body[1:] != data[77:]
    name.write_bytes(b'{"digest":"' + hash_bytes(body).encode() + b'",' + body[1:])
    with pytest.raises(CorruptionError):
        Run(tmp_path).load(2)


def test_a_compaction_keeps_the_containers(tmp_path: Path) -> None:
    grown = Growing()
    grown.history = [torch.ones(20_000)]
    with Run(tmp_path, create=True) as run:
        state = {"g": grown, "x": np.arange(2_000_000)}
        run.save(1, snapshot(state))
        kept = run.save(2, snapshot({"g": grown, "x": np.ones(1)}))
        run.damage.evacuate([pack.name for pack in kept.packs])
        assert run.manifest(2).packs != kept.packs
        assert run.manifest(2).containers == kept.containers


def test_a_target_of_many_leaves_is_compared_in_the_order_of_its_paths_and_by_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state: dict[str, Any] = {f"leaf{i}": np.zeros(2, np.float32) for i in range(50)}
    template = template_of(state)
    assert not differences(template, flatten(state))
    assert not differences(template, flatten(dict(reversed(state.items()))))
    without = {key: value for key, value in state.items() if key != "leaf7"}
    for other, found in (
        (state | {"leaf7": np.zeros(2, np.int32)}, ["leaf7"]),
        (state | {"leaf7": np.zeros((2, 1), np.float32)}, ["leaf7"]),
        (without, ["leaf7"]),
        (without | {"new": np.zeros(2, np.float32)}, ["leaf7", "new"]),
        (state | {"new": np.zeros(2, np.float32)}, ["new"]),
    ):
        lines = differences(template, flatten(other))
        assert [line.path for line in lines] == found
        assert differences(template_of(state), flatten(other)) == lines
    members = {"a": Growing(), "b": 1}
    assert not differences(template_of(members), flatten(members))
    assert not differences(template_of(state), flatten(state))


def test_a_structure_that_changes_between_saves_and_back_is_compared_each_time() -> None:
    check = RestoreCheck()
    state: dict[str, Any] = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
    check.expect(state)
    check.check_first("here", Walk(state), flatten(state))
    assert check.changed("here", flatten(state)) is None
    for other in (
        {**state, "b": np.zeros(4, np.float32)},
        {**state, "b": np.zeros(3, np.int64)},
        {"a": state["a"], "c": state["b"]},
    ):
        warning = check.changed("here", flatten(other))
        assert warning is not None
        assert "the structure of the state has changed" in warning
        assert check.changed("here", flatten(other)) is None  # once
        assert check.changed("here", flatten(state)) is None


def test_a_program_does_not_begin_with_an_abstract_array(tmp_path: Path) -> None:
    target = {"w": jax.ShapeDtypeStruct((2,), np.dtype("float32"))}
    with CheckpointManager(tmp_path, recipe={}) as manager:
        with pytest.raises(UnsupportedLeafError, match=r"w: is abstract .*fresh state"):
            manager.restore_or_initialize(target)
        manager.save(1, {"w": jnp.ones(2)})
        manager.wait_until_finished()
        state, step = manager.restore_or_initialize(target)
    assert (step, state["w"].tolist()) == (1, [1.0, 1.0])
