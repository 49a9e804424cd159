"""Where a checkpoint comes from that no training made: text in its manifest, beside the state."""

from __future__ import annotations

import json
from typing import Any

from perdure.checkpoint.address import StoredCheckpoint
from perdure.store.manifest import Manifest

ORIGIN = "origin"
"""The path of the process leaf with the JSON text. It is no part of the fingerprint."""


def origin(manifest: Manifest) -> dict[str, Any] | None:
    """What `average` or `import` noted about a checkpoint; None for one that a program saved."""
    texts = [entry.text for entry in manifest.process_leaves if entry.path == ORIGIN]
    return json.loads(texts[0]) if texts and texts[0] is not None else None


def origin_lines(manifest: Manifest) -> list[str]:
    """The same for people, a line for each checkpoint or file that this one was made from."""
    note = origin(manifest)
    if note is None:
        return []
    lines = [f"{note.get('made_by')} ({note.get('method', note.get('format'))})"]
    lines += [
        f"{source['run']}@{source['step']}, weight {source['weight']:.12g}"
        for source in note.get("sources", [])
    ]
    if "like" in note:
        lines.append(f"{note['like']['run']}@{note['like']['step']}, all other leaves")
    if "source" in note:
        lines.append(str(note["source"]))
    return lines


def source_of(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """A checkpoint that another one was made from."""
    manifest = checkpoint.manifest
    return {
        "run": checkpoint.run.where,
        "step": manifest.step,
        "fingerprint": manifest.fingerprint,
    }
