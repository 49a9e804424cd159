"""Many checkpoints: what a writer reads of them, and what it remembers and never believes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from helpers import make_leaves
from many_checkpoints import leaves_of, make_checkpoints

from perdure.checkpoint.retention import Retention, prune_after_save
from perdure.store import Leaf, LocalStorage, MemoryStorage, PruneRequest, Run, repair, verify_run
from perdure.store.directory import Directory
from perdure.store.format import manifest_name
from perdure.store.manifest_json import decode_head, encode_manifest
from perdure.store.storage import Entry
from perdure.store.view import READ_NEWEST

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))

from random_walk import walk_in_memory, walk_on_disk

MANY = READ_NEWEST + 16
PAGE = 1000


class Counting(MemoryStorage):
    """Records every request. A listing has pages, sizes and versions, as that of a bucket."""

    lists_versions = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str]] = []

    def create(self, name: str, size: int):
        self.requests.append(("write", name))
        return super().create(name, size)

    def replace(self, name: str, data: bytes) -> None:
        self.requests.append(("write", name))
        super().replace(name, data)

    def read(self, name: str) -> bytes:
        self.requests.append(("read", name))
        return super().read(name)

    def size(self, name: str) -> int:
        self.requests.append(("size", name))
        return len(self.objects[name])

    def delete(self, name: str) -> None:
        self.requests.append(("delete", name))
        super().delete(name)

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self.entries(prefix))

    def entries(self, prefix: str, after: str = "") -> Mapping[str, Entry]:
        found = {
            name: Entry(len(data), str(hash(data)))
            for name, data in self.objects.items()
            if name.startswith(prefix) and name > after
        }
        self.requests += [("list", prefix)] * max(1, -(-len(found) // PAGE))
        return found

    def taken(self) -> list[tuple[str, str]]:
        """The requests since the last call."""
        requests, self.requests = self.requests, []
        return requests


def manifests_read(storage: Counting) -> set[str]:
    return {n for verb, n in storage.taken() if verb == "read" and n.startswith("checkpoints/")}


@pytest.fixture
def summaries_taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A writer decodes the newest manifest only; counts those of which it takes a summary."""
    seen: Counter[str] = Counter()

    def counted(data: bytes, where: str, step: int):
        seen["taken"] += 1
        return decode_head(data, where, step)

    monkeypatch.setattr("perdure.store.view.READ_NEWEST", 1)
    monkeypatch.setattr("perdure.store.view.decode_head", counted)
    return seen


def test_a_first_save_reads_the_newest_manifests_and_shares_their_chunks() -> None:
    storage = Counting()
    make_checkpoints(storage, MANY)
    with Run(storage) as run:
        storage.taken()
        manifest = run.save(MANY + 1, leaves_of(MANY - 5))
        assert len(manifests_read(storage)) == READ_NEWEST
        assert [pack.name[:12] for pack in manifest.packs] == [f"{MANY - 5:012d}"], "written again"
        manifest = run.save(MANY + 2, leaves_of(5))
        assert [pack.name[:12] for pack in manifest.packs] == [f"{MANY + 2:012d}"]
    assert verify_run(Run(storage)).ok


def test_the_first_prune_in_a_bucket_reads_each_manifest_once_and_the_next_none() -> None:
    storage = Counting()
    make_checkpoints(storage, 1000)
    with Run(storage) as run:
        storage.taken()
        run.save(1001, leaves_of(1001))
        prune_after_save(run, 1000, Retention(), 1001, None)
        read = [name for verb, name in storage.taken() if verb == "read"]
        # The second look compares the heads of those that the first one has read.
        assert len(read) < 1000 + READ_NEWEST + 10, "one manifest was read twice"
        for step in (1002, 1003):
            run.save(step, leaves_of(step))
            prune_after_save(run, 1000, Retention(), step, None)
        run.save(1004, leaves_of(1004))
        storage.taken()
        prune_after_save(run, 1000, Retention(), 1004, None)
        assert len(storage.taken()) < 10
    assert run.steps() == [*range(5, 1005)]
    assert verify_run(run).ok


def test_the_newest_step_believes_no_name() -> None:
    storage = Counting()
    make_checkpoints(storage, 60)
    run = Run(storage)
    assert run.newest_step() == 60 == run.steps()[-1]
    for gone in range(50, 61):
        storage.objects.pop(manifest_name(gone))
    storage.objects["checkpoints/not-a-step"] = b""
    assert run.newest_step() == 49
    for name in storage.list("checkpoints/"):
        storage.objects.pop(name)
    assert run.newest_step() is None


@pytest.mark.parametrize("kept", [100, 1000])
@pytest.mark.parametrize("keep", [None, 3])
def test_requests_of_a_save_and_its_prune_do_not_grow_with_what_is_kept(
    kept: int, keep: int | None
) -> None:
    storage = Counting()
    make_checkpoints(storage, kept)
    with Run(storage) as run:
        for step in range(kept + 1, kept + 10):
            storage.taken()
            run.save(step, {**leaves_of(step), "frozen": leaves_of(1)["w0"]})
            if keep is not None:
                prune_after_save(run, kept + keep, Retention(), step, None)
            requests = storage.taken()
            # The first save reads what is there. The first prune that deletes compares it.
            if step > kept + 5:
                assert [verb for verb, _ in requests].count("write") == 2, requests
                assert len(requests) <= 1 + 10, requests
                deleted = [name for verb, name in requests if verb == "delete"]
                assert len(deleted) == (0 if keep is None else 2)
    assert run.newest_step() == kept + 9


def test_a_process_beside_the_writer_asks_for_all_packs_at_once() -> None:
    storage = Counting()
    make_checkpoints(storage, 20)
    beside = Directory(storage)
    for _ in range(2):  # the second look learns the versions of what the first one has read
        assert len(beside.stored_chunks(fresh=True)) > 20
    with Run(storage) as run:
        run.save(21, leaves_of(21))
    storage.taken()
    places = beside.stored_chunks(fresh=True)
    assert {place.pack[:12] for place in places.values()} >= {f"{step:012d}" for step in (1, 21)}
    requests = Counter(verb for verb, _ in storage.taken())
    assert requests["size"] == 0, requests
    assert requests["read"] < 8, "the new manifest and the lines of the log"


def test_control_a_prune_that_believes_what_it_remembers_deletes_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_whole_after_a_prune() -> bool:
        storage = MemoryStorage()
        make_checkpoints(storage, MANY)
        with Run(storage) as run:
            run.save(MANY + 1, leaves_of(MANY + 1))
            run.contents(whole=False)
            # Now step 10 reads from the pack of step 1, which goes.
            other = msgspec.structs.replace(run.manifest(1), step=10)
            storage.objects[manifest_name(10)] = encode_manifest(other)
            prune_after_save(run, MANY, Retention(), MANY + 1, None)
            assert run.steps() == [*range(2, MANY + 2)]
        return verify_run(Run(storage)).ok

    assert is_whole_after_a_prune()
    monkeypatch.setattr("perdure.store.view.is_same_file", lambda *_: True)
    assert not is_whole_after_a_prune()


def test_a_remembered_manifest_that_cannot_be_read_holds_a_prune_back(tmp_path: Path) -> None:
    class Unreadable(LocalStorage):
        broken = ""
        fired = 0

        def read_into(self, name: str, offset: int, target: memoryview) -> int:
            if name == self.broken:
                self.fired += 1
                raise OSError(5, "Input/output error", name)
            return super().read_into(name, offset, target)

    storage = Unreadable(tmp_path)
    with Run(storage, create=True) as run:
        shared: dict[str, Leaf] = leaves_of(1)
        for step in (1, 2, 3):
            run.save(step, {**shared, f"own{step}": leaves_of(step + 10)["w0"]})
        storage.broken = manifest_name(2)
        plan = run.plan(PruneRequest(frozenset({1}), orphans_to=3, compact_from=0, everywhere=True))
        assert storage.fired
        assert "cannot be read now and may need any pack" in str(plan.held_back)
        assert plan.packs == plan.orphans == plan.compact == ()
        storage.broken = ""
        assert run.plan(PruneRequest(frozenset({1}))).held_back is None


def test_a_manifest_that_rotted_after_a_look_is_found(summaries_taken: Counter[str]) -> None:
    """Its digest still agrees, so only a read shows it: of a repair, or of a plan that needs it."""
    storage = MemoryStorage()
    shared = {f"frozen{number}": leaves_of(0)[f"w{number}"] for number in range(3)}
    with Run(storage, create=True) as run:
        run.save(1, {**shared, "bulk": make_leaves(1, (5 * 10**6,))["model/layer0"]})
        for step in range(2, 9):
            run.save(step, {**shared, **leaves_of(step)})
    before = dict(storage.objects)

    def rot() -> None:
        data = storage.objects[manifest_name(3)]
        storage.objects[manifest_name(3)] = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

    with Run(storage) as run:
        # Step 1 goes, so the pack of the shared chunks would be compacted, and all manifests rewritten.
        run.save(9, {**shared, **leaves_of(9)})
        run.contents(whole=False)
        rot()
        notes = prune_after_save(run, 8, Retention(), 9, None)
        assert run.steps() == [*range(1, 10)], "a checkpoint that cannot be read was counted"
        assert any("the manifest of step 3 cannot be read" in note for note in notes), notes
        assert verify_run(run).good == (1, 2, *range(4, 10))
    storage.objects = dict(before)
    rot()
    with Run(storage) as run:  # as `perdure prune` does it, which tells of the damage and goes on
        plan = run.plan(PruneRequest(frozenset({1}), orphans_to=9, compact_from=0, everywhere=True))
        assert "the manifest of step 3 cannot be read" in str(plan.held_back)
        run.execute(plan)
        assert run.delete([2]) == [2]
        assert verify_run(run).good == (*range(4, 9),)
    storage.objects = before
    rot()
    with Run(storage) as run:
        run.save(9, {**shared, **leaves_of(9)})
        assert 3 not in repair(run).report.good
        assert verify_run(run).good == (1, 2, *range(4, 10))
    assert summaries_taken["taken"]


def test_random_walks_of_which_one_manifest_is_decoded_lose_nothing(
    summaries_taken: Counter[str],
) -> None:
    for seed in range(5000, 5008):  # `make proof-store` has 200
        walk_in_memory(seed)
    walk_on_disk(5000)
    assert summaries_taken["taken"] > 2
