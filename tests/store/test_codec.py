"""Encoded chunks: the same bits and fingerprints, checked and bounded, mixed with plain chunks."""

from __future__ import annotations

import random
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backports import zstd
from blake3 import blake3
from helpers import contents, make_leaves, repeated, run_on, sharing_states
from test_format import resealed

from damage import flip
from perdure import Checkpoint, CheckpointManager, ManagerOptions
from perdure.checkpoint.restorer import load_good
from perdure.errors import CorruptionError, NoGoodCheckpointError, StoreError
from perdure.store import (
    Leaf,
    MemoryStorage,
    PruneRequest,
    Run,
    copy_run,
    repair,
    verify_run,
)
from perdure.store.codec import SEAL_BYTES, WIDTHS, decode, encode, is_intact, width_of
from perdure.store.format import CHUNK_BYTES, MAX_STEP, hash_bytes
from perdure.testing import check_run

CODEC = "shuffle-zstd"


def words(seed: int, count: int, width: int = 4) -> bytes:
    """Elements whose first byte has 64 values and whose other bytes are constant."""
    source = random.Random(seed)
    return b"".join(bytes([source.randrange(64)]) + b"\x3f" * (width - 1) for _ in range(count))


def leaf(data: bytes, dtype: str = "float32") -> Leaf:
    return Leaf(dtype, (len(data) // width_of(dtype),), memoryview(data), True)


@pytest.fixture
def states() -> dict[int, dict[str, Leaf]]:
    """Large and small chunks, compressible and not, some of them twice."""
    large = leaf(words(1, 50_000) * 26)
    noise = make_leaves(3, (300_000, 5000, 10))
    return {
        1: {"large": large, "again": large, "zeros": leaf(bytes(9_000_000)), **noise},
        2: {"large": large, "new": leaf(words(2, 5000, 2), "bfloat16"), **make_leaves(4)},
    }


def sealed(body: bytes, digest: str) -> memoryview:
    return memoryview(body + blake3(body, key=bytes.fromhex(digest)).digest())


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [512, 4099, CHUNK_BYTES // 16])
def test_an_encoded_chunk_decodes_to_its_bytes(width: int, count: int) -> None:
    data = words(width, 512, width) * (count // 512) + words(9, count % 512, width)
    digest = hash_bytes(data)
    dtype = {1: "int8", 2: "bfloat16", 4: "key<threefry2x32>", 8: "float64", 16: "complex128"}
    stored = encode(memoryview(data), dtype[width], digest)
    assert len(stored) < len(data)
    assert stored[0] == width
    target = bytearray(len(data))
    assert decode(stored, digest, memoryview(target)) is None
    assert target == data


def test_a_length_that_is_no_multiple_of_the_width_is_not_shuffled() -> None:
    data = bytes(5001)
    stored = encode(memoryview(data), "float64", hash_bytes(data))
    assert stored[0] == 1
    assert decode(stored, hash_bytes(data), memoryview(bytearray(5001))) is None


def test_an_incompressible_chunk_is_stored_as_it_is() -> None:
    data = memoryview(random.Random(1).randbytes(100_000))
    assert encode(data, "float32", hash_bytes(data)) is data
    assert is_intact(data, hash_bytes(data), len(data))


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("int4", 1),
        ("bool", 1),
        ("complex128", 16),
        ("key<rbg>", 4),
        ("datetime64[ns]", 8),
        ("float24", 1),
    ],
)
def test_the_width_follows_the_dtype(dtype: str, width: int) -> None:
    assert width_of(dtype) == width


def test_a_seal_belongs_to_one_chunk() -> None:
    """A whole encoded chunk in the place of another one is damage, as its plain bytes would be."""
    one, other = bytes(8000), bytes([1]) * 8000
    stored = encode(memoryview(one), "uint8", hash_bytes(one))
    assert is_intact(stored, hash_bytes(one), 8000)
    assert not is_intact(stored, hash_bytes(other), 8000)


def frame(data: bytes, **options: int) -> bytes:
    named = {getattr(zstd.CompressionParameter, name): value for name, value in options.items()}
    return b"\x01" + zstd.compress(data, options=named)


HASH = hash_bytes(bytes(8000))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (frame(bytes(8001)), "expected 8000 bytes, found a frame of more"),
        (frame(bytes(2**30)), "expected 8000 bytes, found a frame of more|memory"),
        (frame(bytes(7999)), "expected one frame of 8000 bytes, found 7999"),
        (frame(bytes(8000)) + b"x", "or bytes after it"),
        (frame(bytes(8000), checksum_flag=1)[:-1], "found 8000, or bytes after it"),
        (frame(bytes([1]) * 8000), f"expected hash {HASH[:16]}, found "),
        (b"\x01nonsense", "cannot be decompressed: "),
        (b"\x03" + frame(bytes(8000))[1:], "expected a shuffle of 1, 2, 4, 8 or 16 bytes, found 3"),
        (b"", "do not match their seal"),
    ],
)
def test_a_malformed_sealed_chunk_is_a_problem_of_bounded_memory(body: bytes, message: str) -> None:
    """Only a faulty encoder makes such chunks. No exception, and no more memory than a chunk."""
    stored = sealed(body, HASH)
    tracemalloc.start()
    try:
        problem = decode(stored, HASH, memoryview(bytearray(8000)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert re.search(message, problem or "")
    assert peak < 100_000


def test_a_frame_with_a_window_larger_than_a_chunk_is_refused() -> None:
    """The frame header alone decides how much memory the decompressor allocates."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 25})
    body = b"\x01" + compressor.compress(bytes(4000)) + compressor.compress(bytes(4000), 2)
    problem = decode(sealed(body, HASH), HASH, memoryview(bytearray(8000)))
    assert problem is not None
    assert "cannot be decompressed" in problem


def test_no_flipped_bit_raises_and_some_pass_without_the_seal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control of the seal: Zstandard by itself does not find every flipped bit."""
    data = words(1, 1500)
    digest = hash_bytes(data)
    stored = bytearray(encode(memoryview(data), "float32", digest))
    target = memoryview(bytearray(len(data)))
    unseen = {"sealed": 0, "unsealed": 0}
    for guard in unseen:
        if guard == "unsealed":
            monkeypatch.setattr("perdure.store.codec.is_intact", lambda *_: True)
        for bit in range((len(stored) - SEAL_BYTES) * 8):
            stored[bit // 8] ^= 1 << bit % 8
            unseen[guard] += decode(memoryview(stored), digest, target) is None
            stored[bit // 8] ^= 1 << bit % 8
    assert unseen["sealed"] == 0
    assert unseen["unsealed"] > 0


# ---------------------------------------------------------------- runs


def test_a_codec_changes_no_fingerprint_and_no_state(
    tmp_path: Path, states: dict[int, dict[str, Leaf]]
) -> None:
    with run_on(tmp_path / "raw") as raw, run_on(tmp_path / "small", codec=CODEC) as small:
        for step, leaves in states.items():
            manifests = [run.save(step, leaves) for run in (raw, small)]
            assert manifests[0].fingerprint == manifests[1].fingerprint
            assert manifests[0].nbytes == manifests[1].nbytes
            assert [manifest.is_encoded for manifest in manifests] == [False, True]
            assert manifests[1].stored_nbytes < manifests[0].stored_nbytes / 4
    reader = Run(tmp_path / "small")
    for step, leaves in states.items():
        assert contents(reader.load(step).leaves) == contents(leaves)
    new = reader.load(2, lambda path: path == "new").leaves
    assert contents(new) == {"new": contents(states[2])["new"]}
    assert check_run(tmp_path / "small").decoded_nbytes > 10_000_000


def test_a_codec_that_comes_and_goes_writes_no_chunk_twice(
    tmp_path: Path, states: dict[int, dict[str, Leaf]]
) -> None:
    for number, codec in enumerate((None, CODEC, None, CODEC)):
        with run_on(tmp_path, codec=codec) as run:
            run.save(2 * number, states[1])
            run.save(2 * number + 1, states[2])
    assert len(list((tmp_path / "packs").iterdir())) == 2
    assert not any(Run(tmp_path).manifest(step).is_encoded for step in Run(tmp_path).steps())
    with run_on(tmp_path, codec=CODEC) as run:
        assert run.save(20, {**states[1], "own": leaf(words(7, 3000))}).is_encoded
        assert len(list((tmp_path / "packs").iterdir())) == 3
    with run_on(tmp_path) as run:
        assert run.save(21, {"own": leaf(words(7, 3000))}).is_encoded
        assert contents(run.load(20).leaves)["own"][2] == words(7, 3000)
    assert check_run(tmp_path).good == tuple(Run(tmp_path).steps())


def test_compaction_moves_stored_bytes_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_on(tmp_path, codec=CODEC) as run:
        for step, leaves in sharing_states().items():
            run.save(step, repeated(leaves))
        without_zstd(monkeypatch)  # a move needs no codec library
        plan = run.plan(PruneRequest(frozenset({1}), MAX_STEP, 0, everywhere=True))
        assert plan.compact
        size = {pack.name: pack.stat().st_size for pack in (tmp_path / "packs").iterdir()}
        run.execute(plan)
        freed = sum(size.values()) - sum(p.stat().st_size for p in (tmp_path / "packs").iterdir())
        assert freed == plan.freed
        monkeypatch.undo()
        for step in (2, 3, 4):
            assert contents(run.load(step).leaves) == contents(repeated(sharing_states()[step]))
    assert check_run(tmp_path).good == (2, 3, 4)


def test_compaction_of_a_chunk_in_both_forms_keeps_the_smaller(
    tmp_path: Path,
) -> None:
    """A chunk is written again if its pack was cut short, and that pack may be restored later."""
    shared, bulk = leaf(words(1, 3000)), make_leaves(9, (30_000,))["model/layer0"]
    with run_on(tmp_path) as run:
        run.save(1, {"shared": shared, "bulk": bulk})
        run.save(2, {"shared": shared})
    (pack,) = (tmp_path / "packs").iterdir()
    whole = pack.read_bytes()
    pack.write_bytes(whole[:100])
    with run_on(tmp_path, codec=CODEC) as run:
        run.save(3, {"shared": shared, "other": make_leaves(8, (30_000,))["model/layer0"]})
        run.save(4, {"shared": shared})
    pack.write_bytes(whole)
    with run_on(tmp_path) as run:
        assert [run.manifest(step).is_encoded for step in (2, 4)] == [False, True]
        plan = run.plan(PruneRequest(frozenset({1, 3}), MAX_STEP, 0, everywhere=True))
        assert len(plan.compact) == 2
        run.execute(plan)
        assert [run.manifest(step).is_encoded for step in (2, 4)] == [True, True]
        (left,) = (tmp_path / "packs").iterdir()
        assert left.stat().st_size == plan.copied < 6000
    assert check_run(tmp_path).good == (2, 4)
    assert contents(Run(tmp_path).load(2).leaves) == contents({"shared": shared})


def test_a_damaged_encoded_chunk_affects_only_checkpoints_that_need_it(tmp_path: Path) -> None:
    with run_on(tmp_path, codec=CODEC) as run:
        for step, leaves in sharing_states().items():
            run.save(step, repeated(leaves))
    pack = next((tmp_path / "packs").glob("000000000001-*"))
    flip(pack, 40_000)
    report = verify_run(Run(tmp_path))
    assert (report.good, report.bad) == ((2, 3, 4), (1,))
    assert "encoded bytes do not match their seal" in report.problems[0].what
    with run_on(tmp_path) as run:
        assert repair(run).report.good == (2, 3, 4)
        assert repair(run).report.ok
    for step in (2, 3, 4):
        assert contents(Run(tmp_path).load(step).leaves) == contents(
            repeated(sharing_states()[step])
        )


def test_a_damaged_index_costs_no_checkpoint(tmp_path: Path) -> None:
    with run_on(tmp_path, codec=CODEC) as run:
        run.save(1, {"a": leaf(words(1, 3000))})
    (pack,) = (tmp_path / "packs").iterdir()
    flip(pack, -100)
    report = verify_run(Run(tmp_path))
    assert (report.ok, report.good) == (False, (1,))
    with run_on(tmp_path) as run:
        assert repair(run).report.ok
        assert contents(run.load(1).leaves) == contents({"a": leaf(words(1, 3000))})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"size":12000', b'"size":4'),
        (b'"size":12000', b'"size":9000000000000000000'),
        (b',"size":12000', b""),
        (b'"format":1', b'"format":4'),
    ],
)
def test_an_impossible_size_is_damage(tmp_path: Path, old: bytes, new: bytes) -> None:
    with run_on(tmp_path, codec=CODEC) as run:
        run.save(1, {"a": leaf(words(1, 3000))})
    manifest = next((tmp_path / "checkpoints").iterdir())
    changed = resealed(manifest.read_bytes(), old, new)
    assert changed != manifest.read_bytes()
    manifest.write_bytes(changed)
    message = r"newer perdure" if new == b'"format":4' else r"step 1|1\.json: leaf 'a'"
    with pytest.raises(StoreError, match=message):
        Run(tmp_path).load(1)


# ---------------------------------------------------------------- two places, several processes


def test_a_copy_takes_encoded_chunks_as_they_are_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": leaf(words(1, 30_000)), "b": leaf(words(2, 700_000))}
    with Run(tmp_path / "here", create=True, codec=CODEC) as run:
        run.save(1, state)
    (pack,) = (tmp_path / "here" / "packs").iterdir()
    with monkeypatch.context() as patched:
        without_zstd(patched)
        copy_run(tmp_path / "here", target := MemoryStorage())
        whole = pack.read_bytes()
        pack.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
        (damaged,) = copy_run(tmp_path / "here", MemoryStorage())
    assert (damaged.outcome, "do not match their seal" in damaged.reason) == ("damaged", True)
    (copied,) = [data for name, data in target.objects.items() if name.startswith("packs/")]
    assert copied == whole
    assert contents(Run(target).load(1).leaves) == contents(state)


OPTIONS = ManagerOptions(codec=CODEC, save_random_state=False)


def test_a_manager_and_a_checkpoint_take_a_codec(tmp_path: Path) -> None:
    state = {"zeros": np.zeros(100_000, np.float32), "step": 3}
    with CheckpointManager(tmp_path / "m", options=OPTIONS) as manager:
        manager.save(1, state)
        manager.wait_until_finished()
        restored = manager.restore(1)
        assert restored.state["zeros"].tobytes() == bytes(400_000)
    group = Checkpoint(**state)
    group.save(tmp_path / "c", 1, CODEC)
    m, c = (Run(tmp_path / place).manifest(1).fingerprint for place in "mc")
    assert m == c
    for place in ("m", "c"):
        (pack,) = (tmp_path / place / "packs").iterdir()
        assert pack.stat().st_size < 1000


# ---------------------------------------------------------------- what is missing or not known


def without_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the codec library, as if the extra were not installed."""
    name = "compression" if sys.version_info >= (3, 14) else "backports"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{name}.zstd", None)


def test_without_the_library_writing_and_reading_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": leaf(words(1, 3000))}
    with run_on(tmp_path, codec=CODEC) as run:
        run.save(1, state)
        run.save(2, {"b": make_leaves(1, (10,))["model/layer0"]})
    without_zstd(monkeypatch)
    reader = Run(tmp_path)
    tries: tuple[Any, ...] = (
        lambda: Run(tmp_path, codec=CODEC),
        lambda: CheckpointManager(tmp_path, options=ManagerOptions(codec=CODEC)),
        lambda: reader.load(1),
        lambda: verify_run(reader),
    )
    for attempt in tries:
        with pytest.raises(StoreError, match=r"pip install 'perdure\[zstd\]'") as caught:
            attempt()
        assert not isinstance(caught.value, CorruptionError), "a missing library is no damage"
    assert contents(reader.load(2).leaves)["b"][2] == bytes(
        make_leaves(1, (10,))["model/layer0"].data
    )
    with run_on(tmp_path) as run:
        run.delete([2])
    with pytest.raises(StoreError, match="perdure") as caught:
        load_good(Run(tmp_path))
    assert not isinstance(caught.value, NoGoodCheckpointError)


def test_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="codec: expected None or 'shuffle-zstd', found 'lz4'"):
        Run(tmp_path, create=True, codec="lz4")
