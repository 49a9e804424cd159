"""A bucket reached through obstore: one place for options, errors, retries and the fork check.

Everything that talks to an object store goes through `Bucket`, so that every failure is an `OSError`
that names URL, operation and what to do. obstore is loaded when the first bucket is opened.
"""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from perdure.errors import StoreError

MIB = 1024 * 1024
PIECE_BYTES = MIB
"""So much of a transfer is looked at together."""

CREATED_BY = "perdurewriter"
"""Attribute of an object that says which attempt to create it made it."""

_CREATE_ATTEMPTS = 5
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_process: int | None = None
"""The process whose threads run obstore; a fork of it has the memory and not the threads."""

T = TypeVar("T")


@dataclass(frozen=True)
class CloudOptions:
    """How to reach an object store. What is left out comes from the usual environment variables.

    `config` and `client` go to `obstore.store.from_url` as `config` and `client_options`, such as
    `{"endpoint": "http://127.0.0.1:9000", "region": "us-east-1"}` and `{"connect_timeout": "5s"}`. A
    request is tried again up to `retries` times and for at most `retry_seconds`. An object of up to
    `single_put_bytes` is one request, so that its creation is exclusive; a larger one goes in parts
    of at least `part_bytes`, `concurrency` at a time, and a load reads as many streams at once. The
    writer's lock lapses when it was not renewed for `lease_seconds`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 6
    retry_seconds: float = 60.0
    single_put_bytes: int = 32 * MIB
    part_bytes: int = 8 * MIB
    concurrency: int = 6
    lease_seconds: float = 30.0


class Bucket:
    """Objects below a URL such as `s3://bucket/prefix`. Safe to use from several threads."""

    def __init__(self, url: str, options: CloudOptions) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StoreError(
                f"{url}: object stores need obstore, which is not installed ({error}). "
                f"Install the extra: pip install 'perdure[cloud]'."
            ) from error
        self.url = url.rstrip("/")
        self.options = options
        self._api = obstore
        opened: Any = from_url  # its types follow the scheme, which is known only here
        try:
            self._store: Any = opened(
                self.url,
                config=dict(options.config),
                client_options=_client_options(options),
                retry_config={
                    "max_retries": options.retries,
                    "retry_timeout": timedelta(seconds=options.retry_seconds),
                    "backoff": {"max_backoff": timedelta(seconds=5)},
                },
            )
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise StoreError(
                f"{url}: cannot be opened: {_first_line(error)}. Expected a URL such as "
                f"s3://bucket/run, gs://bucket/run or az://container/run; the account and the "
                f"endpoint come from the environment (AWS_*, GOOGLE_*, AZURE_*) or from CloudOptions."
            ) from error

    def get(self, name: str) -> bytes:
        """The whole object."""
        return bytes(self._call("reading", name, self._get, name))

    def stream(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """Bytes of an object from `start` in pieces as they come, fewer only at its end.

        It must hold at least one there. A transfer that breaks off goes on where it was.
        """
        at, broke_at = start, -1
        while at < start + length:
            try:
                options = {"range": (at, start + length)}
                found = self._call(
                    "reading", name, self._api.get, self._store, name, options=options
                )
                for piece in found.stream(min_chunk_size=PIECE_BYTES):
                    view = memoryview(piece)
                    at += len(view)
                    yield view
                return
            except self._api.exceptions.BaseError as error:
                failed = self._translated(error, "reading", name)
            if not isinstance(failed, ConnectionError) or at == broke_at:
                raise failed
            broke_at = at

    def head(self, name: str) -> Mapping[str, Any]:
        """`size`, `last_modified` and what identifies the version of an object."""
        return self._call("reading", name, self._api.head, self._store, name)

    def put(self, name: str, data: bytes) -> Mapping[str, str]:
        """Write an object over whatever is there; returns its version."""
        return self._put(name, data, "overwrite")

    def put_over(self, name: str, data: bytes, version: Mapping[str, str]) -> Mapping[str, str]:
        """Write over exactly `version`; raises `BlockingIOError` when another one is there.

        The version of a single request may be a hash of the bytes: `data` must never repeat.
        """
        return self._put(name, data, dict(version))

    def create(self, name: str, data: bytes) -> Mapping[str, str]:
        """Write an object where there is none, or raise `FileExistsError`; one of a race wins.

        An answer that was lost, and a conflict with a request that came to nothing, are told apart
        from a lost race by asking which attempt made the object that is there.
        """
        attempt = secrets.token_hex(8)
        for number in range(_CREATE_ATTEMPTS):
            try:
                return self._put(name, data, "create", attempt)
            except (FileExistsError, ConnectionError) as error:
                try:
                    found = self.creator(name)
                except ConnectionError:
                    raise error from None
                if found == attempt:
                    return version_of(self.head(name))
                if found is not None:
                    raise FileExistsError(
                        errno.EEXIST, "exists already", f"{self.url}/{name}"
                    ) from None
                if number == _CREATE_ATTEMPTS - 1:
                    raise
                time.sleep(random.uniform(0, 0.05 * 2**number))
        raise AssertionError("the last attempt returns or raises")

    def upload(self, name: str, parts: Iterable[bytes], part_bytes: int, attempt: str) -> None:
        """Write a large object in parts, over whatever is there; visible once all of it is.

        An error that `parts` raises ends the upload, drops the parts, and is raised as it is.
        """
        self._call(
            "uploading",
            name,
            self._api.put,
            self._store,
            name,
            parts,
            attributes={CREATED_BY: attempt},
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=self.options.concurrency,
        )

    def creator(self, name: str) -> str | None:
        """The attempt that made an object, "" for one made otherwise, None where there is none."""

        try:
            found = self._call(
                "reading", name, self._api.get, self._store, name, options={"head": True}
            )
            return found.attributes.get(CREATED_BY, "")
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is not an error."""
        try:
            self._call("deleting", name, self._api.delete, self._store, name)
        except FileNotFoundError:
            return

    def list(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Names under `prefix`, each once, with their version tags ("" if the store tells none).

        A listing that breaks off continues at the place that it had reached.
        """
        last = broke_at = None
        while True:
            try:
                for batch in self._call("listing", prefix, self._listing, prefix, last):
                    for entry in batch:
                        last = entry["path"]
                        if last.rstrip("/") != prefix.rstrip("/"):
                            yield last, entry.get("e_tag") or ""
                return
            except self._api.exceptions.BaseError as error:
                failed = self._translated(error, "listing", prefix)
            except ConnectionError as error:
                failed = error
            if not isinstance(failed, ConnectionError) or last == broke_at:
                raise failed
            broke_at = last

    def _listing(self, prefix: str, after: str | None) -> Iterator[Any]:
        return iter(self._api.list(self._store, prefix.rstrip("/") or None, offset=after))

    def _get(self, name: str) -> Any:
        return self._api.get(self._store, name).bytes()

    def _put(self, name: str, data: bytes, mode: Any, attempt: str = "") -> Mapping[str, str]:
        done = self._call(
            "writing",
            name,
            self._api.put,
            self._store,
            name,
            data,
            mode=mode,
            attributes={CREATED_BY: attempt} if attempt else None,
            use_multipart=False,
        )
        return version_of(done)

    def _call(
        self, operation: str, name: str, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        check_process(self.url)
        try:
            return function(*args, **kwargs)
        except FileNotFoundError as error:
            raise self._translated(error, operation, name) from error
        except self._api.exceptions.BaseError as error:
            raise self._translated(error, operation, name) from error

    def _translated(self, error: Exception, operation: str, name: str) -> OSError:
        """The `OSError` for an error of obstore."""
        kinds = self._api.exceptions
        where = f"{self.url}/{name}".rstrip("/")
        said = _first_line(error)
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            return FileNotFoundError(
                errno.ENOENT, "the bucket does not exist; create it, or mend the URL", where
            )
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "no such object", where)
        if isinstance(error, kinds.AlreadyExistsError):
            return FileExistsError(errno.EEXIST, "exists already", where)
        if isinstance(error, kinds.PreconditionError):
            return BlockingIOError(errno.EAGAIN, "changed by another writer", where)
        if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)):
            return PermissionError(
                errno.EACCES,
                f"{operation} was refused: {said}. Check the credentials and what they may do",
                where,
            )
        if isinstance(error, kinds.NotSupportedError):
            return OSError(errno.ENOTSUP, f"{operation} is not supported: {said}", where)
        status = re.search(r"status code: (\d{3})", str(error))
        refused = status is not None and status[1][0] == "4" and status[1] != "429"
        if refused or "InvalidRangeRequest" in str(error) or "UnexpectedRange" in str(error):
            return OSError(errno.EIO, f"{operation} failed: {said}", where)
        return ConnectionError(
            errno.EHOSTUNREACH,
            f"{operation} failed after up to {self.options.retries} retries: {said}. Nothing is "
            f"known about what is there. Check network, endpoint and credentials, then try again",
            where,
        )


def check_process(url: str) -> None:
    """Raise `StoreError` in a process that was forked from one that has used obstore."""
    global _process
    here = os.getpid()
    if _process is None:
        _process = here
    elif _process != here:
        raise StoreError(
            f"{url}: process {here} was forked from process {_process}, which had used an object "
            f"store; its threads do not exist here, so that a request would wait for ever. Start "
            f'processes by multiprocessing.get_context("spawn") (or "forkserver"), or use object '
            f"stores only in the children."
        )


def version_of(answer: Mapping[str, Any]) -> dict[str, str]:
    """What identifies a version, for `put_over`; some stores give `None` or "null" for a part."""
    parts = {key: answer.get(key) for key in ("e_tag", "version")}
    return {key: value for key, value in parts.items() if value not in (None, "null")}


def _client_options(options: CloudOptions) -> dict[str, Any]:
    """Options of the HTTP client; an endpoint that is named with http:// is meant."""
    environment = {name.upper(): value for name, value in os.environ.items()}
    endpoints = [options.config.get("endpoint"), *map(environment.get, _ENDPOINTS)]
    plain = any(str(endpoint or "").startswith("http://") for endpoint in endpoints)
    allowed = {"allow_http": True} if plain else {}
    # A part of a large object may take long on a slow line.
    return {"timeout": "300s", **allowed, **options.client}


def _first_line(error: Exception) -> str:
    text = str(error).split("\n\nDebug source")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())[:400].rstrip(".")
