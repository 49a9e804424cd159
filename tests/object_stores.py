"""Object stores on loopback: moto speaks S3, Azurite speaks Azure. Real protocols, no mocks.

Each runs as a process of its own on a free port, and is there once it has said so itself.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

from perdure.store import CloudOptions, CloudStorage

ACCOUNT = "perdure"
AZURITE = "PERDURE_AZURITE"
"""Environment variable with the path of `azurite-blob`, where it is not on PATH."""

MIB = 1024 * 1024
# Small enough that an object of 9 MiB goes up in parts; S3 takes none below 5 MiB but the last.
TEST_OPTIONS = CloudOptions(
    retries=3, retry_seconds=20.0, single_put_bytes=8 * MIB, part_bytes=5 * MIB
)


class ServerUnavailable(Exception):
    """This server cannot run here; the text is the reason to skip."""


@dataclass(frozen=True)
class ObjectServer:
    """A server that runs, with raw access that knows nothing of perdure's storages."""

    endpoint: str
    scheme: str
    key: str = ""

    def options(self, endpoint: str | None = None, **changes: Any) -> CloudOptions:
        """How to reach it, through another `endpoint` (a proxy) if given."""
        address = endpoint or self.endpoint
        if self.scheme == "s3":
            config = {"endpoint": address, "region": "us-east-1"}
            config |= {"access_key_id": "test", "secret_access_key": "test"}
        else:
            config = {"endpoint": f"{address}/{ACCOUNT}", "account_name": ACCOUNT}
            config |= {"account_key": self.key}
        return replace(TEST_OPTIONS, config=config, **changes)

    def new_url(self) -> str:
        """A URL in a new, empty bucket."""
        bucket = f"bucket-{secrets.token_hex(6)}"
        query = {} if self.scheme == "s3" else {"restype": "container"}
        self.request("PUT", f"/{bucket}", query)
        return f"{self.scheme}://{bucket}/runs/one"

    def storage(self, url: str, **changes: Any) -> CloudStorage:
        """A storage at a URL of this server."""
        return CloudStorage(url, self.options(**changes))

    def read(self, url: str, name: str) -> bytes | None:
        """An object, None where there is none."""
        return self.request("GET", self._path(url, name))

    def write(self, url: str, name: str, data: bytes) -> None:
        """Write an object over whatever is there."""
        headers = {} if self.scheme == "s3" else {"x-ms-blob-type": "BlockBlob"}
        self.request("PUT", self._path(url, name), data=data, headers=headers)

    def delete(self, url: str, name: str) -> None:
        """Remove an object."""
        self.request("DELETE", self._path(url, name))

    def names(self, url: str) -> set[str]:
        """Names of all objects below a URL; up to 1,000."""
        bucket, _, prefix = url.partition("://")[2].partition("/")
        query = {"prefix": f"{prefix}/"}
        if self.scheme != "s3":
            query |= {"comp": "list", "restype": "container"}
        text = (self.request("GET", f"/{bucket}", query) or b"").decode()
        names = re.findall(r"<(?:Key|Name)>([^<]*)</(?:Key|Name)>", text)
        return {name.removeprefix(f"{prefix}/") for name in names if name.startswith(prefix)}

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes | None:
        """One request, signed where the server wants that; None where there is no such thing."""
        query = dict(query or {})
        headers = {**(headers or {})}
        if method == "PUT":
            data = data or b""
            headers["Content-Type"] = "application/octet-stream"
        if self.scheme == "s3":
            # moto wants to see a signature, and does not compute it.
            scope = "Credential=test/20260101/us-east-1/s3/aws4_request"
            headers["Authorization"] = f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"
        else:
            path = f"/{ACCOUNT}{path}"
            headers |= {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
            headers["Authorization"] = self._signed(method, path, query, data, headers)
        target = path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        connection = http.client.HTTPConnection(self.endpoint.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            body = answer.read()
        if answer.status == 404:
            return None
        if answer.status >= 300:
            raise OSError(f"{method} {target}: {answer.status} {body[:300]!r}")
        return body

    def _path(self, url: str, name: str) -> str:
        return "/" + url.partition("://")[2] + "/" + name

    def _signed(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> str:
        """Azure's Shared Key: a hash of the request under the key of the account."""
        length = str(len(data)) if data else ""
        kind = headers.get("Content-Type", "")
        named = sorted(f"{k}:{v}" for k, v in headers.items() if k.startswith("x-ms-"))
        asked = [f"{key}:{value}" for key, value in sorted(query.items())]
        lines = [method, "", "", length, "", kind, "", "", "", "", "", "", *named]
        text = "\n".join([*lines, f"/{ACCOUNT}{path}", *asked])
        digest = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        return f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"


@contextlib.contextmanager
def moto_server() -> Iterator[ObjectServer]:
    """moto's S3 server. Raises `ServerUnavailable` where moto is not installed."""
    program = Path(__file__).with_name("moto_server_program.py")
    command = [sys.executable, str(program), "-H", "127.0.0.1", "-p", "0"]
    with running(command, r"Running on (http://[\d.]+:\d+)", {}) as endpoint:
        yield ObjectServer(endpoint, "s3")


@contextlib.contextmanager
def azurite_server() -> Iterator[ObjectServer]:
    """Azurite, if its `azurite-blob` is on PATH or named by PERDURE_AZURITE."""
    program = os.environ.get(AZURITE) or shutil.which("azurite-blob")
    if program is None:
        raise ServerUnavailable(
            f"no azurite-blob on PATH; npm install azurite, or set {AZURITE} to its path"
        )
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    command += ["--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    variables = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
    with running(command, r"listens on (http://[\d.]+:\d+)", variables) as endpoint:
        yield ObjectServer(endpoint, "az", key)


@contextlib.contextmanager
def running(command: list[str], ready: str, variables: Mapping[str, str]) -> Iterator[str]:
    """A server, from its own word that it is ready until the end of the block; yields its URL.

    `ready` is a pattern whose first group is the URL, `told` are environment variables. Raises
    `ServerUnavailable` with what it said where it ends instead.
    """
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise ServerUnavailable(f"{command[0]} does not start: {error}") from error
    assert server.stdout is not None
    # A server that hangs as it starts is ended, which ends the loop below.
    watch = threading.Timer(60, server.kill)
    watch.start()
    output: list[str] = []
    try:
        for line in server.stdout:
            output.append(line)
            if match := re.search(ready, line):
                break
        else:
            raise ServerUnavailable(
                f"{' '.join(command[:3])} ended: {''.join(output[-5:]).strip()}"
            )
        watch.cancel()
        # A full pipe would stop the server.
        drain = threading.Thread(target=lambda out: [None for _ in out], args=(server.stdout,))
        drain.start()
        try:
            yield match[1]
        finally:
            server.kill()
            drain.join()
    finally:
        watch.cancel()
        server.kill()
        server.wait()
        server.stdout.close()
