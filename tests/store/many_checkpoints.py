"""A run directory with many small checkpoints, made without the time of as many saves."""

from __future__ import annotations

from perdure.store import Leaf
from perdure.store.format import PACKS, hash_bytes, manifest_name, pack_name, time_text
from perdure.store.log import LogWriter
from perdure.store.manifest import Chunk, LeafEntry, Manifest, PackEntry
from perdure.store.manifest_json import checked_fingerprint, encode_manifest
from perdure.store.pack_index import encode_pack_tail
from perdure.store.run_events import Started
from perdure.store.run_log import LOG
from perdure.store.run_marker import new_marker, write_marker
from perdure.store.storage import Storage, create_whole

CHUNKS = 4


def leaves_of(step: int) -> dict[str, Leaf]:
    """The state of a step: `CHUNKS` arrays that no other step has."""
    return {
        f"w{number}": Leaf("uint8", (len(data),), memoryview(data), frozen=True)
        for number, data in enumerate(_arrays(step))
    }


def make_checkpoints(storage: Storage, count: int) -> None:
    """Write the checkpoints of steps 1 to `count`, each with a pack of its own."""
    marker = new_marker(time_text(0), None, None)
    write_marker(storage, marker)
    log = LogWriter(storage, LOG)
    log.append(Started(run=marker.run))
    log.close()
    for step in range(1, count + 1):
        arrays = _arrays(step)
        hashes = [hash_bytes(data) for data in arrays]
        chunks = [(digest, len(data)) for digest, data in zip(hashes, arrays, strict=True)]
        pack = b"".join(arrays) + encode_pack_tail(
            [(digest, length, length) for digest, length in chunks]
        )
        name = pack_name(step, 0, f"{step:08x}")
        entries = []
        offset = 0
        for number, (digest, length) in enumerate(chunks):
            chunk = Chunk(digest, 0, offset, length)
            entries.append(LeafEntry(f"w{number}", "uint8", (length,), (chunk,)))
            offset += length
        packs = (PackEntry(name, len(pack)),)
        manifest = Manifest(
            format=1,
            run=marker.run,
            step=step,
            created=time_text(60 * step),
            fingerprint=checked_fingerprint(packs, entries, name),
            recipe={},
            metrics={"loss": 1 / step},
            packs=packs,
            leaves=tuple(entries),
        )
        create_whole(storage, PACKS + name, pack)
        create_whole(storage, manifest_name(step), encode_manifest(manifest))


def _arrays(step: int) -> list[bytes]:
    return [b"%d %d" % (step, number) + bytes(64) for number in range(CHUNKS)]
