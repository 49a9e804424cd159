"""Many leaves: blocks of JSON and groups of chunks give the bytes of one leaf after another."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from helpers import run_on

from perdure.errors import CorruptionError
from perdure.store import Leaf, MemoryStorage, Run, pack_writer
from perdure.store.format import PACKS, chunk_spans, hash_bytes
from perdure.store.manifest import Chunk, Container, LeafEntry, Manifest, PackEntry, fingerprint
from perdure.store.manifest_json import (
    checked_fingerprint,
    decode_manifest,
    encode_checked,
    encode_manifest,
)
from perdure.store.pack_index import encode_pack_tail

NAME = "000000000001-00000-5f0c9a1e.pack"
TAIL_BYTES = 262_144 + 100
"""A leaf of so many bytes is one large chunk in the pack, whose bytes are no whole blocks."""


@pytest.fixture(params=[2, 3, 1024])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("perdure.store.format.BLOCK_ITEMS", request.param)
    return request.param


def manifest_of(entries: list[LeafEntry]) -> Manifest:
    packs = (PackEntry(name=NAME, size=10**6),)
    digest = checked_fingerprint(packs, entries, "here")
    return Manifest(
        1, "a run", 1, "2026-01-31T23:59:59Z", digest, {'"\0': "\0"}, {}, packs, tuple(entries)
    )


def some_entries(count: int) -> list[LeafEntry]:
    """Arrays of one chunk, and a scalar, an empty array and an array of other type among them."""
    entries = [
        LeafEntry(f"é{i:05d}", "uint8", (9,), (Chunk(hash_bytes(b"%d" % i), 0, 9 * i, 9),))
        for i in range(count)
    ]
    for number, other in (
        (1, LeafEntry("", "py:str", text='"leaves":[]')),
        (3, LeafEntry("", "float32", (0, 2))),
        (4, LeafEntry("", "int8", (3, 3), (Chunk(hash_bytes(b"x"), 0, 0, 9),))),
    ):
        if number < count:
            entries[number] = msgspec.structs.replace(other, path=entries[number].path)
    return entries


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6, 7])
def test_blocks_give_the_bytes_of_the_whole(block: int, count: int) -> None:
    entries = some_entries(count)
    manifest = manifest_of(entries)
    rows = [(leaf.path, leaf.dtype, leaf.shape, leaf.hashes()) for leaf in entries]
    assert manifest.fingerprint == hash_bytes(msgspec.json.encode(rows)) == fingerprint(rows[::-1])
    body = msgspec.json.encode(manifest, order="deterministic") + b"\n"
    expected = b'{"digest":"' + hash_bytes(body).encode() + b'",' + body[1:]
    assert encode_manifest(manifest) == b"".join(encode_checked(manifest, "here")) == expected
    assert decode_manifest(expected, "here") == manifest
    chunks = [(hash_bytes(b"%d" % i), i) for i in range(count)]
    rows = [(digest, length, length) for digest, length in chunks]
    index = msgspec.json.encode({"format": 1, "chunks": rows})
    assert encode_pack_tail(rows).startswith(index + len(index).to_bytes(8, "little"))


@pytest.mark.parametrize("number", [0, 2, 5])
@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (-9,)},
        {"path": 7},
        {"chunks": (Chunk("0" * 63, 0, 0, 9),)},
        {"chunks": (Chunk("0" * 64, 0, 2**63, 9),)},
    ],
)
def test_a_leaf_that_cannot_be_read_back_is_refused_in_any_block(
    block: int, number: int, wrong: dict[str, object]
) -> None:
    manifest = manifest_of(some_entries(6))
    leaves = list(manifest.leaves)
    leaves[number] = msgspec.structs.replace(leaves[number], **wrong)
    broken = msgspec.structs.replace(manifest, leaves=tuple(leaves))
    assert encode_manifest(broken)  # only the check sees it
    with pytest.raises(CorruptionError, match="here"):
        encode_checked(broken, "here")
    with pytest.raises(CorruptionError, match="here"):
        encode_checked(msgspec.structs.replace(manifest, created="today"), "here")
    lost = {"gone": Container("array")}
    with pytest.raises(CorruptionError, match="do not fit the leaves"):
        encode_checked(msgspec.structs.replace(manifest, containers=lost), "here")


def mixed_state(seed: int) -> dict[str, Leaf]:
    """Small arrays, some of them equal, among large ones, scalars and empty arrays, not sorted."""
    source = random.Random(seed)
    sizes = [8, 64, 5, 64, 0, TAIL_BYTES, 64, 3, 64] * 6 + [4_194_304 + 7]
    leaves = {}
    for number, size in enumerate(sizes):
        # A third of them is equal in both states, and to others: in one group, and in several.
        data = (random.Random(size) if number % 3 == 0 else source).randbytes(size)
        leaves[f"m/{source.random()}"] = Leaf("uint8", (size,), memoryview(data))
        leaves[f"m/{source.random()}"] = Leaf("py:int", (), b"%d" % number)
    return leaves


@pytest.mark.parametrize(("gather", "chunks_of"), [(1, 4096), (100, 7), (262_144, 5)])
def test_groups_of_small_chunks_keep_every_leaf_and_write_no_bytes_twice(
    monkeypatch: pytest.MonkeyPatch, gather: int, chunks_of: int
) -> None:
    monkeypatch.setattr("perdure.store.pack_writer.GATHER_BYTES", gather)
    monkeypatch.setattr("perdure.store.pack_writer.GATHER_CHUNKS", chunks_of)
    storage = MemoryStorage()
    first, second = mixed_state(1), mixed_state(2)
    with run_on(storage) as run:
        run.save(1, first)
        run.save(2, second)
        manifests = {step: run.manifest(step) for step in (1, 2)}
    for step, leaves in ((1, first), (2, second)):
        loaded = Run(storage).load(step).leaves
        assert {path: bytes(leaf.data) for path, leaf in loaded.items()} == {
            path: bytes(leaf.data) for path, leaf in leaves.items()
        }
        names = [pack.name for pack in manifests[step].packs]
        met = [names[chunk.pack] for leaf in manifests[step].leaves for chunk in leaf.chunks]
        assert list(dict.fromkeys(met)) == names  # numbered as the leaves need them
    chunks = {
        digest: stop - start
        for leaf in (*first.values(), *second.values())
        if not leaf.is_scalar
        for digest, (start, stop) in zip(leaf.hashes(), chunk_spans(leaf.nbytes), strict=True)
    }
    tails = sum(
        len(encode_pack_tail([*placed]))
        for placed in (
            {
                (chunk.hash, chunk.length, chunk.length)
                for leaf in manifests[step].leaves
                for chunk in leaf.chunks
                if manifests[step].packs[chunk.pack].name.startswith(f"{step:012d}")
            }
            for step in (1, 2)
        )
    )
    written = sum(len(data) for name, data in storage.objects.items() if name.startswith(PACKS))
    assert len(manifests[2].packs) == 2
    assert written == sum(chunks.values()) + tails
    every_chunk = sum(leaf.nbytes for leaf in (*first.values(), *second.values()))
    assert every_chunk > 1.2 * sum(chunks.values())  # control: there was something to share


def test_paths_are_those_of_different_leaves_of_a_tree() -> None:
    """Every set of up to three paths, of which some come between a path and those below it."""
    names = ["", "a", "a!", "a.b/c", "a/", "a/b", "a/b!", "a/b/c", "a//b", "a0", "/a", "b", "b/c"]
    refused = 0
    for count in (1, 2, 3):
        for paths in itertools.combinations(sorted(names), count):
            parts = [path.split("/") for path in paths if path]
            is_tree = all(map(all, parts)) and not any(
                lower.startswith(f"{upper}/") for upper in paths for lower in paths
            )
            refused += not is_tree
            leaves = [LeafEntry(path, "py:none", text="") for path in paths]
            if is_tree:
                assert checked_fingerprint((), leaves, "here")
                continue
            with pytest.raises(CorruptionError, match="path"):
                checked_fingerprint((), leaves, "here")
    assert refused > 100
    for paths in (["a", "a"], ["b", "a"]):
        with pytest.raises(CorruptionError, match=r"is the same|not sorted"):
            checked_fingerprint((), [LeafEntry(p, "py:none", text="") for p in paths], "here")


@pytest.mark.parametrize("count", [3, 12, 24])
def test_a_pack_of_one_thread_has_the_bytes_of_a_pack_of_several(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large chunks of whole blocks and of others, one of them twice; above the limit threads hash."""
    source = random.Random(count)
    leaves = {
        f"w{n}": Leaf("uint8", (size,), source.randbytes(size))
        for n, size in enumerate([417_792 - n % 3 for n in range(count)])
    }
    leaves["again"] = leaves["w1"]
    threads = []
    ahead = pack_writer.map_ahead
    monkeypatch.setattr(
        pack_writer, "map_ahead", lambda *args: (threads.append(1), ahead(*args))[1]
    )
    monkeypatch.setattr("os.urandom", bytes)
    objects = []
    for limit in (pack_writer.ALONE_BYTES, 0):
        monkeypatch.setattr(pack_writer, "ALONE_BYTES", limit)
        storage = MemoryStorage()
        with Run(storage, create=True, clock=lambda: 0) as run:
            run.save(1, leaves)
        names = (n for n in storage.objects if n.startswith(("packs/", "checkpoints/")))
        objects.append({name: storage.objects[name] for name in names})
    assert objects[0] == objects[1]
    assert len(objects[0]) == 2
    assert len(threads) == (1 if count < 24 else 2)  # the second save has none alone
