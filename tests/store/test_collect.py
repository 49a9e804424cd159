"""Compaction and orphans: what is moved, what is deleted, and what readers see meanwhile."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from helpers import Operations, contents, local_leaves, make_leaves, run_on, sharing_states

from damage import flip
from perdure.checkpoint.restorer import load_good
from perdure.errors import CorruptionError, PruneError, StoreError
from perdure.store import (
    Leaf,
    LocalStorage,
    MemoryStorage,
    PruneRequest,
    Run,
    compact,
    garbage_collection,
    verify_run,
)
from perdure.store.format import MAX_STEP, manifest_name

EVERYTHING = PruneRequest(orphans_to=MAX_STEP, compact_from=0, everywhere=True)


def leaf(seed: int, size: int) -> Leaf:
    return make_leaves(seed, (size,))["model/layer0"]


def filled(place: Path | MemoryStorage) -> Run:
    run = run_on(place)
    for step, leaves in sharing_states().items():
        run.save(step, leaves, metrics={"loss": step / 2})
    return run


def prune(steps: set[int]) -> PruneRequest:
    return PruneRequest(frozenset(steps), MAX_STEP, 0, everywhere=True)


def test_a_pack_that_is_mostly_dead_is_compacted(place: Path | MemoryStorage) -> None:
    with filled(place) as run:
        before = {step: run.manifest(step) for step in (2, 3, 4)}
        held = run.contents()
        plan = run.plan(prune({1}))
        assert plan.steps == (1,)
        assert plan.compact == (before[2].packs[0].name,)
        assert plan.rewrite == (2, 3, 4)
        again = run.contents()
        assert (again.manifests, again.packs) == (held.manifests, held.packs), "nothing was changed"
        run.execute(plan)
        after = run.contents()
        assert sum(held.packs.values()) - sum(after.packs.values()) == plan.freed > 45_000
        assert verify_run(run).problems == ()
        for step in (2, 3, 4):
            assert contents(run.load(step).leaves) == contents(sharing_states()[step])
            renewed = run.manifest(step)
            assert renewed.fingerprint == before[step].fingerprint
            assert renewed.created == before[step].created
            assert renewed.metrics == {"loss": step / 2}
            assert renewed != before[step]
        assert run.plan(EVERYTHING).empty, "what was compacted is not compacted again"
        run.save(5, sharing_states()[2])
        assert run.contents().packs == after.packs, "moved chunks are found by deduplication"


def test_a_pack_that_is_mostly_alive_stays(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, {"a": leaf(1, 6000), "b": leaf(2, 5000)})
        run.save(2, {"a": leaf(1, 6000)})
        plan = run.plan(prune({1}))
        assert (plan.steps, plan.compact, plan.packs) == ((1,), (), ())
        assert (
            run.plan(PruneRequest(frozenset({1}), compact_from=10**6, everywhere=True)).compact
            == ()
        )


def test_a_pack_too_small_to_be_compacted_costs_no_look_at_every_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf that never changes keeps a small pack in use, which each prune would look into."""
    looks: list[Collection[str]] = []

    def watched(manifests: Any, packs: Collection[str]) -> Any:
        looks.append(packs)
        return compact.live_chunks(manifests, packs)

    monkeypatch.setattr(garbage_collection, "live_chunks", watched)
    with filled(tmp_path) as run:
        (size,) = {run.contents().packs[pack.name] for pack in run.manifest(1).packs}
        for least, looked in ((size + 1, 0), (size, 1)):
            run.plan(PruneRequest(frozenset({1}), compact_from=least))
            assert len(looks) == looked


def test_a_chunk_that_is_damaged_is_not_moved_and_its_pack_stays(tmp_path: Path) -> None:
    filled(tmp_path).close()
    pack = sorted((tmp_path / "packs").iterdir())[0]
    flip(pack, 5)
    held = pack.read_bytes()
    with run_on(tmp_path) as run:
        left = run.execute(run.plan(prune({1}))).left
        assert list(left) == [pack.name]
        assert "at offset 0: expected hash" in left[pack.name]
        assert pack.read_bytes() == held
        assert verify_run(run).bad == (2, 3, 4)


def test_a_compaction_that_does_not_fit_on_the_disk_is_put_off(
    place: Path | MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(place) as run:
        plan = run.plan(prune({1}))
        monkeypatch.setattr(run.storage, "free_bytes", lambda: plan.copied)
        left = run.execute(plan).left
        assert tuple(left) == plan.compact
        assert f"to copy what is alive, {plan.copied} are free" in left[plan.compact[0]]
        assert run.steps() == [2, 3, 4], "steps that need no free space are deleted"
        assert verify_run(run).problems == ()
        monkeypatch.undo()
        assert run.execute(run.plan(EVERYTHING)).left == {}
        assert run.plan(EVERYTHING).empty


def test_a_pack_that_quarantine_needs_is_neither_moved_nor_deleted(tmp_path: Path) -> None:
    with filled(tmp_path) as run:
        run.quarantine(1, "looked at by hand")
        assert run.plan(EVERYTHING).empty
        run.execute(run.plan(prune({2, 3, 4})))
        assert len(run.contents().packs) == 1


def test_orphans_go_only_when_every_manifest_is_readable(tmp_path: Path) -> None:
    with filled(tmp_path) as run:
        run.storage.delete(manifest_name(3))
        run.storage.delete(manifest_name(4))
        assert len(run.plan(PruneRequest(orphans_to=3)).orphans) == 1, (
            "the disk counts, not the memory"
        )
    with run_on(tmp_path) as run:
        assert len(run.plan(PruneRequest(orphans_to=3)).orphans) == 1
        assert len(run.plan(PruneRequest(orphans_to=4)).orphans) == 2
    manifest = tmp_path / manifest_name(2)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with run_on(tmp_path) as run:
        plan = run.plan(EVERYTHING)
        assert plan.empty
        assert plan.held_back is not None
        assert "step 2 cannot be read and may need any pack" in plan.held_back
        run.quarantine(2, "cut short")
        plan = run.plan(EVERYTHING)
        assert plan.empty
        assert "quarantine/000000000002-0.json cannot be read" in str(plan.held_back)


def test_an_outdated_plan_is_refused(tmp_path: Path) -> None:
    plan = filled(tmp_path).plan(prune({1}))
    with run_on(tmp_path) as run:
        run.save(7, make_leaves(7))
        held = run.contents()
        run.save(8, sharing_states()[1])
        with pytest.raises(StoreError, match="changed since the plan was made; nothing was del"):
            run.execute(plan)
        assert run.steps() == [1, 2, 3, 4, 7, 8]
        assert held.packs.keys() <= run.contents().packs.keys()


def test_a_prune_that_fails_in_the_middle_raises_and_can_be_repeated(tmp_path: Path) -> None:
    filled(tmp_path).close()
    broken = Operations(
        fail=lambda _, op, path: (
            OSError(5, "Input/output error") if op == "rename" and "0003.json" in path else None
        )
    )
    with (
        run_on(tmp_path, broken) as run,
        pytest.raises(PruneError, match=r"stopped in the middle: .*Every checkpoint that stays"),
    ):
        run.execute(run.plan(prune({1})))
    assert broken.fired
    with run_on(tmp_path) as run:
        assert verify_run(run).good == (2, 3, 4)
        run.execute(run.plan(EVERYTHING))
        assert verify_run(run).problems == ()
        assert run.plan(EVERYTHING).empty


class Interrupted(LocalStorage):
    """Calls a function after a manifest was read and before its chunks are."""

    def __init__(self, root: Path, happens) -> None:
        super().__init__(root)
        self.happens = happens

    def read(self, name: str) -> bytes:
        data = super().read(name)
        if name.startswith("checkpoints/") and self.happens:
            self.happens.pop(0)()
        return data


def test_a_reader_with_a_replaced_manifest_reads_the_new_one(tmp_path: Path) -> None:
    filled(tmp_path).close()

    def compact() -> None:
        with run_on(tmp_path) as run:
            run.execute(run.plan(prune({1})))

    happens = [compact]
    reader = Run(Interrupted(tmp_path, happens))
    assert contents(reader.load(3).leaves) == contents(sharing_states()[3])
    assert not happens, "the prune came in between"


def test_a_reader_whose_checkpoints_were_all_deleted_reads_the_new_one(tmp_path: Path) -> None:
    filled(tmp_path).close()

    def go_on() -> None:
        with run_on(tmp_path) as run:
            run.save(5, make_leaves(5))
            run.execute(run.plan(prune({1, 2, 3, 4})))

    happens = [go_on]
    loaded = load_good(Run(Interrupted(tmp_path, happens))).loaded
    assert not happens
    assert loaded is not None
    assert (loaded.manifest.step, loaded.skipped) == (5, ())


def test_a_reader_of_a_missing_pack_raises(tmp_path: Path) -> None:
    filled(tmp_path).close()
    sorted((tmp_path / "packs").iterdir())[0].unlink()
    with pytest.raises(CorruptionError, match="expected a pack, found no such file"):
        Run(tmp_path).load(3)


def test_a_writer_that_reopens_reads_the_manifests_again(tmp_path: Path) -> None:
    run = filled(tmp_path)
    run.close()
    with run_on(tmp_path) as other:
        other.execute(other.plan(prune({1, 2, 3, 4})))
    run.save(6, sharing_states()[1])
    assert verify_run(run).problems == ()
    run.close()


def test_local_leaves_are_moved_and_kept_like_all_others(place: Path | MemoryStorage) -> None:
    states, local = sharing_states(), local_leaves(1)
    base = {"base": states[1]["base"]}
    with run_on(place) as run:
        run.save(1, states[1], process_leaves=local)
        # Every chunk is found, so it reads from the first pack.
        run.save(2, base, process_leaves=local)
        before = run.manifest(2)
        run.execute(run.plan(prune({1})))
        after = run.manifest(2)
        assert after.packs != before.packs
        assert after.fingerprint == before.fingerprint
        loaded = run.load(2)
        assert contents(loaded.leaves) == contents(base)
        assert contents(dict(loaded.process_leaves)) == contents(local)
        assert verify_run(run).problems == ()
        assert after.stored_nbytes == 2000 + 2 * 500
        run.save(3, base, process_leaves=local_leaves(2))
        run.execute(run.plan(prune({2})))
        assert contents(dict(run.load(3).process_leaves)) == contents(local_leaves(2))
        assert verify_run(run).problems == ()
