"""Leaves by pattern and by chunk: every dtype of a checkpoint, verified, in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from perdure import look
from perdure.errors import ArgumentError, CorruptionError, UnsupportedLeafError
from perdure.look import open_checkpoint, read_array, read_elements, scalar_value, select_leaves
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store import Leaf, MemoryStorage, PruneRequest, Run
from perdure.store.format import CHUNK_BYTES
from perdure.store.leaf import numpy_dtype

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "bool": np.array([[True, False]]),
    "int8": np.arange(-3, 3, dtype=np.int8),
    "uint64": np.array(2**63, np.uint64),
    "float16": np.array([np.nan, -0.0, 1.5], np.float16),
    "float64": np.linspace(0, 1, 7).reshape(7, 1),
    "complex64": np.array([1 + 2j, -0.0j], np.complex64),
    "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.arange(-4, 4).astype(ml_dtypes.int4),
    "empty": np.zeros((0, 3), np.float32),
    "large": np.arange(CHUNK_BYTES // 4 * 2 + 5, dtype=np.int32),
}
SCALARS: dict[str, Any] = {
    "none": None,
    "flag": True,
    "count": 10**700,
    "rate": 0.1,
    "z": 1j,
    "name": "digits\n",
    "raw": b"\x00\xff",
}


def save(storage: object, codec: str | None = None) -> None:
    leaves = {f"a/{name}": array_leaf(array) for name, array in ARRAYS.items()}
    leaves |= {f"s/{name}": scalar_leaf(value) for name, value in SCALARS.items()}
    words = memoryview(np.arange(6, dtype=np.uint32).tobytes())
    leaves["key"] = Leaf("key<threefry2x32>", (3,), words)
    leaves["weak"] = Leaf("weak:float32", (), memoryview(np.float32(2).tobytes()))
    with Run(storage, create=True, codec=codec) as run:  # type: ignore[arg-type]
        run.save(1, leaves)


class StreamingMemory(MemoryStorage):
    """A storage that, like a bucket, reads parts that follow each other by one request."""

    streams = 3
    requests = 0

    def read_each(self, name: str, offset: int, targets: Sequence[memoryview]) -> Iterator[int]:
        self.requests += 1
        for target in targets:
            yield self.read_into(name, offset, target)
            offset += len(target)


def test_a_storage_with_streams_is_read_by_a_request_for_many_small_leaves() -> None:
    storage = StreamingMemory()
    with Run(storage, create=True) as run:
        run.save(1, {f"w{n:02}": array_leaf(np.full(10, n)) for n in range(50)})
    checkpoint = open_checkpoint(storage)
    storage.requests = 0
    parts = list(read_elements(checkpoint, select_leaves(checkpoint)))
    assert [part.values[9] for part in parts] == list(range(50))
    assert storage.requests == 1


@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
def test_every_dtype_is_read_as_it_was_saved(codec: str | None) -> None:
    storage = MemoryStorage()
    save(storage, codec)
    checkpoint = open_checkpoint(storage)
    entries = {entry.path: entry for entry in select_leaves(checkpoint)}
    for name, array in ARRAYS.items():
        read = read_array(checkpoint, entries[f"a/{name}"])
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes()
    for name, value in SCALARS.items():
        read = scalar_value(entries[f"s/{name}"])
        assert (type(read), read) == (type(value), value)
    key = read_array(checkpoint, entries["key"])
    assert key.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert read_array(checkpoint, entries["weak"]) == 2


def test_elements_come_chunk_by_chunk_and_only_those_asked_for() -> None:
    storage = MemoryStorage()
    save(storage)
    checkpoint = open_checkpoint(storage)
    large = select_leaves(checkpoint, "a/large")
    parts = list(read_elements(checkpoint, large, {"a/large": [2, 0]}))
    assert [(part.start, part.values.size) for part in parts] == [
        (CHUNK_BYTES // 2, 5),
        (0, CHUNK_BYTES // 4),
    ]
    assert parts[0].values.tolist() == ARRAYS["large"][-5:].tolist()


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("key", ["key"]),
        ("s/na*", ["s/name"]),
        ("**/rate", ["s/rate"]),
        (("key", "weak"), ["key", "weak"]),
        ("s", [f"s/{name}" for name in sorted(SCALARS)]),
    ],
)
def test_patterns_are_those_of_restore(pattern: Any, paths: list[str]) -> None:
    storage = MemoryStorage()
    save(storage)
    assert [entry.path for entry in select_leaves(open_checkpoint(storage), pattern)] == paths


def test_a_pattern_that_matches_nothing_is_refused_with_a_near_path() -> None:
    storage = MemoryStorage()
    save(storage)
    with pytest.raises(ArgumentError) as caught:
        select_leaves(open_checkpoint(storage), ["key", "a/bol"])
    assert "'a/bol'" in str(caught.value)
    assert "a/bool" in str(caught.value)
    assert "'key'" not in str(caught.value)


def test_a_dtype_that_numpy_lacks_is_one_error_that_names_the_leaf() -> None:
    storage = MemoryStorage()
    with Run(storage, create=True) as run:
        run.save(1, {"w": Leaf("float7_x8", (3,), memoryview(bytes(3)))})
    checkpoint = open_checkpoint(storage)
    with pytest.raises(UnsupportedLeafError) as caught:
        read_array(checkpoint, checkpoint.manifest.leaves[0])
    assert "leaf 'w'" in str(caught.value)
    assert "float7_x8" in str(caught.value)


@pytest.mark.parametrize(
    "dtype", ["float128", "U8", "O8", "finfo", "complex32", "M8", "f4", "f4,i4"]
)
def test_a_name_that_means_something_else_to_numpy_is_no_dtype(dtype: str) -> None:
    with pytest.raises(UnsupportedLeafError):
        numpy_dtype(dtype)


def test_the_other_function_is_named_for_an_array_and_for_a_scalar() -> None:
    storage = MemoryStorage()
    save(storage)
    checkpoint = open_checkpoint(storage)
    [array] = select_leaves(checkpoint, "a/float64")
    [scalar] = select_leaves(checkpoint, "s/count")
    with pytest.raises(UnsupportedLeafError, match="read_array") as of_array:
        scalar_value(array)
    with pytest.raises(UnsupportedLeafError, match="scalar_value") as of_scalar:
        read_array(checkpoint, scalar)
    assert "install" not in f"{of_array.value} {of_scalar.value}"


def test_the_names_of_the_module_are_listed() -> None:
    assert {*look.__all__} <= {*dir(look)}


def test_damage_and_a_missing_pack_name_the_leaf_and_what_to_do(tmp_path: Path) -> None:
    save(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    entries = select_leaves(checkpoint, "a/large")
    [pack] = (tmp_path / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    chunk = entries[0].chunks[1]
    data[chunk.offset + 7] ^= 1
    pack.write_bytes(data)
    parts = read_elements(checkpoint, entries)
    assert next(parts).start == 0  # the chunk before it is whole
    with pytest.raises(CorruptionError) as caught:
        list(parts)
    assert "leaf 'a/large'" in str(caught.value)
    assert "perdure verify" in str(caught.value)
    pack.unlink()
    with pytest.raises(CorruptionError) as caught:
        list(read_elements(checkpoint, entries))
    assert "expected a pack, found no such file" in str(caught.value)
    assert pack.name in str(caught.value)


def test_chunks_that_a_prune_moves_are_read_from_their_new_place(tmp_path: Path) -> None:
    kept = np.arange(50_000, dtype=np.int64)
    with Run(tmp_path, create=True) as run:
        run.save(1, {"old": array_leaf(np.tile(kept + 1, 2)), "w": array_leaf(kept)})
        run.save(2, {"w": array_leaf(kept)})
        checkpoint = open_checkpoint(f"{tmp_path}@2")
        run.execute(run.plan(PruneRequest(frozenset({1}), compact_from=0)))
    assert run.manifest(2) != checkpoint.manifest, "nothing was moved"
    assert np.array_equal(read_array(checkpoint, checkpoint.manifest.leaves[0]), kept)


def test_memory_is_that_of_a_few_chunks(tmp_path: Path) -> None:
    chunks = 24
    with Run(tmp_path, create=True) as run:
        run.save(1, {"w": array_leaf(np.arange(chunks * CHUNK_BYTES // 8))})
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    try:
        total = sum(
            int(part.values.sum()) for part in read_elements(checkpoint, checkpoint.manifest.leaves)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    count = chunks * CHUNK_BYTES // 8
    assert total == count * (count - 1) // 2
    assert peak < 8 * CHUNK_BYTES
