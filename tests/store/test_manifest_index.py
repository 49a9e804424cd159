"""Many checkpoints: what a writer reads of them, and an index that is missing, stale or wrong."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from helpers import Crash, Operations, contents, make_leaves, run_on
from many_checkpoints import leaves_of, make_checkpoints

from perdure.checkpoint.retention import Retention, prune_after_save
from perdure.store import Leaf, LocalStorage, MemoryStorage, PruneRequest, Run, repair, verify_run
from perdure.store.directory import Directory
from perdure.store.format import manifest_name
from perdure.store.manifest_index import INDEX_FROM, ManifestIndex, ManifestSummary
from perdure.store.storage import Entry
from perdure.store.view import READ_NEWEST

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))

from random_walk import walk_in_memory, walk_on_disk

MANY = INDEX_FROM + 16
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


def indexed(storage: MemoryStorage | LocalStorage, count: int = MANY) -> None:
    """A run of `count` checkpoints and an index of them."""
    make_checkpoints(storage, count)
    with Run(storage) as run:
        run.save(count + 1, leaves_of(count + 1))
    assert list(storage.list("index/"))


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """An index is written from 2 checkpoints on, and used for all but the newest. Counts both."""
    seen: Counter[str] = Counter()
    write, rows = ManifestIndex.write, vars(ManifestIndex)["rows"]

    def counted_write(index: ManifestIndex, *arguments: Any) -> None:
        write(index, *arguments)
        seen["written"] += 1

    def counted_rows(index: ManifestIndex) -> dict[int, ManifestSummary]:
        seen["used"] += bool(found := rows.func(index))
        return found

    counted = cached_property(counted_rows)
    counted.__set_name__(ManifestIndex, "rows")
    monkeypatch.setattr("perdure.store.view.INDEX_FROM", 2)
    monkeypatch.setattr("perdure.store.view.READ_NEWEST", 1)
    monkeypatch.setattr(ManifestIndex, "write", counted_write)
    monkeypatch.setattr(ManifestIndex, "rows", counted)
    return seen


def test_a_first_save_reads_the_newest_manifests_and_those_with_its_chunks() -> None:
    storage = Counting()
    indexed(storage)
    with Run(storage) as run:
        storage.taken()
        run.save(MANY + 2, leaves_of(MANY + 2))
        assert len(manifests_read(storage)) == READ_NEWEST
    with Run(storage) as run:
        storage.taken()
        manifest = run.save(MANY + 3, leaves_of(5))
        assert manifest_name(5) in manifests_read(storage)
        assert [pack.name[:12] for pack in manifest.packs] == ["000000000005"], "written again"
    assert verify_run(Run(storage)).ok


def test_a_first_save_and_prune_in_a_bucket_ask_only_for_what_is_new() -> None:
    storage = Counting()
    indexed(storage, 1000)
    with Run(storage) as run:
        storage.taken()
        run.save(1002, leaves_of(1002))
        prune_after_save(run, 1000, Retention(), 1002, None)
        requests = storage.taken()
    assert len(requests) < 50, Counter(requests)
    assert run.steps() == [*range(3, 1003)]
    assert verify_run(run).ok


def test_the_newest_step_in_a_bucket_takes_two_requests_and_believes_no_name() -> None:
    storage = Counting()
    indexed(storage, 3 * PAGE)
    run = Run(storage)
    newest = 3 * PAGE + 1
    for step in (newest, newest + 1):  # saved by a perdure that knows no index
        storage.taken()
        assert run.newest_step() == step == run.steps()[-1]
        if step == newest:
            storage.objects[manifest_name(step + 1)] = storage.objects[manifest_name(step)]
    storage.taken()
    run.newest_step()
    assert len(storage.taken()) == 2
    for gone in range(50, newest + 2):
        storage.objects.pop(manifest_name(gone))
    assert run.newest_step() == 49
    storage.objects["checkpoints/not-a-step"] = b""
    assert run.newest_step() == 49
    storage.objects["index/000000000009-abc"] = b""
    assert run.newest_step() == 49
    for name in storage.list("checkpoints/"):
        storage.objects.pop(name)
    assert run.newest_step() is None


def test_control_without_the_index_all_manifests_are_read() -> None:
    storage = Counting()
    indexed(storage)
    for name in [*storage.list("index/")]:
        storage.delete(name)
    with Run(storage) as run:
        storage.taken()
        manifest = run.save(MANY + 2, leaves_of(5))
        assert len(manifests_read(storage)) == MANY + 1
        assert [pack.name[:12] for pack in manifest.packs] == ["000000000005"]
    assert list(storage.list("index/")), "it is written again"


def test_few_checkpoints_have_no_index(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        for step in range(8):
            run.save(step, make_leaves(step))
    assert not (tmp_path / "index").exists()


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


WRONG = ("missing", "empty", "cut short", "a flipped bit", "noise", "of another run")


def wrong_index(how: str, data: bytes, other: bytes) -> bytes | None:
    """What lies there in place of `data`; `other` is the index of another run."""
    if how == "cut short":
        return data[: len(data) // 2]
    if how == "a flipped bit":
        return data[:-200] + bytes([data[-200] ^ 4]) + data[-199:]
    return {"missing": None, "empty": b"", "noise": bytes(range(256)) * 8}.get(how, other)


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_index_costs_time_and_no_data(how: str) -> None:
    storage, other = Counting(), MemoryStorage()
    indexed(storage)
    # The same steps with other bits, all in one pack that nobody else has.
    with Run(other, create=True) as run:
        for step in range(1, MANY + 1):
            run.save(step, {"x": leaves_of(1000 + step)["w0"]}, metrics={"loss": float(step)})
    (name,) = storage.list("index/")
    (foreign,) = other.list("index/")
    wrong = wrong_index(how, storage.objects[name], other.objects[foreign])
    storage.objects.pop(name)
    if wrong is not None:
        storage.objects[name] = wrong
    with Run(storage) as run:
        run.save(MANY + 2, leaves_of(7))
        prune_after_save(run, 10, Retention(keep_period=20), MANY + 2, None)
        stay = [20, 40, 60, *range(MANY - 7, MANY + 3)]
        assert run.steps() == sorted({*stay, 80})
        assert verify_run(run).ok
    for step in run.steps():
        state = leaves_of(7 if step == MANY + 2 else step)
        assert contents(Run(storage).load(step).leaves) == contents(state)


def test_control_a_prune_that_believes_the_index_deletes_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    indexed(storage)
    (name,) = storage.list("index/")
    with Run(storage) as run:
        wrong = dict(run.contents().summaries)
    wrong[50] = wrong[51]  # so the pack of step 50 seems to be a leftover
    storage.objects[name] = index_of(wrong)
    before = dict(storage.objects)

    def is_whole_after_a_prune() -> bool:
        with Run(storage) as run:
            run.save(MANY + 2, leaves_of(MANY + 2))
            prune_after_save(run, MANY, Retention(), MANY + 2, None)
            assert run.steps() == [*range(3, MANY + 3)]
        return verify_run(Run(storage)).ok

    assert is_whole_after_a_prune()
    storage.objects = before
    monkeypatch.setattr("perdure.store.view.is_same_file", lambda *_: True)
    assert not is_whole_after_a_prune()


def index_of(summaries) -> bytes:
    from perdure.store.manifest_index import _encode

    return _encode(summaries, dict.fromkeys(summaries), None)


@pytest.mark.parametrize("what", ["a file", "a dangling link", "left half written"])
def test_what_lies_in_the_place_of_the_index_stops_no_save(
    tmp_path: Path, small_index: Counter[str], what: str
) -> None:
    index = tmp_path / "index"
    with run_on(tmp_path) as run:
        run.save(1, leaves_of(1))
    if what == "a file":
        index.write_bytes(b"a list of words")
    elif what == "a dangling link":
        index.symlink_to(tmp_path / "nowhere")
    else:
        index.mkdir()
        (index / "000000000001-000000000001.tmp").write_bytes(b"perdure-index")
    with run_on(tmp_path) as run:
        for step in range(2, 8):
            run.save(step, leaves_of(step))
            prune_after_save(run, 5, Retention(), step, None)
        assert verify_run(run).good == (3, 4, 5, 6, 7)
    if what == "a file":
        assert index.read_bytes() == b"a list of words"
    assert (small_index["written"] > 0) == (what == "left half written")
    assert not list(index.glob("*.tmp"))


def test_an_index_from_before_a_rollback_and_another_line_is_not_believed() -> None:
    storage = Counting()
    indexed(storage)
    old = {name: storage.objects[name] for name in storage.list("index/")}
    with Run(storage) as run:
        run.rollback(MANY - 20)
        for step in range(MANY - 19, MANY + 2):
            run.save(step, make_leaves(step))
    for name in [*storage.list("index/")]:
        storage.delete(name)
    storage.objects |= old
    with Run(storage) as run:
        run.save(MANY + 2, leaves_of(MANY - 5))
        prune_after_save(run, 30, Retention(keep_period=10), MANY + 2, None)
        assert verify_run(run).good == tuple(run.steps())
        assert len(run.rolled_back()) == 21
    for step in range(MANY - 19, MANY + 2):
        assert contents(Run(storage).load(step).leaves) == contents(make_leaves(step))


def test_a_crash_at_any_operation_of_a_save_that_writes_the_index(
    tmp_path: Path, small_index: Counter[str]
) -> None:
    states = {step: {**leaves_of(step), "frozen": leaves_of(0)["w0"]} for step in range(1, 9)}
    with run_on(tmp_path / "run") as run:
        for step in range(1, 8):
            run.save(step, states[step])
    assert list((tmp_path / "run" / "index").iterdir())

    def act(path: Path, before: Operations) -> None:
        with run_on(path, before) as run:
            run.save(8, states[8])
            run.execute(run.plan(PruneRequest(frozenset({2}), orphans_to=8, compact_from=0)))

    recorder = Operations()
    act(Path(shutil.copytree(tmp_path / "run", tmp_path / "counted")), recorder)
    written = [name for operation, name in recorder.done if operation == "rename"]
    assert any(not name.endswith(".json") for name in written), "the index was written"
    for number in range(len(recorder.done)):
        path = Path(shutil.copytree(tmp_path / "run", tmp_path / f"crash{number}"))
        crash = Operations(crash_at=number)
        with pytest.raises(Crash):
            act(path, crash)
        with run_on(path) as run:
            assert {1, 3, 4, 5, 6, 7} <= set(verify_run(run).good) <= set(states)
            run.save(9, states[2])
            run.execute(run.plan(PruneRequest(frozenset({1}), orphans_to=9, compact_from=0)))
            assert verify_run(run).ok
            for step in run.steps():
                state = states[2 if step == 9 else step]
                assert contents(run.load(step).leaves) == contents(state)


def test_a_copy_of_the_directory_continues_by_itself(
    tmp_path: Path, small_index: Counter[str]
) -> None:
    """The copy has the index of the original, and other checkpoints from then on."""
    with run_on(tmp_path / "run") as run:
        for step in range(1, 9):
            run.save(step, leaves_of(step))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with run_on(tmp_path / "copy") as copy:
            copy.rollback(3)
            for step in range(4, 9):
                copy.save(step, leaves_of(100 + step))
            copy.execute(copy.plan(PruneRequest(frozenset({1}), orphans_to=8)))
        run.execute(run.plan(PruneRequest(frozenset({2}), orphans_to=8)))
    shutil.rmtree(tmp_path / "copy" / "index")
    shutil.copytree(tmp_path / "run" / "index", tmp_path / "copy" / "index")
    for name, shift in (("run", 0), ("copy", 100)):
        with run_on(tmp_path / name) as run:
            run.save(20, leaves_of(5))
            run.execute(run.plan(PruneRequest(frozenset({3}), orphans_to=20)))
            assert verify_run(run).good == tuple(run.steps())
            for step in run.steps():
                state = leaves_of(5 if step == 20 else step + (shift if step > 3 else 0))
                assert contents(run.load(step).leaves) == contents(state)


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


def test_a_manifest_that_rotted_after_it_was_indexed_is_found(small_index: Counter[str]) -> None:
    """Its digest still agrees, so only a read shows it: of a repair, or of a plan that needs it."""
    storage = MemoryStorage()
    shared = {f"frozen{number}": leaves_of(0)[f"w{number}"] for number in range(3)}
    with Run(storage, create=True) as run:
        run.save(1, {**shared, "bulk": make_leaves(1, (5 * 10**6,))["model/layer0"]})
        for step in range(2, 9):
            run.save(step, {**shared, **leaves_of(step)})
    data = storage.objects[manifest_name(3)]
    storage.objects[manifest_name(3)] = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    before = dict(storage.objects)
    with Run(storage) as run:
        # Step 1 goes, so the pack of the shared chunks would be compacted, and all manifests rewritten.
        run.save(9, {**shared, **leaves_of(9)})
        notes = prune_after_save(run, 8, Retention(), 9, None)
        assert run.steps() == [*range(1, 10)], "a checkpoint that cannot be read was counted"
        assert any("the manifest of step 3 cannot be read" in note for note in notes), notes
        assert verify_run(run).good == (1, 2, *range(4, 10))
    storage.objects = dict(before)
    with Run(storage) as run:  # as `perdure prune` does it, which tells of the damage and goes on
        plan = run.plan(PruneRequest(frozenset({1}), orphans_to=9, compact_from=0, everywhere=True))
        assert "the manifest of step 3 cannot be read" in str(plan.held_back)
        run.execute(plan)
        assert run.delete([2]) == [2]
        assert verify_run(run).good == (*range(4, 9),)
    storage.objects = before
    with Run(storage) as run:
        run.save(9, {**shared, **leaves_of(9)})
        assert 3 not in repair(run).report.good
        assert verify_run(run).good == (1, 2, *range(4, 10))
    assert small_index["used"]


def test_random_walks_with_an_index_lose_nothing(small_index: Counter[str]) -> None:
    for seed in range(5000, 5008):  # `make proof-store` has 200
        walk_in_memory(seed)
    walk_on_disk(5000)
    assert small_index["written"] > 8
    assert small_index["used"] > 8


def test_random_walks_in_which_half_of_the_writers_know_no_index(
    small_index: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an older perdure, which leaves the index as it is while the run goes on."""
    source = random.Random(7)
    use = Directory.use_index
    monkeypatch.setattr(
        Directory, "use_index", lambda d, used: use(d, used and source.random() < 0.5)
    )
    for seed in range(6000, 6016):
        walk_in_memory(seed)
    assert small_index["written"] > 4
    assert small_index["used"] > 4
