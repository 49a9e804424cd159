"""A server on loopback that speaks as much of the Hugging Face Hub's protocol as its client needs.

For uploads: create a repository, check the card, ask how each file goes up, LFS with the basic
transfer, and commit. For downloads: the commit of a revision, its files, and their bytes. Writes need
the token. Another request is answered with 404.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_of_the_test"


@dataclass
class Stored:
    """A file of a commit; `lfs` is the name of the object that has its bytes."""

    data: bytes = b""
    lfs: str | None = None


@dataclass
class Hub:
    """What the server holds: by repository its commits, the newest last, with their files."""

    endpoint: str = ""
    commits: dict[str, dict[str, dict[str, Stored]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)

    def newest(self, repository: str) -> tuple[str, dict[str, Stored]]:
        """The newest commit and its files."""
        return list(self.commits[repository].items())[-1]


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub on a free port until the end of the block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hub = Hub()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""

    def _serve(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        # The address of an object is signed by itself on the real Hub.
        writes = self.command == "POST"
        if writes and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "expected the token"})
            return
        for method, pattern, answer in _ROUTES:
            if method == self.command.replace("HEAD", "GET") and (
                match := re.fullmatch(pattern, path)
            ):
                answer(self, body, *match.groups())
                return
        self._answer(404, {"error": "unknown request"})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _found(self, repository: str, revision: str) -> tuple[str, dict[str, Stored]] | None:
        """The commit of a revision; None if it was answered that there is none."""
        hub = self.server.hub
        if repository not in hub.commits:
            self._answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif repository in hub.gated:
            self._answer(403, {"error": "Access is restricted"}, X_Error_Code="GatedRepo")
        elif revision == "main":
            return hub.newest(repository)
        elif revision in hub.commits[repository]:
            return revision, hub.commits[repository][revision]
        else:
            self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return None

    # ---------------------------------------------------------------- uploads

    def create(self, body: bytes) -> None:
        given = json.loads(body)
        name = f"{given['organization']}/{given['name']}"
        self.server.hub.commits.setdefault(name, {"0" * 40: {}})
        self._answer(200, {"url": f"{self.server.hub.endpoint}/{name}", "id": name})

    def check_card(self, body: bytes) -> None:
        front = json.loads(body)["content"].split("---\n")
        try:
            fields = yaml.safe_load(front[1])
            wrong = [] if front[0] == "" and isinstance(fields, dict) else ["no fields"]
        except (IndexError, yaml.YAMLError) as error:
            wrong = [str(error)]
        errors = [{"message": message} for message in wrong]
        self._answer(400 if wrong else 200, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, repository: str, revision: str) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": modes})

    def batch(self, body: bytes, repository: str) -> None:
        given = json.loads(body)
        assert "basic" in given["transfers"]
        for each in given["objects"]:
            if each["oid"] not in self.server.hub.objects:
                href = f"{self.server.hub.endpoint}/objects/{each['oid']}"
                each["actions"] = {"upload": {"href": href}}
        self._answer(200, {"transfer": "basic", "objects": given["objects"]})

    def put_object(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "other bytes"})
            return
        self.server.hub.objects[oid] = body
        self._answer(200, {})

    def commit(self, body: bytes, repository: str, revision: str) -> None:
        hub = self.server.hub
        files = dict(hub.newest(repository)[1])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = Stored(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                assert len(hub.objects[value["oid"]]) == value["size"]
                files[value["path"]] = Stored(lfs=value["oid"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = hashlib.sha1(body + str(len(hub.commits[repository])).encode()).hexdigest()
        hub.commits[repository][sha] = files
        url = f"{hub.endpoint}/{repository}/commit/{sha}"
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    # ---------------------------------------------------------------- downloads

    def info(self, body: bytes, repository: str, revision: str) -> None:
        if found := self._found(repository, revision):
            sha, files = found
            names = [{"rfilename": path} for path in files]
            self._answer(200, {"id": repository, "sha": sha, "siblings": names, "tags": []})

    def tree(self, body: bytes, repository: str, revision: str) -> None:
        if found := self._found(repository, revision):
            self._answer(200, [self._listed(path, file) for path, file in found[1].items()])

    def _listed(self, path: str, file: Stored) -> dict[str, Any]:
        data = self.server.hub.objects[file.lfs] if file.lfs else file.data
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        listed: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
        if file.lfs:
            listed["lfs"] = {"oid": file.lfs, "size": len(data), "pointerSize": 130}
        return listed

    def resolve(self, body: bytes, repository: str, revision: str, path: str) -> None:
        if not (found := self._found(repository, revision)):
            return
        sha, files = found
        if path not in files:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        oid = files[path].lfs
        data = self.server.hub.objects[oid] if oid else files[path].data
        tag = f'"{oid or self._listed(path, files[path])["oid"]}"'
        # The real Hub redirects to the host of its objects, with the X-Linked headers.
        linked = {"X_Linked_Etag": tag, "X_Linked_Size": str(len(data))} if oid else {}
        self._answer(200, data, ETag=tag, X_Repo_Commit=sha, **linked)


_NAME = "([^/]+/[^/]+)"
_ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.check_card),
    ("POST", f"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    ("POST", f"/{_NAME}[.]git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/objects/(.+)", _Handler.put_object),
    ("POST", f"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
    ("GET", f"/api/models/{_NAME}/revision/(.+)", _Handler.info),
    ("GET", f"/api/models/{_NAME}/tree/(.+)", _Handler.tree),
    ("GET", f"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
