"""A proxy between an object store and its client that fails requests chosen by a test.

Every request is recorded; what is done to it is decided by one function, so that a fault hits an
exact request and a test can assert that it did.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"transfer-encoding", "connection", "server", "date"}

CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>conflict</Message></Error>"


@dataclass(frozen=True)
class Request:
    """One request of the client."""

    number: int
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)

    def puts(self, part: str) -> bool:
        """Whether this writes an object (or a part of one) whose path contains `part`."""
        return self.method == "PUT" and part in self.path


Fault = Callable[[Request], "str | None"]
"""What to do with a request. None lets it through.

"refuse": close the connection before the server sees it. "lose": let the server do it, and close
the connection instead of answering. "cut": answer, and close in the middle of the body. A number
such as "503": answer with that status, and let the server see nothing. "&KEY=VALUE": let it
through with this added to its query.
"""


@dataclass
class Proxy:
    """A running proxy: where it listens, what came through, which faults fired."""

    endpoint: str
    fault: Fault
    requests: list[Request] = field(default_factory=list)
    fired: list[Request] = field(default_factory=list)
    guard: threading.Condition = field(default_factory=threading.Condition)
    unfinished: int = 0


@contextmanager
def proxy_to(endpoint: str, fault: Fault = lambda _: None) -> Iterator[Proxy]:
    """A proxy to the server at `endpoint` on a free port, until the end of the block.

    At the end no request is on its way any more, also of a client that was killed.
    """
    server = _Server(endpoint.removeprefix("http://"), fault)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.proxy
    finally:
        server.shutdown()
        thread.join()
        with server.proxy.guard:
            server.proxy.guard.wait_for(lambda: server.proxy.unfinished == 0, 60)
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, behind: str, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.proxy = Proxy(f"http://127.0.0.1:{self.server_port}", fault)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is no error here: tests kill them."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        """Requests are recorded, not printed."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy = self.server.proxy
        with proxy.guard:
            proxy.unfinished += 1
        try:
            self._pass(body, proxy)
        finally:
            with proxy.guard:
                proxy.unfinished -= 1
                proxy.guard.notify_all()

    def _pass(self, body: bytes, proxy: Proxy) -> None:
        with proxy.guard:
            request = Request(
                len(proxy.requests), self.command, self.path, dict(self.headers.items())
            )
            proxy.requests.append(request)
            what = proxy.fault(request)
            if what is not None and what.startswith("&"):
                self.path += what
            elif what is not None:
                proxy.fired.append(request)
        if what == "refuse":
            self._hang_up()
            return
        if what is not None and what.isdigit():
            self._answer(int(what), [("Content-Type", "application/xml")], CONFLICT)
            return
        status, headers, data = self._ask(body)
        if what == "lose":
            self._hang_up()
        elif what == "cut":
            self._answer(status, headers, data, len(data) // 2)
            self._hang_up()
        else:
            self._answer(status, headers, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        behind = http.client.HTTPConnection(self.server.behind, timeout=60)
        with contextlib.closing(behind) as connection:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, sent: int | None = None
    ) -> None:
        self.send_response(status)
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data[:sent])

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
