"""The bytes of a manifest: canonical JSON that begins with its own digest.

Invariant: a manifest that `decode_manifest` returns has the bytes that were committed, and its parts
fit together.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from perdure.errors import CorruptionError
from perdure.store.format import (
    FORMAT,
    MAX_STEP,
    check_version,
    decode_json,
    hash_bytes,
    hash_parts,
    seconds_of,
)
from perdure.store.gc_pause import gc_paused
from perdure.store.json_blocks import PLACEHOLDER, blocks, json_parts
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.manifest_check import check_containers, checked_fingerprint

MAX_MANIFEST_BYTES = 1024 * 1024 * 1024
_DIGEST_HEAD = b'{"digest":"'
_DIGEST_BYTES = len(_DIGEST_HEAD) + 64 + len('",')

_decoder = msgspec.json.Decoder(Manifest)
_encoder = msgspec.json.Encoder(order="deterministic")
_leaves_decoder = msgspec.json.Decoder(list[LeafEntry])

LEAF_TEXT_BYTES = 128
"""About what the entry of a leaf takes."""

HEAD_BYTES = _DIGEST_BYTES
"""The first bytes of a manifest, which hold its digest: equal heads are equal manifests."""

UNTIL_VERIFIED = " Run `perdure verify` on the run directory; restore an older step meanwhile."
"""The advice that ends the error of a damaged manifest. A check of the run leaves it out."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical JSON of a manifest, which begins with its digest."""
    return b"".join(_encode(manifest, map(_encoder.encode, blocks(manifest.leaves))))


def encode_checked(manifest: Manifest, where: str) -> list[bytes | memoryview]:
    """`encode_manifest` in parts, if it reads back as `manifest`, by the rules of a reader.

    The first part has HEAD_BYTES or more.

    The digest, the fingerprint and the digits of hashes are not checked again, because they were made
    from these values.

    Raises:
        CorruptionError: A value cannot be read back. `where` names the manifest.
    """

    def checked(leaves: list[LeafEntry]) -> bytes:
        text = _encoder.encode(leaves)
        try:
            same = _leaves_decoder.decode(text) == leaves
        except ValueError:
            same = decode_json(text, list[LeafEntry], where) == leaves  # names the cause
        if not same:
            raise _unequal(where)
        return text

    rest = msgspec.structs.replace(manifest, leaves=())
    if _manifest(memoryview(_encoder.encode(rest)), where) != rest:
        raise _unequal(where)
    return _encode(manifest, map(checked, blocks(manifest.leaves)))


def _encode(manifest: Manifest, leaves: Iterable[bytes]) -> list[bytes | memoryview]:
    frame = _encoder.encode(msgspec.structs.replace(manifest, leaves=PLACEHOLDER))
    parts = list(json_parts(leaves, frame))
    parts.append(b"\n")
    digest = hash_parts(parts)
    # A comma takes the place of the brace of the body.
    parts[0] = b"".join([_DIGEST_HEAD, digest.encode(), b'",', parts[0][1:]])
    return parts


def _unequal(where: str) -> CorruptionError:
    return CorruptionError(
        f"{where}: decoding it gives other values than were encoded; nothing was written."
    )


def decode_manifest(data: bytes, where: str, step: int | None = None) -> Manifest:
    """Decode and check a manifest.

    Args:
        data: The bytes of the file.
        where: The name of the file, for errors.
        step: The step that it must have; any step by default.

    Raises:
        CorruptionError: The bytes are not exactly those that were committed.
        FormatVersionError: The manifest is intact and has a newer format.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptionError(
            f"{where}: a manifest has at most {MAX_MANIFEST_BYTES} bytes, found {len(data)}."
        )
    body = _body(data)
    actual = hash_bytes(body)
    if data[:_DIGEST_BYTES] != _DIGEST_HEAD + actual.encode() + b'",':
        raise CorruptionError(f"{where}: {_damage(data, actual)}.{UNTIL_VERIFIED}")
    with gc_paused(len(data) // LEAF_TEXT_BYTES):
        return _checked(_manifest(body, where), where, step)


def _damage(data: bytes, actual: str) -> str:
    """What is wrong with a manifest whose body has the hash `actual`."""
    if not data:
        return "expected a manifest, found an empty file"
    recorded = data[len(_DIGEST_HEAD) : _DIGEST_BYTES - 2].decode(errors="replace")
    if not data.startswith(_DIGEST_HEAD) or set(recorded) - set("0123456789abcdef"):
        return f"expected a manifest, which begins with its hash, found {len(data)} other bytes"
    shown = 16 if recorded[:16] != actual[:16] else len(actual)
    return (
        f"a manifest of {len(data)} bytes: expected hash {recorded[:shown]}, found {actual[:shown]}"
    )


def _checked(manifest: Manifest, where: str, step: int | None) -> Manifest:
    """The manifest, if its parts fit together."""
    if step is not None and manifest.step != step:
        raise CorruptionError(
            f"{where}: expected the manifest of step {step}, found {manifest.step}."
        )
    try:
        seconds_of(manifest.created)
    except ValueError:
        raise CorruptionError(f"{where}: created: {manifest.created!r} is not a date.") from None
    if manifest.step > MAX_STEP:
        raise CorruptionError(f"{where}: expected a step up to {MAX_STEP}, found {manifest.step}.")
    if manifest.containers:
        check_containers(manifest, where)
    if manifest.process_leaves:
        checked_fingerprint(manifest.packs, manifest.process_leaves, where)
    actual = checked_fingerprint(manifest.packs, manifest.leaves, where)
    if actual != manifest.fingerprint:
        raise CorruptionError(
            f"{where}: expected fingerprint {manifest.fingerprint[:16]}, its leaves "
            f"give {actual[:16]}."
        )
    return manifest


def _body(data: bytes) -> memoryview:
    """The JSON of a manifest without its digest; its brace takes the place of a comma."""
    body = bytearray(data)
    body[_DIGEST_BYTES - 1 : _DIGEST_BYTES] = b"{"
    return memoryview(body)[_DIGEST_BYTES - 1 :]


def _manifest(body: memoryview, where: str) -> Manifest:
    try:
        manifest = _decoder.decode(body)
    except (ValueError, RecursionError):  # a newer format looks like this too
        check_version(body, where)
        manifest = decode_json(body, Manifest, where)
    if manifest.format > FORMAT:
        check_version(body, where)
    return manifest
