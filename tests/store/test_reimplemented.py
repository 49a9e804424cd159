"""A reader written from docs/FORMAT.md alone, without a line of the store: both must agree."""

from __future__ import annotations

import json
import random
from pathlib import Path

from backports import zstd
from blake3 import blake3
from helpers import contents, local_leaves, make_leaves, repeated, run_on

from perdure.store import Leaf

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
    root: Path, step: int, which: str = "leaves"
) -> tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    raw = (root / "checkpoints" / f"{step:012d}.json").read_bytes()
    manifest = json.loads(raw)
    assert manifest["digest"] == blake3(b"{" + raw[77:]).hexdigest()
    assert (manifest["format"] == 3) == ("local" in manifest)
    leaves = {}
    rows = []
    for leaf in manifest[which]:
        if "text" in leaf:
            data = leaf["text"].encode()
            hashes = [blake3(data).hexdigest()]
        else:
            data, hashes = b"", []
            left = leaf.get("size", sum(chunk[3] for chunk in leaf.get("chunks", [])))
            assert manifest["format"] >= 2 or "size" not in leaf
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
    if which == "local":
        return "", leaves
    text = json.dumps(sorted(rows), separators=(",", ":"), ensure_ascii=False)
    assert blake3(text.encode()).hexdigest() == manifest["fingerprint"]
    return manifest["fingerprint"], leaves


def check_pack(path: Path) -> None:
    raw = path.read_bytes()
    assert raw[-16:] == b"perdure-pack-1\n\0"
    length = int.from_bytes(raw[-56:-48], "little")
    index = raw[-56 - length : -56]
    assert blake3(index).digest() == raw[-48:-16]
    at = 0
    told = json.loads(index)
    for digest, stored, *size in told["chunks"]:
        assert len(size) == told["format"] - 1
        part = decoded(raw[at : at + stored], digest, *size or [stored])
        assert blake3(part).hexdigest() == digest
        at += stored
    assert at == len(raw) - 56 - length


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
    assert manifest.format == 2
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
    found, read_back = read(tmp_path, 12)
    assert found == fingerprint
    assert read_back == {**contents(leaves), "größe/a%2Fb": contents(leaves)["model/layer1"]}
    for pack in (tmp_path / "packs").iterdir():
        check_pack(pack)


def test_a_reader_written_from_the_document_agrees_about_local_leaves(tmp_path: Path) -> None:
    leaves, local = make_leaves(4), local_leaves(7, 3)
    with run_on(tmp_path, codec="shuffle-zstd") as run:
        plain = run.save(1, leaves)
        with_local = run.save(2, leaves, local=local)
        encoded = run.save(3, {**leaves, **repeated(make_leaves(5, (2000,)))}, local=local)
    assert (plain.format, with_local.format, encoded.format) == (1, 3, 3)
    assert with_local.fingerprint == plain.fingerprint
    for step in (2, 3):
        assert read(tmp_path, step, "local")[1] == contents(local)
    assert read(tmp_path, 2) == (plain.fingerprint, contents(leaves))
    assert read(tmp_path, 3)[0] == encoded.fingerprint
    for pack in (tmp_path / "packs").iterdir():
        check_pack(pack)
