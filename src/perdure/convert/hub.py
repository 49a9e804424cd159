"""The Hugging Face Hub: the card of an exported folder, and the files of a repository."""

from __future__ import annotations

import json
import os
import re

from perdure import __version__
from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import ArgumentError, DataError, needs_extra
from perdure.look.certificate import split_recipe
from perdure.text import printable

PREFIX = "hf://"

_CAUSES = {
    "GatedRepoError": "its owner has to give you access: ask on its page, then call `hf auth login`",
    "RepositoryNotFoundError": "there is no such model; for a private one, call `hf auth login` first",
    "RevisionNotFoundError": "it has no such branch, tag or commit",
}


def card(checkpoint: StoredCheckpoint, fingerprint: str, size: str) -> str:
    """The model card of an export: its fingerprint, how to check it, recipe and environment."""
    manifest = checkpoint.manifest
    part = f" From a checkpoint with the fingerprint `{manifest.fingerprint}`."
    fields = dict(zip(("recipe", "environment"), split_recipe(manifest), strict=True))
    # A block of code is indented by four spaces: no text of a recipe can end it.
    recipe = json.dumps(fields, indent=2).replace("\n", "\n    ")
    # As code, so that no text of a name is read as a link or as HTML.
    name = os.path.basename(checkpoint.run.where.rstrip("/")).replace("`", "'")
    name = f"`{printable(name)}`"
    return f"""\
---
library_name: perdure
tags: [perdure, safetensors]
---

# {name}, step {manifest.step}

{size}, exported by perdure {__version__}.{part if fingerprint != manifest.fingerprint else ""}

    {fingerprint}

This fingerprint is a hash of the path, dtype, shape and bytes of every leaf. In a copy of this folder

    pip install 'perdure[hub]'
    perdure import . ../checked

makes a run directory, prints the fingerprint of its bytes, and fails if the files note another one.
`perdure import hf://OWNER/REPO checked` does the same with a repository. Compare what it prints with a
fingerprint from elsewhere, such as a certificate: whoever can write here can change page and files.

## Recipe and environment

    {recipe}
"""


def _is_revision(text: str) -> bool:
    """Whether a branch, tag or commit of Git can have this name: it becomes a path in the cache."""
    parts = text.split("/")
    return len(text) <= 250 and all(
        re.fullmatch(r"[\w.+@-]+", part) and not part.startswith(".") and ".." not in part
        for part in parts
    )


def download(url: str) -> tuple[str, str]:
    """The folder with the safetensors of `hf://OWNER/REPO[@REVISION]`, and the URL with its commit.

    Raises ArgumentError, MissingExtraError, and DataError if nothing can be fetched.
    """
    if (match := re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?", url)) is None or (
        match[2] and not _is_revision(match[2])
    ):
        raise ArgumentError(f"expected hf://OWNER/REPO or hf://OWNER/REPO@REVISION, found {url!r}.")
    with needs_extra("hub"):
        from huggingface_hub import snapshot_download
    names = ["*.safetensors", "*.safetensors.index.json"]
    try:  # without the files of subfolders, which are other models
        folder = snapshot_download(
            match[1], revision=match[2], allow_patterns=names, ignore_patterns="*/*"
        )
    except Exception as error:  # of its HTTP library too, which differs between releases
        first = next(iter(str(error).splitlines()), "").rstrip(".")
        text = _CAUSES.get(type(error).__name__, f"cannot be fetched: {first}")
        raise DataError(f"{url}: {text}.") from error
    if not os.path.isdir(folder):
        raise DataError(f"{url}: expected a .safetensors file at its top, found none.")
    return folder, f"{PREFIX}{match[1]}@{os.path.basename(folder)}"
