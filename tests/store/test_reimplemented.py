"""A reader written from docs/FORMAT.md alone, without code of the store, must agree with the store."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backports import zstd
from blake3 import blake3
from helpers import contents, local_leaves, make_leaves, repeated, run_on

from perdure.state import snapshot
from perdure.store import Leaf
from perdure.testing import check_run

CHUNK = 4_194_304


def decoded(stored: bytes, digest: str, size: int) -> bytes:
    if len(stored) == size:
        return stored
    assert len(stored) < size
    body, seal = stored[:-32], stored[-32:]
    assert blake3(body, key=bytes.fromhex(digest)).digest() == seal
    width, plain = body[0], zstd.decompress(body[1:])
    assert width in (1, 2, 4, 8, 16)
    assert len(plain) == size
    count = size // width
    assert count * width == size
    return bytes(plain[i % width * count + i // width] for i in range(size))


def read(
    root: Path, step: int, field: str = "leaves"
) -> tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    raw = (root / "checkpoints" / f"{step:012d}.json").read_bytes()
    manifest = json.loads(raw)
    assert manifest["digest"] == blake3(b"{" + raw[77:]).hexdigest()
    assert manifest["format"] == 1
    leaves = {}
    rows = []
    for leaf in manifest[field]:
        if "text" in leaf:
            data = leaf["text"].encode()
            hashes = [blake3(data).hexdigest()]
        else:
            data, hashes = b"", []
            left = leaf.get("size", sum(chunk[3] for chunk in leaf.get("chunks", [])))
            for digest, pack, offset, length in leaf.get("chunks", []):
                with (root / "packs" / manifest["packs"][pack]["name"]).open("rb") as file:
                    file.seek(offset)
                    part = decoded(file.read(length), digest, min(left, CHUNK))
                left -= len(part)
                assert blake3(part).hexdigest() == digest
                data += part
                hashes.append(digest)
            assert left == 0
        shape = leaf.get("shape", [])
        leaves[leaf["path"]] = (leaf["dtype"], tuple(shape), data)
        rows.append([leaf["path"], leaf["dtype"], shape, hashes])
    if field == "local":
        return "", leaves
    text = json.dumps(sorted(rows), separators=(",", ":"), ensure_ascii=False)
    assert blake3(text.encode()).hexdigest() == manifest["fingerprint"]
    return manifest["fingerprint"], leaves


def rebuild(root: Path, step: int, path: str) -> Any:
    """The state of the object at `path`, with arrays as (class, dtype, shape, bytes)."""
    raw = (root / "checkpoints" / f"{step:012d}.json").read_bytes()
    manifest = json.loads(raw)
    assert manifest["format"] == 1
    leaves = read(root, step)[1]
    containers = manifest["containers"]

    def part(text: str) -> str:
        return text.replace("%", "%25").replace("/", "%2F")

    def below(path: str) -> list[str]:
        cut = len(path) + 1
        paths = [*leaves, *containers]
        return sorted({p[cut:].split("/")[0] for p in paths if p.startswith(path + "/")})

    def value(path: str, arrays: str | None) -> Any:
        entry = containers.get(path, {"kind": "dict"})
        arrays = entry.get("arrays", arrays)
        if path in leaves:
            dtype, shape, data = leaves[path]
            if not dtype.startswith("py:"):
                return (arrays, dtype, shape, data)
            text = data.decode()
            return {"py:int": int, "py:str": str, "py:none": lambda _: None}[dtype](text)
        parts = below(path)
        if entry["kind"] in ("dict", "OrderedDict", "defaultdict", "Counter"):
            names = [p.replace("%2F", "/").replace("%25", "%") for p in parts]
            keys = entry.get("keys", sorted(names))
            assert sorted(map(str, keys)) == sorted(names)
            pairs = {key: value(f"{path}/{part(str(key))}", arrays) for key in keys}
            kinds = {
                "OrderedDict": OrderedDict,
                "Counter": Counter,
                "defaultdict": lambda pairs: defaultdict(
                    {"list": list, None: None}[entry.get("factory")], pairs
                ),
            }
            return kinds.get(entry["kind"], dict)(pairs)
        values = [value(f"{path}/{i}", arrays) for i in range(len(parts))]
        kinds = {
            "list": list,
            "tuple": tuple,
            "set": set,
            "frozenset": frozenset,
            "deque": lambda values: deque(values, entry.get("maxlen")),
        }
        return kinds[entry["kind"]](values)

    return value(path, None)


def check_pack(path: Path) -> None:
    raw = path.read_bytes()
    assert raw[-16:] == b"perdure-pack-1\n\0"
    length = int.from_bytes(raw[-56:-48], "little")
    index = raw[-56 - length : -56]
    assert blake3(index).digest() == raw[-48:-16]
    offset = 0
    header = json.loads(index)
    assert header["format"] == 1
    for digest, stored, size in header["chunks"]:
        part = decoded(raw[offset : offset + stored], digest, size)
        assert blake3(part).hexdigest() == digest
        offset += stored
    assert offset == len(raw) - 56 - length


def test_a_reader_written_from_the_document_agrees_about_encoded_chunks(tmp_path: Path) -> None:
    words = random.Random(0).randbytes(100) * 43_000
    leaves = {
        **repeated(make_leaves(1, (2000, 40, 0))),
        "large": Leaf("int16", (2_150_000,), memoryview(words), True),
        "half": Leaf("complex64", (2000,), memoryview(words[:16_000]), True),
    }
    with run_on(tmp_path, codec="shuffle-zstd") as run:
        run.save(1, make_leaves(3))
        manifest = run.save(12, {**leaves, **make_leaves(3, (1000,))})
    assert manifest.is_encoded
    assert manifest.stored_nbytes < manifest.nbytes / 3
    assert read(tmp_path, 12) == (
        manifest.fingerprint,
        contents({**leaves, **make_leaves(3, (1000,))}),
    )
    for pack in (tmp_path / "packs").iterdir():
        check_pack(pack)


def test_a_reader_written_from_the_document_agrees(tmp_path: Path) -> None:
    leaves = make_leaves(4, (CHUNK + 17, 12, 0))
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(3))
        fingerprint = run.save(12, {**leaves, "größe/a%2Fb": leaves["model/layer1"]}).fingerprint
    hashed, read_back = read(tmp_path, 12)
    assert hashed == fingerprint
    assert read_back == {**contents(leaves), "größe/a%2Fb": contents(leaves)["model/layer1"]}
    for pack in (tmp_path / "packs").iterdir():
        check_pack(pack)


def test_a_reader_written_from_the_document_rebuilds_the_state_of_an_object(tmp_path: Path) -> None:
    state = {
        "b": [1, (), {}, {"x/y": None, "%": "text"}],
        "a": {2: 1, 1: (2, [3]), "s": set()},
        "c": OrderedDict(z=1, a=[2]),
        "d": defaultdict(list, {"q": [1]}),
        "e": deque([1], maxlen=4),
        "f": Counter({7: 2}),
        "g": {1, None},
        "h": frozenset(),
        "digits": {"0": 1, "1": 2},
    }
    ones = torch.ones(2)
    arrays = {"t": ones, "p": torch.nn.Parameter(ones), "n": np.ones(2, np.float32), "u": [ones]}

    class Object:
        def state_dict(self) -> dict[str, Any]:
            return {**state, "arrays": arrays}

        def load_state_dict(self, _: Any) -> None: ...

    with run_on(tmp_path) as run:
        run.save(12, snapshot({"o": Object()}))
    rebuilt = rebuild(tmp_path, 12, "o")
    data = ("float32", (2,), b"\0\0\x80?" * 2)
    assert rebuilt.pop("arrays") == {
        "t": ("torch", *data),
        "p": ("torch.Parameter", *data),
        "n": ("numpy", *data),
        "u": [("torch", *data)],
    }
    assert repr(rebuilt) == repr(state)


def test_a_reader_written_from_the_document_agrees_about_weak_types(tmp_path: Path) -> None:
    words = struct.pack("<3f", 0.1, -0.0, 7.5)
    leaves = {"a": Leaf("weak:float32", (3,), memoryview(words), frozen=True)}
    with run_on(tmp_path, codec="shuffle-zstd") as run:
        run.save(1, leaves)
        run.save(2, {"a": leaves["a"].strong()})
    hashed, read_back = read(tmp_path, 1)
    dtype, shape, data = read_back["a"]
    assert (dtype, shape, data) == ("weak:float32", (3,), words)
    assert np.frombuffer(data, np.dtype(dtype.removeprefix("weak:"))).tolist()[1:] == [-0.0, 7.5]
    assert read(tmp_path, 2)[0] != hashed, "a strong type is another state"
    assert check_run(tmp_path).good == (1, 2)


def test_a_reader_written_from_the_document_agrees_about_local_leaves(tmp_path: Path) -> None:
    leaves, local = make_leaves(4), local_leaves(7, 3)
    with run_on(tmp_path, codec="shuffle-zstd") as run:
        plain = run.save(1, leaves)
        with_local = run.save(2, leaves, process_leaves=local)
        encoded = run.save(3, {**leaves, **repeated(make_leaves(5, (2000,)))}, process_leaves=local)
    assert (plain.is_encoded, with_local.is_encoded, encoded.is_encoded) == (False, False, True)
    assert with_local.fingerprint == plain.fingerprint
    for step in (2, 3):
        assert read(tmp_path, step, "local")[1] == contents(local)
    assert read(tmp_path, 2) == (plain.fingerprint, contents(leaves))
    assert read(tmp_path, 3)[0] == encoded.fingerprint
    for pack in (tmp_path / "packs").iterdir():
        check_pack(pack)
