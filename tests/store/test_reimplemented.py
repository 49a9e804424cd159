"""A reader written from docs/FORMAT.md alone, without a line of the store: both must agree."""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3
from helpers import contents, make_leaves, run_on

CHUNK = 4_194_304


def read(root: Path, step: int) -> tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    raw = (root / "checkpoints" / f"{step:012d}.json").read_bytes()
    manifest = json.loads(raw)
    assert manifest["digest"] == blake3(b"{" + raw[77:]).hexdigest()
    leaves = {}
    rows = []
    for leaf in manifest["leaves"]:
        if "text" in leaf:
            data = leaf["text"].encode()
            hashes = [blake3(data).hexdigest()]
        else:
            data, hashes = b"", []
            for digest, pack, offset, length in leaf.get("chunks", []):
                with (root / "packs" / manifest["packs"][pack]["name"]).open("rb") as file:
                    file.seek(offset)
                    part = file.read(length)
                assert blake3(part).hexdigest() == digest
                data += part
                hashes.append(digest)
            assert all(h[3] == CHUNK for h in leaf.get("chunks", [])[:-1])
        shape = leaf.get("shape", [])
        leaves[leaf["path"]] = (leaf["dtype"], tuple(shape), data)
        rows.append([leaf["path"], leaf["dtype"], shape, hashes])
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
    for digest, size in json.loads(index)["chunks"]:
        assert blake3(raw[at : at + size]).hexdigest() == digest
        at += size
    assert at == len(raw) - 56 - length


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
