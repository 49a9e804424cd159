"""safetensors: one file, or Hugging Face's folder of shards with an index.

A file is 8 bytes with the length of the header, the header in JSON, and the bytes of the arrays without
gaps. Written a chunk at a time, which the safetensors library cannot, and with the same bytes as by it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perdure.checkpoint.address import StoredCheckpoint
from perdure.convert.formats import ForeignFile, LeafNote, NamedLeaf, noted_file, text_notes
from perdure.errors import ArgumentError, DataError
from perdure.look.leaf_reader import ChunksOf, chunks_in_order
from perdure.store.format import Natural
from perdure.store.leaf import Leaf
from perdure.store.manifest_json import item_bytes

_HEADER = "__metadata__"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000
_NOTES = "perdure"
"""The name of the notes in a header, which are JSON."""
_FINGERPRINT = "perdure_fingerprint"
"""The name of the fingerprint in the header of a file that is whole, or in an index."""
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")

# In the order of the safetensors library, which writes the arrays of later dtypes first, so that each
# array is aligned.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_NAMES = {code: dtype for dtype, code in DTYPES.items()}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


def write(
    path: str,
    checkpoint: StoredCheckpoint,
    arrays: Sequence[NamedLeaf],
    scalars: Sequence[NamedLeaf],
    *,
    fingerprint: str,
    shard_bytes: int | None = None,
) -> None:
    """Write a file, or a folder of files of at most `shard_bytes`; scalars are notes in the first."""
    shards = _shards(arrays, shard_bytes or sum(leaf.entry.nbytes for leaf in arrays))
    chunks_of = chunks_in_order(checkpoint, [leaf.entry for shard in shards for leaf in shard])
    notes = text_notes(scalars)
    mark = {_FINGERPRINT: fingerprint}
    if shard_bytes is None:
        _write_file(path, shards[0], chunks_of, notes, mark)
        return
    os.mkdir(path)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]
    for shard, name in zip(shards, names, strict=True):
        whole = mark if len(shards) == 1 else {}
        _write_file(os.path.join(path, name), shard, chunks_of, notes, whole)
        notes = {}  # those of scalars are in the first file
    if len(shards) > 1:
        files = zip(shards, names, strict=True)
        weight_map = {leaf.name: name for shard, name in files for leaf in shard}
        total = sum(leaf.entry.nbytes for leaf in arrays)
        index = {"metadata": {"total_size": total, **mark}, "weight_map": weight_map}
        with open(os.path.join(path, INDEX), "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(leaves: Sequence[NamedLeaf], most: int) -> list[list[NamedLeaf]]:
    """Arrays by shard, as `huggingface_hub.split_torch_state_dict_into_shards` splits them."""
    shards: list[list[NamedLeaf]] = []
    current: list[NamedLeaf] = []
    size = 0
    for leaf in leaves:
        nbytes = leaf.entry.nbytes
        if nbytes > most:
            shards.append([leaf])
            continue
        if current and size + nbytes > most:
            shards.append(current)
            current, size = [], 0
        current.append(leaf)
        size += nbytes
    if current or not shards:
        shards.append(current)
    return [sorted(shard, key=lambda leaf: (-_RANK[leaf.dtype], leaf.name)) for shard in shards]


def _write_file(
    path: str,
    leaves: Sequence[NamedLeaf],
    chunks_of: ChunksOf,
    notes: Mapping[str, LeafNote],
    mark: Mapping[str, str],
) -> None:
    if any(leaf.name == _HEADER for leaf in leaves):
        raise ArgumentError(
            f"leaf {_HEADER}: this name has another meaning in a safetensors file; give it another "
            f"one: `--names`."
        )
    notes = {**notes, **{leaf.name: leaf.note for leaf in leaves if leaf.note != LeafNote()}}
    metadata = {"format": "pt", **mark}  # transformers refuses a file without the format
    if notes:
        metadata[_NOTES] = msgspec.json.encode(notes).decode()
    header: dict[str, Any] = {_HEADER: metadata}
    offset = 0
    for leaf in leaves:
        end = offset + leaf.entry.nbytes
        header[leaf.name] = _Entry(DTYPES[leaf.dtype], leaf.shape, (offset, end))
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ArgumentError(
            f"the header of a safetensors file would have {len(text)} bytes, and its readers accept "
            f"{MAX_HEADER}; take fewer leaves, or a smaller `--shard-size`."
        )
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for leaf in leaves:
            for data in chunks_of(leaf.entry):
                file.write(data)


def read(path: str) -> ForeignFile:
    """The arrays, mapped, of a file, or of a folder with one file or an index; or `DataError`."""
    if not os.path.isdir(path):
        return _read_file(path)
    index = os.path.join(path, INDEX)
    if not os.path.exists(index):
        return _read_file(os.path.join(path, _only_file(path)))
    try:
        with open(index, "rb") as file:
            listed = msgspec.json.decode(file.read(), type=_Index)
    except (OSError, ValueError) as error:
        raise DataError(f"{index}: not an index of safetensors files: {error}.") from error
    weight_map, metadata = listed.weight_map, listed.metadata or {}
    whole = ForeignFile({}, {}, metadata.get(_FINGERPRINT))
    for name in dict.fromkeys(weight_map.values()):
        if not re.fullmatch(r"[^/\\]+", name):
            raise DataError(f"{index}: expected names of files in this folder, found {name!r}.")
        found = _read_file(os.path.join(path, name))
        if twice := whole.leaves.keys() & found.leaves.keys():
            raise DataError(f"{path}: {min(twice)!r} is in two files.")
        whole.leaves.update(found.leaves)
        whole.paths.update(found.paths)
    if lacking := weight_map.keys() - whole.leaves.keys():
        raise DataError(f"{path}: no file has {min(lacking)!r}, which the index names.")
    return whole


def _only_file(folder: str) -> str:
    """The only file of a folder without an index, if its name does not say that there are others."""
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if len(files) != 1:
        raise DataError(
            f"{folder}: expected {INDEX} or one .safetensors file, found {', '.join(files) or 'none'}."
        )
    match = _SHARD.fullmatch(files[0])
    if match is not None and int(match[2]) > 1:
        raise DataError(
            f"{folder}: {files[0]} is one of {int(match[2])} files, and {INDEX} and the other "
            f"{int(match[2]) - 1} are missing. Put them beside it, or name the file itself to import "
            f"what it holds."
        )
    return files[0]


def _read_file(path: str) -> ForeignFile:
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise DataError(f"{path}: expected a file.")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError(f"its header cannot have {length} bytes in a file of {size}")
            text = file.read(length)
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[8 + length :]
        raw = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
        metadata = msgspec.convert(raw.pop("__metadata__", {}), dict[str, str])
        notes = msgspec.json.decode(metadata.get(_NOTES, "{}"), type=dict[str, LeafNote])
        found = noted_file(_leaves(data, msgspec.convert(raw, dict[str, _Entry])), notes)
        return found._replace(fingerprint=metadata.get(_FINGERPRINT))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}.") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a whole safetensors file: {error}.") from error


def _without_duplicates(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in fields}) < len(fields):
        raise ValueError("its header has a name twice")
    return dict(fields)


def _leaves(data: memoryview, entries: dict[str, _Entry]) -> dict[str, Leaf]:
    """The arrays of a file; raises `ValueError` if its header does not fit its bytes."""
    leaves: dict[str, Leaf] = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if start != position or not start <= end <= len(data):
            raise ValueError(
                f"{name!r} lies at {start} to {end} of {len(data)} bytes, not at {position}"
            )
        position = end
        if entry.dtype not in _NAMES:
            raise ValueError(
                f"{name!r} has the dtype {entry.dtype!r}, which this perdure does not know"
            )
        dtype = _NAMES[entry.dtype]
        if math.prod(entry.shape) * (item_bytes(dtype) or 0) != end - start:
            raise ValueError(f"{name!r} of shape {entry.shape} has {end - start} bytes")
        leaves[name] = Leaf(dtype, entry.shape, data[start:end], frozen=True)
    if position != len(data):
        raise ValueError(f"its arrays end at {position} of {len(data)} bytes")
    return leaves
