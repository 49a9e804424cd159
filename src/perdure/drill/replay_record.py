"""The record of a replay: a log of one line in the run directory, because each replay is a writer.

RUN/replays/2026-01-31T235959Z-5f0c9a1e.jsonl    {"hash":"...","kind":"replayed",...}
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from perdure.drill.replay import ReplayOptions, StretchResult
from perdure.errors import SaveError
from perdure.store.local import LocalStorage
from perdure.store.log import LogWriter, log_place
from perdure.store.storage import Storage

REPLAYS = "replays/"


def replay_document(
    where: str, command: Sequence[str], options: ReplayOptions, results: Sequence[StretchResult]
) -> dict[str, Any]:
    """What `--json` prints and the record holds; the first stretch that is not reproduced decides."""
    from perdure import __version__

    others = [each.verdict for each in results if each.verdict != "reproduced"]
    return {
        "kind": "replayed",
        "run": where,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "version": __version__,
        "command": list(command),
        "workers": options.workers,
        "devices": options.devices,
        "sample": options.sample,
        "seed": options.seed,
        "verdict": [*others, "reproduced"][0],
        "stretches": [asdict(result) for result in results],
    }


def write_record(storage: Storage, document: Mapping[str, Any]) -> str:
    """Write the record into a run directory, beside a writer that may be at work; returns its name.

    Raises:
        SaveError: It cannot be written.
    """
    name = f"{REPLAYS}{document['created'].replace(':', '')}-{secrets.token_hex(4)}"
    place = log_place(storage, name)
    try:
        if isinstance(storage, LocalStorage):
            os.makedirs(storage.path(REPLAYS), exist_ok=True)
        log = LogWriter(storage, name)
        try:
            log.append(document)
            log.sync()
        finally:
            log.close()
    except OSError as error:
        raise SaveError(
            f"{storage.where}/{place}: the record of the replay cannot be written: {error}. Make it "
            f"writable, or keep the output of `--json`."
        ) from error
    return place
