"""PyTorch's distributed checkpoint on run directories: exact resume, ranks, damage, refusals."""

# DCP does not list its public names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import perdure
import perdure.plugins.dcp
from damage import flip
from forked import events, run_forked
from perdure.errors import (
    ArgumentError,
    MismatchError,
    MissingExtraError,
    NotARunError,
    StateError,
)
from perdure.plugins.trainer_library import require_version
from perdure.runtime import heartbeats
from perdure.store import Run

WORKER = Path(__file__).with_name("dcp_worker.py")


@pytest.fixture(autouse=True)
def no_warning_without_a_group() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def work(action: str, directory: Path, ranks: int = 1) -> list[tuple[int, Any]]:
    """Exit status and answer of each rank."""
    words = [[action, str(directory), str(rank), str(ranks)] for rank in range(ranks)]
    ended = run_forked("torch", WORKER, words, [dict(os.environ)] * ranks)
    assert all(status in (0, -signal.SIGKILL) for status, _, _ in ended), ended
    return [(status, events(out)[-1] if events(out) else None) for status, out, _ in ended]


def save(directory: Path, step: int, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=perdure.plugins.dcp.Writer(directory, step, **options))


def load(directory: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=perdure.plugins.dcp.Reader(directory, **options))
    return state


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    [(_, whole)] = work("train", tmp_path / "whole")
    assert work("killed", tmp_path / "killed") == [(-signal.SIGKILL, None)]
    [(_, resumed)] = work("train", tmp_path / "killed")
    assert (whole["start"], resumed["start"]) == (0, 3)
    assert resumed["model"] == whole["model"]
    # DCP's own storage does not have the random generators, from which dropout draws.
    assert work("own-killed", tmp_path / "own") == [(-signal.SIGKILL, None)]
    [(_, own)] = work("own", tmp_path / "own")
    assert own["start"] == 3
    assert own["model"] != whole["model"]


def test_saves_and_loads_report_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[tuple[str, int | None]] = []
    monkeypatch.setattr(heartbeats, "listeners", [lambda *beat: beats.append(beat)])
    save(tmp_path / "run", 7, {"x": torch.ones(2)})
    assert beats == [("step", 7)]
    load(tmp_path / "run", {"x": torch.zeros(2)})
    assert beats[1:] == [("restore", None), ("compile", 7)]


def test_two_ranks_save_shards_that_other_layouts_load(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = [answer for _, answer in work("save", run, ranks=2)]
    loaded = [answer for _, answer in work("load", run, ranks=2)]
    assert all(answer["equal"] and answer["plain"] == [3, 3] for answer in loaded)
    # Each rank has its own random numbers again, and they differ.
    assert [answer["draw"] for answer in loaded] == [answer["draw"] for answer in saved]
    assert loaded[0]["draw"] != loaded[1]["draw"]
    # Ranks that save different steps commit none of them, and write nothing.
    assert all("found rank 0: 6, rank 1: 7. Nothing" in answer["steps"] for answer in saved)
    named = {pack.name for pack in Run(run).manifest(5).packs}
    assert {path.name for path in (run / "packs").iterdir()} == named
    # The retention of the second save has deleted the first.
    assert Run(run).steps() == [5]
    assert perdure.verify_run(Run(run)).ok
    paths = {leaf.path: leaf.shape for leaf in Run(run).manifest(5).leaves}
    assert paths["model/rows/[0:3,0:4]"] == (3, 4)
    assert paths["model/rows/[3:5,0:4]"] == (2, 4)
    assert paths["model/same"] == (5, 4)
    assert paths["model/one"] == (1,)
    with pytest.warns(UserWarning, match="saved by 2 processes"):  # this process is alone
        alone = load(run, {"model": {"rows": torch.zeros(5, 4)}, "step": 0})
    assert torch.equal(alone["model"]["rows"], torch.arange(20.0).reshape(5, 4))
    assert alone["step"] == 4
    like = {"model": {"rows": torch.zeros(5, 4)}}
    with perdure.CheckpointManager(run) as manager, pytest.raises(MismatchError) as caught:
        manager.restore(like=like, leaves="model/rows")
    assert "was saved by perdure.plugins.dcp.Writer" in str(caught.value)
    assert "perdure.plugins.dcp.Reader" in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_the_ranks_of_a_machine_one_reads_each_chunk(tmp_path: Path, ranks: int) -> None:
    save(tmp_path / "run", 1, {"x": torch.arange(3 * 2**20, dtype=torch.int32)})
    loaded = [answer for _, answer in work("large", tmp_path / "run", ranks=ranks)]
    assert all(answer["equal"] for answer in loaded)
    assert sum(answer["read"] for answer in loaded) == 3, "12 MiB, in chunks of 4 MiB"


def test_steps_are_compared_at_the_end_where_plans_may_be_those_of_an_earlier_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavePlanner, "_cached_all_plans", {"planner": []}, raising=False)
    writer = perdure.plugins.dcp.Writer(tmp_path, 2)
    plans = [SavePlan([], storage_data=step) for step in (1, 2)]
    assert writer.prepare_global_plan(plans) == plans
    results = [[WriteResult(MetadataIndex(step), 0, None)] for step in ("2", "3")]
    with pytest.raises(StateError, match="rank 0: 2, rank 1: 3"):
        writer.finish(Metadata({}), results)
    assert Run(tmp_path).steps() == []


def test_manager_and_dcp_read_each_other(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save(tmp_path / "dcp", 1, {"model": model.state_dict(), "note": "x"})
    read = perdure.load_checkpoint(tmp_path / "dcp")
    assert read["note"] == "x"
    assert torch.equal(torch.from_numpy(read["model"]["weight"].copy()), model.weight)
    other = torch.nn.Linear(3, 2)
    with perdure.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(7, {"model": model})
    weights = {"model": other.state_dict()}
    load(tmp_path / "manager", weights)
    assert torch.equal(other.weight, model.weight)
    third = torch.nn.Linear(3, 2)
    with perdure.CheckpointManager(tmp_path / "dcp") as manager:
        manager.restore(1, {"model": third}, leaves="model")
    assert torch.equal(third.weight, model.weight)


def test_a_writer_without_retention_keeps_what_the_manager_kept(tmp_path: Path) -> None:
    options = perdure.ManagerOptions(retention=perdure.Retention(best_metric="acc"))
    with perdure.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, {"w": torch.ones(2)}, {"acc": 1.0})
    for step, rules, left in ((2, None, [1, 2]), (3, None, [1, 3]), (4, perdure.Retention(), [4])):
        save(tmp_path, step, {"w": torch.ones(2) * step}, max_to_keep=1, retention=rules)
        assert Run(tmp_path).steps() == left


def test_objects_of_every_kind_come_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "int": 3,
        "float": 0.1,
        "none": None,
        "bytes": b"\x00",
        "bool": True,
        "set": {1, "a"},
        "list": [1, 2.5],
        "with.dot/slash": torch.ones(()),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    save(tmp_path, 1, values)
    targets = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for name, value in values.items()
    }
    load(tmp_path, targets)
    tensors = {name for name, value in values.items() if isinstance(value, torch.Tensor)}
    for name in tensors:
        assert torch.equal(torch.as_tensor(targets[name]), values[name])
    assert {name: targets[name] for name in values.keys() - tensors} == {
        name: values[name] for name in values.keys() - tensors
    }
    records = {leaf.path: leaf.dtype for leaf in Run(tmp_path).manifest(1).leaves}
    assert records["float"] == "py:float"
    assert records["set"] == "uint8"


def test_async_save_stores_the_state_of_its_call(tmp_path: Path) -> None:
    value = torch.ones(4)
    torch.manual_seed(5)
    done = dcp.async_save({"x": value}, storage_writer=perdure.plugins.dcp.Writer(tmp_path, 1))
    value.zero_()
    expected = torch.rand(1)
    done.result()  # type: ignore[union-attr]
    loaded = load(tmp_path, {"x": torch.zeros(4)})
    assert loaded["x"].tolist() == [1, 1, 1, 1]
    assert torch.equal(torch.rand(1), expected)


def test_damage_is_never_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1, {"x": torch.zeros(4)}, save_random_state=False)
    save(tmp_path, 2, {"x": torch.arange(4.0)}, save_random_state=False)
    [pack] = (tmp_path / "packs").glob("000000000002-*.pack")
    flip(pack, 0)
    target = torch.full((4,), 7.0)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"x": target})
    assert "Nothing of it was loaded; load an older one (1)" in str(caught.value)
    assert target.tolist() == [7, 7, 7, 7]
    assert load(tmp_path, {"x": target}, step=1)["x"].tolist() == [0, 0, 0, 0]
    manifest = tmp_path / "checkpoints" / "000000000002.json"
    manifest.chmod(0o600)
    manifest.write_bytes(b"{}")
    with pytest.warns(UserWarning, match="step 2 is damaged"):
        load(tmp_path, {"x": target})


def test_damaged_generators_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"x": torch.full((4,), float(step))})
    [pack] = (tmp_path / "packs").glob("000000000002-*.pack")
    flip(pack, pack.read_bytes().index(b"MT19937"))
    target = torch.full((4,), 7.0)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"x": target})
    assert "Nothing of it was loaded; load an older one (1)" in str(caught.value)
    assert target.tolist() == [7, 7, 7, 7]
    assert load(tmp_path, {"x": target}, save_random_state=False)["x"].tolist() == [2, 2, 2, 2]


def test_a_tensor_is_not_converted_in_silence(tmp_path: Path) -> None:
    state = {"x": torch.tensor([0.1, 1e-30])}
    save(tmp_path / "run", 1, state)
    target = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "run", target)
    assert "expected bfloat16[2], found float32[2]" in str(caught.value)
    dcp.save(state, checkpoint_id=tmp_path / "own")
    dcp.load(target, checkpoint_id=tmp_path / "own")  # DCP's own storage rounds
    assert target["x"][0] != state["x"][0]


def test_refusals_name_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, 5, {"x": torch.zeros(1)})
    save(tmp_path, 5, {"x": torch.zeros(1)})  # the same bits
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, 4, {"x": torch.zeros(1)})
    assert "the newest checkpoint is step 5" in str(caught.value)
    writer = perdure.plugins.dcp.Writer(tmp_path, 6)
    with pytest.raises(ArgumentError) as refused:
        dcp.save({"x": torch.zeros(1)}, storage_writer=writer, checkpoint_id="a")
    assert "named by its step" in str(refused.value)
    with pytest.raises(ArgumentError) as refused:
        dcp.save({"x": torch.zeros(1)}, storage_writer=writer, use_collectives=False)
    assert "use_collectives" in str(refused.value)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.zeros(1).to_sparse()}, storage_writer=writer)
    assert "expected a dense one" in str(caught.value)
    dcp.save({"x": torch.zeros(1)}, storage_writer=writer)  # it may try again
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, 7, {"x": torch.zeros(1).to_sparse()})
    del caught
    gc.collect()
    save(tmp_path, 7, {"x": torch.zeros(1)})  # the failed save has not kept the lock
    with pytest.raises(NotARunError):
        load(tmp_path / "none", {"x": torch.zeros(1)})


def test_another_writer_and_another_checkpoint_in_a_rank(tmp_path: Path) -> None:
    save(tmp_path, 1, {"x": torch.zeros(1)})
    save(tmp_path, 2, {"x": torch.ones(1)})
    with Run(tmp_path) as run:
        run.begin_writing()
        with pytest.raises(CheckpointException) as caught:
            save(tmp_path, 3, {"x": torch.zeros(1)})
    assert "LockedError" in str(caught.value)
    plans = []
    for step in (1, 2):
        reader = perdure.plugins.dcp.Reader(tmp_path, step)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    with pytest.raises(perdure.errors.StateError) as differing:
        reader.prepare_global_plan(plans)
    assert "rank 0: 1, rank 1: 2" in str(differing.value)


def test_an_unsupported_release_is_one_error() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require_version("torch", "torch", "99", "100")
    assert "expected torch from release 99 on and below 100" in str(caught.value)
    with pytest.raises(MissingExtraError) as caught:
        require_version("torch", "no-such-package", "1", "2")
    assert "pip install 'perdure[torch]'" in str(caught.value)
