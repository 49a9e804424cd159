"""The format: every flipped bit is found, newer versions are no damage, hashes never change."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import contents, make_leaves, repeated, run_on

from perdure.errors import CorruptionError, FormatVersionError
from perdure.store import Leaf, MemoryStorage, Run, verify_run
from perdure.store.format import hash_bytes, manifest_name, seconds_of, time_text
from perdure.store.manifest import plain_metrics
from perdure.store.manifest_json import decode_manifest, encode_manifest

GOLDEN = "b381e58e"
GOLDEN_RUN = "4d097f5afc501850dc614ff4a0f91480784b6830e2235eef4518774ebf21dc1e"


@pytest.fixture
def saved() -> MemoryStorage:
    storage = MemoryStorage()
    with run_on(storage) as run:
        run.save(7, make_leaves(1), {"replicas": 8, "seed": 0})
    return storage


def test_a_manifest_reads_back(saved: MemoryStorage) -> None:
    data = saved.objects[manifest_name(7)]
    manifest = decode_manifest(data, "here", 7)
    assert encode_manifest(manifest) == data
    assert manifest.recipe == {"replicas": 8, "seed": 0}


def test_bytes_without_a_codec_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda _: bytes(4))
    storage = MemoryStorage()
    with run_on(storage) as run:
        run.save(1, make_leaves(1))
        run.save(2, {**make_leaves(1), "large": make_leaves(2, (5_000_000,))["model/layer0"]})
    objects = sorted((n, data) for n, data in storage.objects.items() if n != "lock")
    digest = hash_bytes(b"".join(name.encode() + b"\0" + data for name, data in objects))
    assert digest == GOLDEN_RUN


def test_every_single_flipped_bit_of_packs_and_manifests_is_found(saved: MemoryStorage) -> None:
    flip_every_bit(saved)


def test_every_single_flipped_bit_of_encoded_packs_is_found() -> None:
    storage = MemoryStorage()
    with run_on(storage, codec="shuffle-zstd") as run:
        words = repeated(make_leaves(1, (40,)), 128)["model/layer0"]
        assert run.save(7, {"a": Leaf("int32", (1280,), words.data)}).is_encoded
    flip_every_bit(storage)
    data = bytearray(storage.objects["packs/" + Run(storage).manifest(7).packs[0].name])
    data[9] ^= 1
    storage.objects["packs/" + Run(storage).manifest(7).packs[0].name] = bytes(data)
    with pytest.raises(CorruptionError, match=r"leaf 'a', .* at offset 0: its \d+ encoded bytes"):
        Run(storage).load(7)


def flip_every_bit(saved: MemoryStorage) -> None:
    """Flip each bit on its own; the check must find each one."""
    detected = tried = 0
    for name in [n for n in saved.objects if n.startswith(("packs/", "checkpoints/"))]:
        whole = saved.objects[name]
        for bit in range(len(whole) * 8):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            saved.objects[name] = bytes(damaged)
            tried += 1
            detected += not verify_run(Run(saved)).ok
        saved.objects[name] = whole
    assert tried > 5_000
    assert detected == tried
    assert verify_run(Run(saved)).ok, "the control: without a flip there is nothing to find"


@pytest.mark.parametrize("keep", [0, 1, 76, 77, 200, -1])
def test_a_manifest_cut_short_is_damage(saved: MemoryStorage, keep: int) -> None:
    name = manifest_name(7)
    saved.objects[name] = saved.objects[name][:keep]
    with pytest.raises(CorruptionError, match=r"000000000007\.json: .*a manifest"):
        Run(saved).manifest(7)


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """A changed manifest with a correct digest."""
    body = b"{" + data[77:].replace(old, new, 1)
    return b'{"digest":"' + hash_bytes(body).encode() + b'",' + body[1:]


def test_a_newer_manifest_format_is_refused_with_its_version(saved: MemoryStorage) -> None:
    data = resealed(saved.objects[manifest_name(7)], b'"format":1', b'"format":2')
    with pytest.raises(FormatVersionError, match=r"format 2; this perdure reads up to format 1"):
        decode_manifest(data, "here")


def test_a_newer_run_directory_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "perdure.json").write_text('{"format":9,"created":"2030","new":1}\n')
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FormatVersionError, match="Install a newer perdure"):
        Run(tmp_path, create=True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step":7', b'"step":8'),
        (b'"step":7', b'"step":"7"'),
        (b'"step":7', b'"step":-7'),
        (b'"step":7', b'"step":7,"more":1'),
        (b'"packs":[{', b'"packs":[],"leaves":[{"path":"a","dtype":"b"}],"x":[{'),
        (b'"model/layer0"', b'"model/layerX"'),
    ],
)
def test_a_malformed_manifest_is_damage(saved: MemoryStorage, old: bytes, new: bytes) -> None:
    data = resealed(saved.objects[manifest_name(7)], old, new)
    with pytest.raises(CorruptionError):
        decode_manifest(data, "here", 7)


def test_the_fingerprint_does_not_depend_on_packs_or_on_the_order_of_leaves(tmp_path: Path) -> None:
    leaves = make_leaves(1)
    with run_on(tmp_path / "fresh") as run:
        alone = run.save(3, dict(reversed(leaves.items()))).fingerprint
    with run_on(tmp_path / "shared") as run:
        run.save(1, {**make_leaves(2), "model/layer0": leaves["model/layer0"]})
        assert len(run.save(3, leaves).packs) == 2
        assert run.manifest(3).fingerprint == alone
        assert contents(run.load(3).leaves) == contents(leaves)


def test_the_fingerprint_of_a_known_state_never_changes(saved: MemoryStorage) -> None:
    assert Run(saved).manifest(7).fingerprint[:8] == GOLDEN


@pytest.mark.parametrize("seconds", [0, 1, 951782400, 4102444799, -1])
def test_a_date_is_read_back(seconds: int) -> None:
    assert seconds_of(time_text(seconds)) == seconds


@pytest.mark.parametrize("created", ["2026-02-30T00:00:00Z", "yesterday", "2026-01-01 00:00:00"])
def test_a_manifest_with_a_malformed_date_is_damage(saved: MemoryStorage, created: str) -> None:
    data = resealed(saved.objects[manifest_name(7)], b"1970-01-01T00:00:00Z", created.encode())
    with pytest.raises(CorruptionError, match=r"created|not a valid manifest"):
        decode_manifest(data, "here", 7)


def test_metrics_that_json_cannot_hold_are_texts() -> None:
    plain = plain_metrics({"a": 1, "b": float("nan"), "c": float("-inf"), "d": 0.1})
    assert plain == {"a": 1.0, "b": "NaN", "c": "-Infinity", "d": 0.1}
