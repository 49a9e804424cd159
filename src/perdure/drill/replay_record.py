"""The record of a replay, a file in the run directory that begins with its own hash.

    RUN/replays/2026-01-31T235959Z-5f0c9a1e.json    {"digest":"<BLAKE3 of the rest>","format":1,...}

`digest` follows the rule of a manifest: the hash of `{` and everything after the first 77 bytes.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from perdure.drill.replay import ReplayOptions, StretchResult, Verdict
from perdure.errors import SaveError
from perdure.store.format import hash_bytes
from perdure.store.storage import Storage

REPLAYS = "replays/"
_FORMAT = 1


def verdict_of(results: Sequence[StretchResult]) -> Verdict:
    """That of all stretches: the first one that is not reproduced decides."""
    others: list[Verdict] = [r.verdict for r in results if r.verdict != "reproduced"]
    return others[0] if others else "reproduced"


def replay_document(
    where: str, command: Sequence[str], options: ReplayOptions, results: Sequence[StretchResult]
) -> dict[str, Any]:
    """What `--json` prints and the record holds, with its own hash first."""
    from perdure import __version__

    found = {
        "format": _FORMAT,
        "run": where,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "version": __version__,
        "command": list(command),
        "workers": options.workers,
        "devices": options.devices,
        "sample": options.sample,
        "seed": options.seed,
        "verdict": verdict_of(results),
        "stretches": [asdict(result) for result in results],
    }
    return {"digest": hash_bytes(_body(found)), **found}


def _body(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def write_record(storage: Storage, document: Mapping[str, Any]) -> str:
    """Write the record into a run directory, beside a writer that may be at work; returns its name.

    Raises:
        SaveError: It cannot be written.
    """
    data = _body(document)
    stamp = document["created"].replace(":", "")
    name = f"{REPLAYS}{stamp}-{secrets.token_hex(4)}.json"
    try:
        sink = storage.create(name, len(data))
        sink.write(memoryview(data))
        sink.commit()
    except OSError as error:
        raise SaveError(
            f"{storage.where}/{name}: the record of the replay cannot be written: {error}. Make it "
            f"writable, or keep the output of `--json`."
        ) from error
    return name
