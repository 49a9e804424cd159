"""Local first, remote behind: nothing is lost by an outage, a crash, a lost disk or damage here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import contents, make_leaves

from perdure.errors import CorruptionError, LockedError, SaveError
from perdure.store import LocalStorage, MemoryStorage, Run, StagedStorage, check
from perdure.store.format import manifest_name
from perdure.store.storage import StreamingStorage
from perdure.testing import check_run
from perdure.testing.proxy import Request, proxy_to
from perdure.testing.servers import ObjectServer

LARGE = 9 * 1024 * 1024


class Remote(MemoryStorage):
    """In memory; can be down, and tells whenever something has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.changes = 0
        self.reports: list[bool] = []

    def _reach(self) -> None:
        if self.down:
            raise ConnectionError(113, "nobody answers", self.where)

    def _changed(self) -> None:
        self.changes += 1
        if "perdure.json" in self.objects:
            self.reports.append(check(Run(self)).ok)

    def create(self, name: str, size: int) -> Any:
        self._reach()
        sink: Any = super().create(name, size)
        commit = sink.commit

        def told() -> None:
            commit()
            self._changed()

        sink.commit = told
        return sink

    def replace(self, name: str, data: bytes) -> None:
        self._reach()
        super().replace(name, data)
        self._changed()

    def delete(self, name: str) -> None:
        self._reach()
        super().delete(name)
        self._changed()

    def size(self, name: str) -> int:
        self._reach()
        return super().size(name)

    def list(self, prefix: str) -> Iterator[str]:
        self._reach()
        return super().list(prefix)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def there() -> Remote:
    return Remote()


def staged(here: Path, there: MemoryStorage) -> StagedStorage:
    return StagedStorage(LocalStorage(here), there)


def run_on_both(here: Path, there: MemoryStorage) -> Run:
    return Run(staged(here, there), create=True, clock=lambda: 0.0)


def settle(storage: StagedStorage) -> None:
    """Until the thread that carries has nothing more to do, or has failed."""
    thread = storage._carrier._thread
    if thread is not None:
        thread.join()


def flip(path: Path, at: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def pack_of(here: Path, step: int) -> Path:
    (name,) = [
        pack["name"] for pack in json.loads((here / manifest_name(step)).read_bytes())["packs"]
    ]
    return here / "packs" / name


def test_both_hold_everything_once_the_run_is_closed(here: Path, there: Remote) -> None:
    with run_on_both(here, there) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
        run.delete([1])
    for place in (here, there, staged(here, there)):
        assert check_run(place).good == (2, 3)
        assert contents(Run(place).load(3).leaves) == contents(make_leaves(3))
    assert set(there.objects) == {
        str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()
    } - {"lock"}


def test_the_remote_is_whole_after_every_single_change(here: Path, there: Remote) -> None:
    with run_on_both(here, there) as run:
        for step in range(1, 6):
            run.save(step, make_leaves(step, (5000, 10)))
            run.delete([step - 2])
        run.quarantine(4, "a reason")
    assert there.changes > 15
    assert all(there.reports)
    assert check_run(there).good == check_run(here).good == (5,)


def test_an_outage_delays_uploads_and_is_told_by_the_next_save(here: Path, there: Remote) -> None:
    run = run_on_both(here, there)
    run.save(1, make_leaves(1))
    storage = run.storage
    assert isinstance(storage, StagedStorage)
    storage.wait()
    there.down = True
    run.save(2, make_leaves(2))
    with pytest.raises(OSError, match="is safe here and not yet there: nobody answers"):
        storage.wait()
    assert contents(Run(here).load(2).leaves) == contents(make_leaves(2))
    run.save(3, make_leaves(3))  # was told by `wait`; its own upload fails behind it
    settle(storage)
    with pytest.raises(SaveError, match="is safe here and not yet there: nobody answers"):
        run.save(4, make_leaves(4))
    with pytest.raises(OSError, match="nobody answers"):
        storage.wait()  # telling has started another try, which fails as well
    there.down = False
    run.save(5, make_leaves(5))
    run.close()
    assert check_run(there).good == check_run(here).good == (1, 2, 3, 5)


def test_an_outage_at_the_end_is_told_by_close_and_mended_by_the_next_writer(
    here: Path, there: Remote
) -> None:
    run = run_on_both(here, there)
    run.save(1, make_leaves(1))
    storage = run.storage
    assert isinstance(storage, StagedStorage)
    storage.wait()
    there.down = True
    run.save(2, make_leaves(2))
    with pytest.raises(
        SaveError, match=r"safe here and not yet there: nobody answers\. It is tried"
    ):
        run.close()
    there.down = False
    assert 2 not in Run(there).steps()
    with run_on_both(here, there) as again:
        again.begin_writing()
    assert check_run(there).good == (1, 2)
    assert contents(Run(there).load(2).leaves) == contents(make_leaves(2))
    check_run(here)


def test_a_lost_disk_is_replaced_by_the_remote(here: Path, there: Remote) -> None:
    frozen = make_leaves(7, (100_000,))["model/layer0"]
    with run_on_both(here, there) as run:
        run.save(1, {"frozen": frozen})
        run.save(2, {"frozen": frozen, **make_leaves(2)})
    shutil.rmtree(here)
    here.mkdir()
    with run_on_both(here, there) as run:
        loaded = run.load_newest()
        assert loaded is not None
        assert contents(loaded.leaves) == contents({"frozen": frozen, **make_leaves(2)})
        run.save(3, {"frozen": frozen, "more": make_leaves(3)["model/layer1"]})
        assert sum(path.stat().st_size for path in (here / "packs").iterdir()) < 1000
    assert check_run(there).good == check_run(staged(here, there)).good == (1, 2, 3)


@pytest.mark.parametrize(
    "what", ["chunk", "pack index", "pack cut", "pack gone", "manifest", "manifest empty", "gone"]
)
def test_damage_here_is_healed_from_there(here: Path, there: Remote, what: str) -> None:
    with run_on_both(here, there) as run:
        for step in (1, 2):
            run.save(step, make_leaves(step))
    pack, manifest = pack_of(here, 2), here / manifest_name(2)
    if what == "chunk":
        flip(pack)
    elif what == "pack index":
        flip(pack, -70)
    elif what == "pack cut":
        pack.write_bytes(pack.read_bytes()[:500])
    elif what == "pack gone":
        pack.unlink()
    elif what == "manifest":
        flip(manifest)
    elif what == "manifest empty":
        manifest.write_bytes(b"")
    else:
        manifest.unlink()
    assert not check(Run(here)).ok or what == "gone"
    for run in (Run(staged(here, there)), run_on_both(here, there)):
        loaded = run.load_newest()
        assert loaded is not None
        assert (loaded.manifest.step, loaded.skipped) == (2, ())
        assert contents(loaded.leaves) == contents(make_leaves(2))
    assert check_run(staged(here, there)).good == (1, 2)
    assert check_run(there).good == (1, 2)


def test_damage_there_does_not_matter_while_here_is_good(here: Path, there: Remote) -> None:
    with run_on_both(here, there) as run:
        run.save(1, make_leaves(1))
    for name in there.objects:
        if name != "perdure.json":
            there.objects[name] = b"damaged"
    assert contents(Run(staged(here, there)).load(1).leaves) == contents(make_leaves(1))
    check_run(staged(here, there))


def test_damage_in_both_is_damage(here: Path, there: Remote) -> None:
    with run_on_both(here, there) as run:
        run.save(1, make_leaves(1))
        run.save(2, make_leaves(2))
    flip(pack_of(here, 2))
    name = f"packs/{pack_of(here, 2).name}"
    there.objects[name] = (here / name).read_bytes()
    run = Run(staged(here, there))
    with pytest.raises(CorruptionError, match="expected hash"):
        run.load(2)
    loaded = run.load_newest()
    assert loaded is not None
    assert loaded.manifest.step == 1
    assert not check(run).ok


def test_what_is_damaged_here_is_not_uploaded(here: Path, there: Remote) -> None:
    run = run_on_both(here, there)
    run.save(1, make_leaves(1))
    storage = run.storage
    assert isinstance(storage, StagedStorage)
    storage.wait()
    there.down = True
    run.save(2, make_leaves(2))
    settle(storage)
    flip(pack_of(here, 2))
    there.down = False
    with pytest.raises(OSError, match="was not uploaded: the local copy is damaged"):
        storage.wait()
    with pytest.raises(SaveError, match=r"it needs packs/000000000002-.*, which is not there"):
        run.close()
    assert check_run(there).good == (1,)


def test_what_was_not_uploaded_is_told_however_early_that_was_found(
    here: Path, there: Remote
) -> None:
    Run(here, create=True, clock=lambda: 0.0).save(1, make_leaves(1))
    flip(pack_of(here, 1))
    run = run_on_both(here, there)
    run.begin_writing()
    assert isinstance(run.storage, StagedStorage)
    settle(run.storage)  # it is found before anybody waits for it
    with pytest.raises(SaveError, match="was not uploaded: the local copy is damaged"):
        run.close()


class Streams(Remote):
    """Gives contiguous ranges by one request, and counts the requests."""

    streams = 2

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[int] = []

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.startswith("packs/"):
            self.requests.append(1)
        return super().read_into(name, offset, target)

    def read_each(self, name: str, offset: int, targets: Any) -> Iterator[int]:
        self.requests.append(len(targets))
        for target in targets:
            yield super().read_into(name, offset, target)
            offset += len(target)


def test_a_load_from_there_is_a_few_requests(here: Path) -> None:
    there, leaves = Streams(), make_leaves(1, (2 * LARGE, LARGE, 1000))
    with run_on_both(here, there) as run:
        run.save(1, leaves)
    there.requests.clear()
    assert contents(Run(staged(here, there)).load(1).leaves) == contents(leaves)
    assert there.requests == [], "what is good here is read here"
    pack = pack_of(here, 1)
    flip(pack, LARGE)
    assert contents(Run(staged(here, there)).load(1).leaves) == contents(leaves)
    assert there.requests == [1], "of a damaged pack the damaged chunk"
    there.requests.clear()
    pack.unlink()
    assert contents(Run(staged(here, there)).load(1).leaves) == contents(leaves)
    assert len(there.requests) <= there.streams + 1  # and what rounding leaves
    assert sum(there.requests) > 6
    assert not isinstance(staged(here, Remote()), StreamingStorage), "only as far as there can"


def test_what_is_here_can_be_read_while_there_is_down(here: Path, there: Remote) -> None:
    with run_on_both(here, there) as run:
        run.save(1, make_leaves(1))
    there.down = True
    with pytest.warns(UserWarning, match="only what is here can be listed: .*nobody answers"):
        loaded = Run(staged(here, there)).load_newest()
    assert loaded is not None
    assert contents(loaded.leaves) == contents(make_leaves(1))
    with pytest.raises(SaveError, match=r"cannot be written to: .*nobody answers"):
        run_on_both(here, there).begin_writing()
    check_run(here)


def test_a_writer_on_another_machine_is_told(tmp_path: Path, there: Remote) -> None:
    with run_on_both(tmp_path / "one", there) as run:
        run.save(1, make_leaves(1))
        with pytest.raises(LockedError, match="this process already has a manager"):
            run_on_both(tmp_path / "two", there).begin_writing()
    with run_on_both(tmp_path / "two", there) as run:
        run.save(2, make_leaves(2))
    assert check_run(there).good == (1, 2)


# ---------------------------------------------------------------- on S3

UPLOADING = """
import sys
from perdure.store import CloudOptions, CloudStorage, LocalStorage, Run, StagedStorage
sys.path.insert(0, sys.argv[1])
from helpers import make_leaves
here, url, endpoint, size = sys.argv[2:]
options = CloudOptions(
    config={"endpoint": endpoint, "region": "us-east-1",
            "access_key_id": "test", "secret_access_key": "test"},
    single_put_bytes=8 << 20, part_bytes=5 << 20,
)
run = Run(StagedStorage(LocalStorage(here), CloudStorage(url, options)), create=True)
run.save(1, make_leaves(1))
run.storage.wait()
run.save(2, make_leaves(2, (int(size),)))
print("committed", flush=True)
run.close()
"""


@pytest.mark.parametrize(
    ("where", "size"), [("partNumber=2", LARGE), ("/checkpoints/000000000002", 1000)]
)
def test_a_kill_during_an_upload_is_finished_by_the_next_writer(
    s3: ObjectServer, here: Path, where: str, size: int
) -> None:
    url = s3.new_url()
    child: list[subprocess.Popen[str]] = []

    def kill(request: Request) -> str | None:
        if where in request.path and request.method == "PUT":
            child[0].kill()
            return "refuse"
        return None

    with proxy_to(s3.endpoint, kill) as proxy:
        arguments = [str(Path(__file__).parent), str(here), url, proxy.endpoint, str(size)]
        with subprocess.Popen(
            [sys.executable, "-c", UPLOADING, *arguments], stdout=subprocess.PIPE, text=True
        ) as process:
            child.append(process)
            said, _ = process.communicate(timeout=60)
        assert proxy.fired
        assert (said, process.returncode) == ("committed\n", -9)
    assert check_run(here).good == (1, 2)
    assert check_run(s3.storage(url)).good == (1,)
    with Run(StagedStorage(LocalStorage(here), s3.storage(url))) as run:
        run.begin_writing()
    assert check_run(s3.storage(url)).good == (1, 2)
    assert contents(Run(s3.storage(url)).load(2).leaves) == contents(make_leaves(2, (size,)))


class Failing(LocalStorage):
    """A disk that lists its files and cannot read what is in the packs."""

    failed = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.startswith("packs/"):
            self.failed += 1
            raise OSError(5, "Input/output error")
        return super().read_into(name, offset, target)


def test_the_remote_helps_out_where_the_disk_cannot_be_read(tmp_path: Path) -> None:
    there, leaves = MemoryStorage(), make_leaves(1)
    with Run(StagedStorage(LocalStorage(tmp_path), there), create=True) as run:
        run.save(1, leaves)
    disk = Failing(tmp_path)
    assert contents(Run(StagedStorage(disk, there)).load(1).leaves) == contents(leaves)
    assert disk.failed
