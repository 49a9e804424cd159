"""Arrays whose shards lie in several processes: each process writes the chunks that it is dealt.

Two-dimensional arrays play them here; `distribute/test_sharded*.py` has those of the frameworks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, ManagerOptions, load_checkpoint, verify_run
from perdure.errors import ArgumentError, CorruptionError, SaveError, StepExistsError
from perdure.state import builtin
from perdure.state.leaf_values import array_bytes
from perdure.state.per_rank import current_rank_context
from perdure.state.shards import gathers_shards, own_chunks
from perdure.store import Run
from perdure.store.format import CHUNK_BYTES
from perdure.store.leaf import Leaf
from perdure.store.pack_part import join_shards, shard_leaves
from pretend import Pretend, play


@pytest.fixture(autouse=True)
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Arrays with two axes are gathered; returns the bytes that the processes kept of each."""
    kept: list[int] = []
    real = builtin.ADAPTER.leaf

    def leaf(value: Any) -> Any:
        context = current_rank_context()
        if getattr(value, "ndim", 0) != 2 or context.count == 1 or not gathers_shards():
            return real(value)
        context.agree()
        octets = array_bytes(value)[0]
        made = own_chunks(
            value.dtype.name,
            value.shape,
            len(octets),
            lambda start, stop: memoryview(bytes(octets[start:stop])),
        )
        kept.append(sum(map(len, (made.chunks or {}).values())))
        return made

    monkeypatch.setattr(builtin.ADAPTER, "leaf", leaf)
    return kept


def state(k: int) -> dict[str, Any]:
    words = CHUNK_BYTES // 4
    return {
        "large": np.arange(k, k + 5 * words + 6, dtype=np.int32).reshape(2, -1),
        "net": {"small%": np.full((3, 4), k, np.float32), "empty": np.zeros((0, 4))},
        "shared": np.full(3, k),
    }


@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
def test_a_sharded_state_is_saved_as_a_whole_one(
    tmp_path: Path, gathered: list[int], codec: Any
) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"

    def program(processes: Pretend) -> Any:
        options = ManagerOptions(codec=codec)
        with CheckpointManager(together, processes=processes, options=options) as manager:
            manager.save(1, state(1))
            manager.save(1, state(1), force=True)  # committed already
            manager.wait_until_finished()
            processes.barrier()
            with pytest.raises(StepExistsError):
                manager.save(1, state(2), force=True)
        return None

    assert play(3, program) == [None] * 3
    with CheckpointManager(alone) as manager:
        manager.save(1, state(1))
    manifest, whole = (Run(directory).manifest(1) for directory in (together, alone))
    assert manifest.fingerprint == whole.fingerprint
    assert (manifest.stored_nbytes < whole.stored_nbytes) == (codec is not None)
    assert {pack.name.split("-")[1] for pack in manifest.packs} == {"00000", "00001", "00002"}
    assert verify_run(Run(together)).problems == ()
    restored = load_checkpoint(together)
    assert np.array_equal(restored["large"], state(1)["large"])
    assert np.array_equal(restored["net"]["small%"], state(1)["net"]["small%"])
    assert max(gathered) <= 2 * CHUNK_BYTES, "no process keeps the whole array"


def test_nothing_is_gathered_unless_all_save_the_same_step(
    tmp_path: Path, gathered: list[int]
) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            with pytest.raises(SaveError, match="process 0: 1, process 1: 2"):
                manager.save(1 + processes.index, state(1))
            kept = list(gathered)
            processes.barrier()
            manager.save(3, state(3))
            manager.wait_until_finished()
            return kept, manager.all_steps()

    assert play(2, program) == [([], [3])] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_before_the_gather_ends_the_save_in_all_at_once(
    tmp_path: Path, gathered: list[int], victim: int
) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            loss: Any = "low" if processes.index == victim else 0.5
            with pytest.raises((ArgumentError, SaveError)) as caught:
                manager.save(1, state(1), {"loss": loss})
            kept = list(gathered)
            processes.barrier()
            manager.save(2, state(2))
            manager.wait_until_finished()
            return kept, str(caught.value), manager.all_steps()

    for process, (kept, error, steps) in enumerate(play(2, program)):
        assert kept == []
        assert ("loss" in error) == (process == victim)
        assert f"process {victim}: none" in error or process == victim
        assert steps == [2]


def test_a_process_without_the_sharded_array_is_an_error_in_all(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            mine = state(1) if processes.index else {"shared": np.zeros(3)}
            with pytest.raises(SaveError, match=r"process 0: none|failed in 1 of 2 processes"):
                _ = manager.save(1, mine), manager.wait_until_finished()
            processes.barrier()
            manager.save(2, state(2))
            manager.wait_until_finished()
            return manager.all_steps()

    assert play(2, program) == [[2]] * 2


def test_a_chunk_that_no_process_has_is_named() -> None:
    chunks = {number: memoryview(b"1234") for number in (0, 2)}
    leaves = shard_leaves("net/w", Leaf("int32", (3,), memoryview(b""), True, chunks=chunks))
    with pytest.raises(CorruptionError, match=r"'net/w': no process wrote chunk 1"):
        join_shards(leaves)
