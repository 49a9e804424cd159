"""Object stores under faults: lost answers, conflicts, outages, forks, other writers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import contents, make_leaves
from many_checkpoints import leaves_of, make_checkpoints

from http_proxy import Fault, Proxy, Request, proxy_to
from object_stores import ObjectServer
from perdure.checkpoint.restorer import load_good
from perdure.checkpoint.retention import Retention, prune_after_save
from perdure.errors import (
    LockedError,
    NotARunError,
    SaveError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store import CloudOptions, CloudStorage, LocalStorage, MemoryStorage, Run, verify_run
from perdure.store.format import manifest_name
from perdure.store.urls import open_storage
from perdure.testing import check_run

NAME = "packs/one"
LARGE = 9 * 1024 * 1024


def run_on_url(server: ObjectServer, url: str, **changes: object) -> Run:
    return Run(server.storage(url, **changes), create=True, clock=lambda: 0.0)


def through(server: ObjectServer, proxy: Proxy, url: str, **changes: object) -> CloudStorage:
    """A storage whose requests go through a proxy."""
    return CloudStorage(url, server.options(endpoint=proxy.endpoint, **changes))


def first(count: int, chosen: Callable[[Request], bool], what: str) -> Fault:
    """Apply the fault `what` to the first `count` matching requests."""
    left = [count]

    def fault(request: Request) -> str | None:
        if left[0] and chosen(request):
            left[0] -= 1
            return what
        return None

    return fault


def dead_endpoint() -> str:
    """An endpoint on which no server listens: a port that was free a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def environment(server: ObjectServer) -> dict[str, str]:
    """The environment variables with which a user configures a server."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


# ---------------------------------------------------------------- by URL


def test_a_url_is_a_run_directory(s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(s3).items():
        monkeypatch.setenv(name, value)
    url = s3.new_url()
    with Run(url, create=True) as run:
        run.save(1, make_leaves(1))
        run.save(2, make_leaves(2))
    assert contents(Run(url).load(2).leaves) == contents(make_leaves(2))
    assert Run(url).where == url
    assert s3.read(url, "perdure.json") is not None
    assert check_run(url).good == (1, 2)


def test_a_partial_load_fetches_only_its_chunks(s3: ObjectServer) -> None:
    url = s3.new_url()
    with run_on_url(s3, url) as run:
        run.save(1, make_leaves(1, (LARGE, 1000)))
    with proxy_to(s3.endpoint) as proxy:
        run = Run(through(s3, proxy, url))
        loaded = run.load(1, lambda path: path == "model/layer1")
        assert set(loaded.leaves) == {"model/layer1"}
        ranges = [r.headers.get("range") for r in proxy.requests if "/packs/" in r.path]
    assert len(ranges) == 1
    start, _, stop = (ranges[0] or "").removeprefix("bytes=").partition("-")
    assert int(stop) - int(start) + 1 == 1000
    check_run(s3.storage(url))


def test_requests_of_a_save_do_not_depend_on_what_is_kept(s3: ObjectServer) -> None:
    """Beside 4 and 24 checkpoints the fifth save of a process and its prune take the same requests."""
    counts = []
    for kept in (4, 24):
        memory, url = MemoryStorage(), s3.new_url()
        make_checkpoints(memory, kept)
        for name, data in memory.objects.items():
            s3.write(url, name, data)
        with (
            proxy_to(s3.endpoint) as proxy,
            Run(through(s3, proxy, url), create=True, clock=lambda: 0.0) as run,
        ):
            seen = 0
            for step in range(kept + 1, kept + 6):
                seen = len(proxy.requests)
                run.save(step, {**make_leaves(step), **leaves_of(2)})
                prune_after_save(run, kept, Retention(), step, None)
            counts.append([(request.method, "list" in request.path) for request in proxy.requests])
            counts[-1] = counts[-1][seen:]
            assert run.steps() == [*range(6, kept + 6)]
    assert len(counts[0]) == len(counts[1]) <= 2 + 10
    assert sum(method == "PUT" for method, _ in counts[1]) == 2


@pytest.mark.parametrize("url", ["ftp://host/run", "http://host/run", "hdfs://host/run"])
def test_an_unknown_scheme_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"expected a path or a URL with one of s3, .*, found"):
        open_storage(url)


def test_a_url_with_one_slash_is_not_mistaken_for_a_path() -> None:
    with pytest.raises(StoreError, match=r"expected a URL such as s3://\.\.\., found one slash"):
        Run(Path("s3://bucket/run"), create=True)
    assert isinstance(open_storage("runs/a:/b"), LocalStorage)


def test_without_obstore_the_extra_is_named_and_local_paths_work(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from perdure.store import Run\n"
        "Run(sys.argv[1], create=True).close()\n"
        "Run('s3://bucket/run')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "MissingExtraError: obstore is not installed" in done.stderr
    assert "pip install 'perdure[cloud]'" in done.stderr


def test_obstore_is_imported_for_urls_only(tmp_path: Path) -> None:
    program = (
        "import sys; from perdure.store import Run\n"
        "Run(sys.argv[1], create=True).close(); assert 'obstore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


# ---------------------------------------------------------------- faults of the network


@pytest.mark.parametrize("what", ["lose", "409", "503", "refuse"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_whose_request_fails_happens_once(s3: ObjectServer, what: str, times: int) -> None:
    url = s3.new_url()
    fault = first(times, lambda request: request.puts("/checkpoints/"), what)
    with proxy_to(s3.endpoint, fault) as proxy:
        with Run(through(s3, proxy, url), create=True) as run:
            run.save(1, make_leaves(1))
        assert len(proxy.fired) == times
    assert contents(run_on_url(s3, url).load(1).leaves) == contents(make_leaves(1))
    assert check_run(s3.storage(url)).good == (1,)


def test_a_conflict_with_another_writer_is_a_lost_race(s3: ObjectServer) -> None:
    url = s3.new_url()
    s3.write(url, NAME, b"theirs")
    with proxy_to(s3.endpoint, first(1, lambda r: r.puts(NAME), "409")) as proxy:
        sink = through(s3, proxy, url).create(NAME, 4)
        sink.write(memoryview(b"mine"))
        with pytest.raises(FileExistsError):
            sink.commit()
        assert proxy.fired
    assert s3.read(url, NAME) == b"theirs"


@pytest.mark.parametrize("what", ["lose", "503", "refuse"])
@pytest.mark.parametrize("step", ["partNumber=1", "partNumber=2", "uploads", "uploadId"])
def test_a_large_object_survives_any_request_of_its_upload(
    s3: ObjectServer, what: str, step: str
) -> None:
    url = s3.new_url()
    data = os.urandom(LARGE)
    if step == "uploadId":  # the request that completes the multipart upload

        def chosen(request: Request) -> bool:
            return request.method == "POST" and step in request.path
    else:

        def chosen(request: Request) -> bool:
            return step in request.path

    with proxy_to(s3.endpoint, first(1, chosen, what)) as proxy:
        sink = through(s3, proxy, url).create(NAME, LARGE)
        try:
            sink.write(memoryview(data))
            sink.commit()
        except ConnectionError:
            sink.abort()
            assert s3.names(url) == set()
        else:
            assert s3.read(url, NAME) == data
        assert proxy.fired


def test_each_stream_of_a_load_is_one_request(s3: ObjectServer) -> None:
    url = s3.new_url()
    leaves = make_leaves(1, (2 * LARGE, LARGE, 1000))
    with run_on_url(s3, url) as run:
        manifest = run.save(1, leaves)
    chunks = [chunk for leaf in manifest.leaves for chunk in leaf.chunks]
    with proxy_to(s3.endpoint) as proxy:
        loaded = Run(through(s3, proxy, url, concurrency=2)).load(1)
        # The size of a pack is requested once, before memory is allocated for its chunks.
        reads = [r for r in proxy.requests if "/packs/" in r.path and r.method != "HEAD"]
        ranges = [r.headers["range"] for r in reads]
    assert len(chunks) > 6
    assert len(ranges) <= 3  # one for each stream, and one for the remainder
    assert contents(loaded.leaves) == contents(leaves)
    check_run(s3.storage(url))


def test_a_stream_that_breaks_off_continues_where_it_was(s3: ObjectServer) -> None:
    url = s3.new_url()
    data = os.urandom(LARGE)
    s3.write(url, NAME, data)
    targets = [memoryview(bytearray(size)) for size in (1000, LARGE - 2000, 0, 5000)]
    with proxy_to(s3.endpoint, first(1, lambda r: NAME in r.path, "cut")) as proxy:
        got = list(through(s3, proxy, url, retries=0).read_each(NAME, 500, targets))
        assert proxy.fired
        starts = [int(r.headers["range"][len("bytes=") :].split("-")[0]) for r in proxy.requests]
    assert starts[0] == 500 < starts[1]
    assert got == [1000, LARGE - 2000, 0, 500]  # the object ends there
    assert b"".join(targets)[: LARGE - 500] == data[500:]


def test_a_stream_without_progress_is_an_outage(s3: ObjectServer) -> None:
    url = s3.new_url()
    s3.write(url, NAME, os.urandom(1000))
    with proxy_to(s3.endpoint, lambda r: "503" if NAME in r.path else None) as proxy:
        with pytest.raises(ConnectionError, match="Nothing is known about what is there"):
            list(through(s3, proxy, url, retries=0).read_each(NAME, 0, [memoryview(bytearray(9))]))
        assert proxy.fired


@pytest.mark.parametrize("what", ["cut", "503", "refuse", "lose"])
def test_a_read_that_breaks_off_is_retried(s3: ObjectServer, what: str) -> None:
    url = s3.new_url()
    data = os.urandom(3_000_000)
    s3.write(url, NAME, data)
    with proxy_to(s3.endpoint, first(1, lambda r: NAME in r.path, what)) as proxy:
        target = bytearray(2_000_000)
        got = through(s3, proxy, url).read_into(NAME, 1000, memoryview(target))
        assert proxy.fired
    assert got == len(target)
    assert target == data[1000:2_001_000]


def test_a_listing_that_breaks_off_continues_where_it_was(s3: ObjectServer) -> None:
    url = s3.new_url()
    names = {f"packs/{number:05d}" for number in range(200)}
    for name in names:
        s3.write(url, name, b"")
    # The third page breaks off more often than obstore itself retries.
    third = first(3, lambda request: "start-after" in request.path or pages[0] == 2, "503")
    pages = [0]

    def fault(request: Request) -> str | None:
        if what := third(request):
            return what
        pages[0] += 1
        return "&max-keys=60"

    with proxy_to(s3.endpoint, fault) as proxy:
        listed = list(through(s3, proxy, url, retries=1).list("packs/"))
        assert len(proxy.fired) == 3
        assert any("start-after" in request.path for request in proxy.requests)
    assert len(listed) == len(names)
    assert set(listed) == names


def test_a_dead_endpoint_is_named_with_the_remedy(s3: ObjectServer) -> None:
    dead = CloudStorage("s3://bucket/run", s3.options(endpoint=dead_endpoint(), retries=1))
    with pytest.raises(ConnectionError) as caught:
        dead.read("perdure.json")
    assert "reading failed after up to 1 retries" in str(caught.value)
    assert "Check network, endpoint and credentials, then try again" in str(caught.value)
    assert caught.value.filename == "s3://bucket/run/perdure.json"
    with pytest.raises(UnreachableError, match=r"s3://bucket/run/perdure\.json"):
        Run(dead, create=True)


@pytest.mark.parametrize(
    ("url", "variables", "config"),
    [
        ("s3://bucket/run", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "~/.aws"], {}),
        ("az://bucket/run", ["AZURE_STORAGE_ACCOUNT_KEY"], {"account_name": "a"}),
    ],
)
@pytest.mark.parametrize("status", ["403", "404", "503", "refuse"])
def test_missing_credentials_are_named_with_the_variables_that_bring_them(
    url: str,
    variables: list[str],
    config: dict[str, str],
    status: str,
    s3: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "MSI_"))]:
        monkeypatch.delenv(name)
    with proxy_to(s3.endpoint, lambda _: status) as proxy:
        # Where a machine in the cloud is asked for its role.
        if url.startswith("s3"):
            config = {"metadata_endpoint": proxy.endpoint}
        else:
            config = {**config, "msi_endpoint": f"{proxy.endpoint}/metadata/identity/oauth2/token"}
        options = CloudOptions(config, {"allow_http": True}, retries=0)
        with pytest.raises(UnreachableError, match="no credentials were found") as caught:
            Run(CloudStorage(url, options), create=True)
        assert proxy.fired
    assert [name for name in variables if name not in str(caught.value)] == []
    assert "Set these variables and start again" in str(caught.value)


def test_a_missing_azure_account_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match="AZURE_STORAGE_ACCOUNT_NAME and"):
        CloudStorage("az://bucket/run")


def test_a_missing_bucket_is_named(s3: ObjectServer) -> None:
    with pytest.raises(NotARunError, match="the bucket does not exist; create it"):
        Run(s3.storage("s3://no-such-bucket/run"), create=True)


def test_an_outage_is_not_damage(s3: ObjectServer) -> None:
    url = s3.new_url()
    with run_on_url(s3, url) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
    down = [False]
    with proxy_to(s3.endpoint, lambda _: "refuse" if down[0] else None) as proxy:
        run = Run(through(s3, proxy, url, retries=1))
        down[0] = True
        for attempt in (
            lambda: load_good(run),
            lambda: run.load(2),
            lambda: run.manifest(2),
            run.steps,
        ):
            with pytest.raises(UnreachableError, match="Nothing is known about what is there"):
                attempt()
        down[0] = False
        loaded = load_good(run).loaded
        assert loaded is not None
        assert (loaded.manifest.step, loaded.skipped) == (3, ())
        assert proxy.fired
    check_run(s3.storage(url))


def test_an_outage_between_chunks_is_not_damage(s3: ObjectServer) -> None:
    url = s3.new_url()
    with run_on_url(s3, url) as run:
        run.save(1, make_leaves(1))

    def fault(request: Request) -> str | None:
        is_chunk = "/packs/" in request.path and "range" in request.headers
        return "refuse" if is_chunk else None

    with proxy_to(s3.endpoint, fault) as proxy:
        with pytest.raises(UnreachableError, match="cannot be read"):
            load_good(Run(through(s3, proxy, url, retries=1)))
        assert proxy.fired
    with proxy_to(s3.endpoint, lambda r: "refuse" if "/packs/0" in r.path else None) as proxy:
        with pytest.raises(UnreachableError, match="the check stopped"):
            verify_run(Run(through(s3, proxy, url, retries=1)))
        assert proxy.fired
    check_run(s3.storage(url))


@pytest.mark.parametrize(
    ("where", "size"), [("/packs/", 1000), ("/packs/", LARGE), ("/checkpoints/000000000002", 1000)]
)
def test_an_outage_during_a_save_loses_only_that_save(
    s3: ObjectServer, where: str, size: int
) -> None:
    url = s3.new_url()
    down = [False]

    def fault(request: Request) -> str | None:
        down[0] = down[0] or (request.method != "GET" and where in request.path)
        return "refuse" if down[0] and request.headers.get("range") is None else None

    with run_on_url(s3, url) as run:
        run.save(1, make_leaves(1))
    with proxy_to(s3.endpoint, fault) as proxy:
        with Run(through(s3, proxy, url, retries=1)) as run:
            with pytest.raises(SaveError, match="saving step 2 failed") as caught:
                run.save(2, make_leaves(2, (size,)))
            assert "Every earlier checkpoint is unchanged" in str(caught.value)
            down[0], where = False, "nowhere"
            run.save(2, make_leaves(2, (size,)))
        assert proxy.fired
    assert contents(run_on_url(s3, url).load(2).leaves) == contents(make_leaves(2, (size,)))
    assert check_run(s3.storage(url)).good == (1, 2)


# ---------------------------------------------------------------- forks


def test_a_forked_child_is_refused_and_told_to_spawn(s3: ObjectServer) -> None:
    program = """
import os, sys
from perdure.store import Run
url = sys.argv[1]
Run(url, create=True)
reading, writing = os.pipe()
if os.fork() == 0:
    try:
        Run(url, create=True)
    except Exception as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode())
    os._exit(0)
os.close(writing)
print(os.read(reading, 10000).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, s3.new_url()],
        env={**os.environ, **environment(s3)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith("StoreError: s3://"), done.stderr
    assert "which had used an object store" in done.stdout
    assert 'multiprocessing.get_context("spawn")' in done.stdout


def test_a_run_that_is_never_closed_releases_its_lock(s3: ObjectServer) -> None:
    program = """
import sys
from perdure.store import Run
run = Run(sys.argv[1], create=True)
run.begin_writing()
"""
    url = s3.new_url()
    done = subprocess.run(
        [sys.executable, "-c", program, url],
        env={**os.environ, **environment(s3)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with run_on_url(s3, url) as run:  # released, or held by a process that has ended
        run.save(1, make_leaves(1))
        check_run(run.storage)


# ---------------------------------------------------------------- writers


def writers(server: ObjectServer, url: str) -> list[str]:
    return [json.loads(server.read(url, "lock") or b"{}").get("nonce", "")]


HOLDER = """
import sys
from perdure.store import Run
run = Run(sys.argv[1], create=True)
run.begin_writing()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_gets_the_name_of_the_writer_and_takes_over_from_a_dead_one(
    s3: ObjectServer,
) -> None:
    url = s3.new_url()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment(s3)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockedError) as caught:
            run_on_url(s3, url).begin_writing()
        assert f'"pid": {holder.pid}' in str(caught.value)
        assert f'"host": "{socket.gethostname()}"' in str(caught.value)
        holder.kill()
        holder.wait()
    with run_on_url(s3, url) as run:
        run.save(1, make_leaves(1))
        assert check_run(run.storage).good == (1,)


def foreign(server: ObjectServer, url: str) -> bytes:
    """Change the lock as if another host held it."""
    data = server.read(url, "lock")
    assert data is not None
    lock = json.loads(data)
    lock["process"] = ["elsewhere", "boot", "space", 1, "1"]
    server.write(url, "lock", json.dumps(lock).encode())
    return data


def test_an_expired_lock_of_another_host_is_taken_over_and_its_holder_stops(
    s3: ObjectServer,
) -> None:
    url = s3.new_url()
    late = [0.0]
    with run_on_url(s3, url) as old:
        old.save(1, make_leaves(1))
        foreign(s3, url)
        modified = CloudStorage(url, s3.options(), clock=lambda: late[0])
        late[0] = 0.0
        with pytest.raises(LockedError):
            Run(modified).begin_writing()
        late[0] = 4e9  # long after its lease
        with Run(modified) as new:
            new.save(2, make_leaves(2))
            lease = old.storage._lease  # pyright: ignore[reportAttributeAccessIssue]
            lease.renew()
            with pytest.raises(SaveError, match="the lock was taken over by"):
                old.save(3, make_leaves(3))
            with pytest.raises(OSError, match="nothing more is written"):
                old.storage.delete(manifest_name(1))
            assert new.steps() == [1, 2]
            mine = writers(s3, url)
            old.close()
            assert writers(s3, url) == mine, "the old holder must not remove the lock of the new"
            new.save(3, make_leaves(3))
    assert check_run(s3.storage(url)).good == (1, 2, 3)


def test_the_age_of_a_lock_is_measured_by_the_clock_of_the_store(s3: ObjectServer) -> None:
    url = s3.new_url()
    with run_on_url(s3, url) as old:
        old.begin_writing()
        foreign(s3, url)
        with pytest.raises(LockedError):
            run_on_url(s3, url).begin_writing()
        with run_on_url(s3, url, lease_seconds=30.0) as successor:
            lock = json.loads(s3.read(url, "lock") or b"")
            s3.write(url, "lock", json.dumps({**lock, "lease_seconds": -5.0}).encode())
            successor.save(1, make_leaves(1))
    assert not [name for name in s3.names(url) if name.startswith("lock")]
    check_run(s3.storage(url))


def test_a_renewal_whose_answer_was_lost_keeps_the_lock(s3: ObjectServer) -> None:
    url = s3.new_url()
    puts = [0]

    def lose_the_second(request: Request) -> str | None:
        puts[0] += request.puts("/lock")
        return "lose" if request.puts("/lock") and puts[0] == 2 else None

    with proxy_to(s3.endpoint, lose_the_second) as proxy:
        storage = through(s3, proxy, url)
        with Run(storage, create=True) as run:
            run.begin_writing()
            lease = storage._lease
            assert lease is not None
            lease.renew()
            assert proxy.fired
            lease.renew()
            lease.check()
            run.save(1, make_leaves(1))
    assert check_run(s3.storage(url)).good == (1,)


def test_a_lock_that_cannot_be_renewed_in_time_stops_the_writer(s3: ObjectServer) -> None:
    url = s3.new_url()
    down = [False]
    with proxy_to(s3.endpoint, lambda _: "refuse" if down[0] else None) as proxy:
        storage = through(s3, proxy, url, lease_seconds=0.0, retries=1)
        with storage.lock("lock", b"me"):
            storage.replace("perdure.json", b"renewed on the way")
            down[0] = True
            with pytest.raises(ConnectionError):
                storage.replace("perdure.json", b"not renewed")
            down[0] = False
            storage.replace("perdure.json", b"renewed again")
        assert proxy.fired
    assert s3.read(url, "perdure.json") == b"renewed again"


def test_two_writers_without_a_lock_commit_one_step_once(s3: ObjectServer) -> None:
    url = s3.new_url()
    with run_on_url(s3, url) as run:
        run.save(1, make_leaves(1))

    def attempt(seed: int) -> str:
        run = run_on_url(s3, url)
        run.session.holds_lock = True  # without the lock
        try:
            run.save(2, make_leaves(seed))
        except (LockedError, StoreError) as error:
            return type(error).__name__
        return "committed"

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(attempt, range(8)))
    assert done.count("committed") == 1
    assert set(done) <= {"committed", "LockedError", "StepExistsError"}
    assert contents(run_on_url(s3, url).load(2).leaves) == contents(
        make_leaves(done.index("committed"))
    )
    assert check_run(s3.storage(url)).good == (1, 2)


def test_a_step_that_is_not_there_names_the_url(s3: ObjectServer) -> None:
    url = s3.new_url()
    with run_on_url(s3, url) as run:
        run.save(4, make_leaves(4))
        with pytest.raises(StepNotFoundError, match=f"{url}: expected a checkpoint of step 5"):
            run.load(5)
        check_run(run.storage)


@pytest.mark.parametrize("config", [{"timeout": "300s"}, {"region": None}, {"no_such": "x"}])
def test_a_wrong_config_is_an_error_with_advice(config: dict[str, object]) -> None:
    """obstore panics at the first one: it is a setting of the client."""
    with pytest.raises(StoreError, match=r"s3://b/run: .*CloudOptions\(client="):
        CloudStorage("s3://b/run", CloudOptions(config))
