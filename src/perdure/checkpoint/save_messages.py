"""The messages of a save by a group: what each process begins with, the chief's orders, the answers."""

from __future__ import annotations

import secrets
from contextlib import suppress

import msgspec
from msgspec import Struct

from perdure.checkpoint.group_call import SentError, decoded
from perdure.checkpoint.shard_layouts import GroupLayouts, LocalRegions
from perdure.checkpoint.slice_exchange import PeerAddress
from perdure.errors import SaveError
from perdure.store import Storage
from perdure.store.format import PACKS, TEMP_SUFFIX, hash_bytes
from perdure.store.pack_part import LocalRows, PackPart, ShardCopy

LAYOUT, HASH, WRITE, COMPARE, END = "layout", "hash", "write", "compare", "end"
"""What an order asks for."""

LARGE_BYTES = 2**20
"""Larger answers to a write order travel as files of the run directory."""


class SaveRow(Struct):
    """With what one process begins a save, or why it does not.

    Attributes:
        step: The step that it saves.
        own: The leaves that it alone has, by their hashes: the fingerprint covers all of them.
        regions: The `digest_of` of its shards.
        known: The digest of the layouts that it knows from an earlier save.
        address: Where it answers requests for slices; None without sharded arrays.
    """

    step: int
    own: LocalRows
    regions: str = ""
    known: str = ""
    address: PeerAddress | None = None
    error: SentError | None = None


class SaveOrder(Struct):
    """What the chief asks all processes to do next.

    Attributes:
        what: LAYOUT, HASH, WRITE, COMPARE or END.
        layouts: The layouts of all sharded arrays; None if every process knows them.
        addresses: Where each process answers requests for slices.
        error: Why the save failed, for END.
    """

    what: str
    layouts: GroupLayouts | None = None
    addresses: list[PeerAddress | None] = []
    error: SentError | None = None


class SaveAnswer(Struct):
    """What one process answers to an order, or why it cannot.

    Attributes:
        step: The step that it saves.
        regions: Its shards, for a layout order.
        hashes: The hashes of the chunks of sharded arrays that it would write, for a hash order.
        part: What it has written, for a write order.
        digests, copies: The hashes of its leaves, and of its shards that others have too, for a
            compare order.
        stored_as: The file of the run directory that has the answer, with its hash, if it is large.
    """

    step: int
    regions: dict[str, LocalRegions] = {}
    hashes: dict[int, str] = {}
    part: PackPart | None = None
    digests: dict[str, str] = {}
    copies: dict[str, ShardCopy] = {}
    stored_as: tuple[str, str] | None = None
    error: SentError | None = None


def encode_answer(storage: Storage, process: int, answer: SaveAnswer) -> bytes:
    """An answer as a message. If it is large, it becomes a temporary file of the run directory."""
    data = msgspec.msgpack.encode(answer)
    if len(data) <= LARGE_BYTES or answer.part is None:
        return data
    name = f"{PACKS}{answer.step:012d}-{process:05d}-{secrets.token_hex(4)}.part{TEMP_SUFFIX}"
    storage.replace(name, data)
    return msgspec.msgpack.encode(SaveAnswer(answer.step, stored_as=(name, hash_bytes(data))))


def decode_answer(storage: Storage, data: bytes) -> SaveAnswer:
    """The answer of a message, in the chief; its file is removed.

    Raises:
        SaveError: The file is not there, or has other bytes.
    """
    answer = decoded(data, SaveAnswer)
    if answer.stored_as is None:
        return answer
    name, digest = answer.stored_as
    try:
        data = storage.read(name)
    except FileNotFoundError:
        data = b""
    if hash_bytes(data) != digest:
        raise SaveError(
            f"{storage.where}: another process wrote {name}, and process 0 does not find the same "
            f"bytes there. All processes need one shared directory. Nothing was committed; every "
            f"earlier checkpoint is still there."
        )
    with suppress(OSError):  # the next writer removes it
        storage.delete(name)
    return decoded(data, SaveAnswer)
