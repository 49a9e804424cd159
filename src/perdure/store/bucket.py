"""Requests to an object store through obstore, with options, retries and the check for forks.

Every failure becomes an `OSError` with the URL, the operation and what to do.
"""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from perdure.errors import StoreError, needs_extra
from perdure.runtime.system import ENOKEY, EREMOTEIO
from perdure.store.storage import Entry

MIB = 1024 * 1024
PIECE_BYTES = MIB
"""A transfer is received in pieces of at least this size."""

CREATED_BY = "perdurewriter"
"""Attribute of an object that names the attempt that created it."""

_CREATE_ATTEMPTS = 5
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_process: int | None = None
"""The process that runs the threads of obstore. A forked child has their memory, but no threads."""

T = TypeVar("T")

_AWS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, with AWS_SESSION_TOKEN if they are temporary (the "
    'profiles in ~/.aws are not read: `eval "$(aws configure export-credentials --format env)"` '
    "sets the variables from one)"
)
_GOOGLE = (
    "GOOGLE_APPLICATION_CREDENTIALS with the path of a key file, or the login of "
    "`gcloud auth application-default login`"
)
_AZURE = (
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_USE_AZURE_CLI=true after `az login`"
)
_ROLE_REQUEST = re.compile(r"/latest/(api/token|meta-data/)|/computeMetadata/|/metadata/identity/")
"""What obstore asks a machine in the cloud for its role, once it has found no credentials."""


@dataclass(frozen=True)
class CloudOptions:
    """How to reach an object store. The usual environment variables supply what is left out.

    Attributes:
        config: The `config` of `obstore.store.from_url`, such as
            `{"endpoint": "http://127.0.0.1:9000", "region": "us-east-1"}`.
        client: Its `client_options`, such as `{"connect_timeout": "5s"}`.
        retries: How often a request is retried.
        retry_seconds: For how many seconds a request is retried.
        single_put_bytes: Objects of up to this size are written by one request, so that creating
            them is exclusive.
        part_bytes: The least size of the parts in which larger objects are written.
        concurrency: How many parts are sent at a time, and how many streams a load reads at once.
        lease_seconds: The writer's lock expires when it has not been renewed for this time.
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
        with needs_extra("cloud"):
            import obstore
            from obstore.store import from_url
        self.url = url.rstrip("/")
        self.options = options
        # Asked for the names after one, Azurite has none, so all are listed there.
        self._lists_after = not self.url.startswith(("az", "abfs"))
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
        except BaseException as error:
            # obstore panics, which is no `Exception`, at a key of `config` that belongs to its client.
            expected = (obstore.exceptions.BaseError, ValueError, TypeError)
            if not isinstance(error, expected) and type(error).__name__ != "PanicException":
                raise
            raise StoreError(
                f"{url}: cannot be opened: {_first_line(error)}. Expected a URL such as "
                f"s3://bucket/run, gs://bucket/run or az://container/run. The environment or "
                f"CloudOptions(config=...) has the account: {_variables(url)}. Settings of the "
                f"connection, such as timeout and allow_http, go into CloudOptions(client=...)."
            ) from error

    def get(self, name: str) -> bytes:
        """The whole object."""
        return bytes(self.call("reading", name, lambda: self._api.get(self._store, name).bytes()))

    def stream(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes from `start`, in pieces as they arrive; a broken transfer is continued."""
        position, broke_at = start, -1
        while position < start + length:
            try:
                options = {"range": (position, start + length)}
                answer = self.call(
                    "reading", name, self._api.get, self._store, name, options=options
                )
                for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                    view = memoryview(piece)
                    position += len(view)
                    yield view
                return
            except self._api.exceptions.BaseError as error:
                failed = self._translated(error, "reading", name)
            if not isinstance(failed, ConnectionError) or position == broke_at:
                raise failed
            broke_at = position

    def head(self, name: str) -> Mapping[str, Any]:
        """`size`, `last_modified`, `e_tag` and `version` of an object."""
        return self.call("reading", name, self._api.head, self._store, name)

    def put(self, name: str, data: bytes) -> Mapping[str, str]:
        """Write an object, replacing any older one; returns its version."""
        return self._put(name, data, "overwrite")

    def put_over(self, name: str, data: bytes, version: Mapping[str, str]) -> Mapping[str, str]:
        """Replace an object of exactly this version; `BlockingIOError` if it has another one.

        A store may use a hash of the bytes as the version, so no two values of `data` may be equal.
        """
        return self._put(name, data, dict(version))

    def create(self, name: str, data: bytes) -> Mapping[str, str]:
        """Write an object if there is none of that name, or raise `FileExistsError`.

        If the answer to a request was lost, an attribute of the object says whether this attempt
        created it.
        """
        attempt = secrets.token_hex(8)
        for number in range(_CREATE_ATTEMPTS):
            try:
                return self._put(name, data, "create", attempt)
            except (FileExistsError, ConnectionError) as error:
                try:
                    creator = self.creator(name)
                except ConnectionError:
                    raise error from None
                if creator == attempt:
                    return version_of(self.head(name))
                if creator is not None:
                    raise FileExistsError(
                        errno.EEXIST, "exists already", f"{self.url}/{name}"
                    ) from None
                if number == _CREATE_ATTEMPTS - 1:
                    raise
                time.sleep(random.uniform(0, 0.05 * 2**number))
        raise AssertionError("the last attempt returns or raises")

    def open_upload(self, name: str, part_bytes: int, attempt: str) -> Any:
        """A writer of a large object in parts, which is visible as a whole once it is closed."""
        return self.call(
            "uploading",
            name,
            self._api.open_writer,
            self._store,
            name,
            attributes={CREATED_BY: attempt},
            buffer_size=part_bytes,
            max_concurrency=self.options.concurrency,
        )

    def creator(self, name: str) -> str | None:
        """The attempt that created an object, "" if none is recorded, None if there is no object."""
        try:
            answer = self.call(
                "reading", name, self._api.get, self._store, name, options={"head": True}
            )
            return answer.attributes.get(CREATED_BY, "")
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is not an error."""
        try:
            self.call("deleting", name, self._api.delete, self._store, name)
        except FileNotFoundError:
            return

    def list(self, prefix: str, after: str | None = None) -> Iterator[tuple[str, Entry]]:
        """Names with `prefix` after `after`, once, with size and version; also if it broke off."""
        last, broke_at = after, None
        while True:
            try:
                offset = last if self._lists_after else None
                place = self._store, prefix.rstrip("/") or None
                for batch in self.call("listing", prefix, self._api.list, *place, offset=offset):
                    for entry in batch:
                        if last is not None and entry["path"] <= last:
                            continue
                        last = entry["path"]
                        if last.rstrip("/") != prefix.rstrip("/"):
                            yield last, Entry(entry["size"], entry.get("e_tag") or "")
                return
            except self._api.exceptions.BaseError as error:
                failed = self._translated(error, "listing", prefix)
            except ConnectionError as error:
                failed = error
            if not isinstance(failed, ConnectionError) or last == broke_at:
                raise failed
            broke_at = last

    def _put(self, name: str, data: bytes, mode: Any, attempt: str = "") -> Mapping[str, str]:
        done = self.call(
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

    def call(
        self, operation: str, name: str, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """What a function of obstore returns; an error becomes an `OSError` about `operation`."""
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
        reason = _first_line(error)
        if _ROLE_REQUEST.search(str(error)):
            return ConnectionError(
                ENOKEY,
                f"{operation} failed: no credentials were found, and this machine gives none of its "
                f"own. Expected in the environment: {_variables(self.url)}; or "
                f"CloudOptions(config=...)",
                where,
            )
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            return FileNotFoundError(
                errno.ENOENT, "the bucket does not exist; create it, or correct the URL", where
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
                f"{operation} was refused: {reason}. Check the permissions of the credentials in the "
                f"environment: {_variables(self.url)}",
                where,
            )
        if isinstance(error, kinds.NotSupportedError):
            return OSError(errno.ENOTSUP, f"{operation} is not supported: {reason}", where)
        status = re.search(r"status code: (\d{3})", str(error))
        refused = status is not None and status[1][0] == "4" and status[1] != "429"
        if refused or "InvalidRangeRequest" in str(error) or "UnexpectedRange" in str(error):
            return OSError(EREMOTEIO, f"{operation} failed: {reason}", where)
        return ConnectionError(
            errno.EHOSTUNREACH,
            f"{operation} failed after up to {self.options.retries} retries: {reason}. Nothing is "
            f"known about what is there. Check network, endpoint and credentials, then try again",
            where,
        )


def _variables(url: str) -> str:
    """The environment variables that bring credentials for `url`."""
    return {"s": _AWS, "g": _GOOGLE, "a": _AZURE}[url[0]]


def check_process(url: str) -> None:
    """Raise `StoreError` in a process that was forked from one that has used obstore."""
    global _process
    process = os.getpid()
    if _process is None:
        _process = process
    elif _process != process:
        raise StoreError(
            f"{url}: process {process} was forked from process {_process}, which had used an object "
            f"store. A request would wait for ever, because the threads of obstore do not exist in "
            f'this process. Start processes with multiprocessing.get_context("spawn") (or '
            f'"forkserver"), or use object stores only in the children.'
        )


def version_of(answer: Mapping[str, Any]) -> dict[str, str]:
    """The version in an answer, for `put_over`. Some stores give None or "null" for a part of it."""
    parts = {key: answer.get(key) for key in ("e_tag", "version")}
    return {key: value for key, value in parts.items() if value not in (None, "null")}


def _client_options(options: CloudOptions) -> dict[str, Any]:
    """Options of the HTTP client. An endpoint whose URL begins with http:// allows plain HTTP."""
    environment = {name.upper(): value for name, value in os.environ.items()}
    endpoints = [options.config.get("endpoint"), *map(environment.get, _ENDPOINTS)]
    plain = any(str(endpoint or "").startswith("http://") for endpoint in endpoints)
    allowed = {"allow_http": True} if plain else {}
    # A part of a large object may take long over a slow connection.
    return {"timeout": "300s", **allowed, **options.client}


def _first_line(error: BaseException) -> str:
    text = str(error).split("\n\nDebug source")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())[:400].rstrip(".")
