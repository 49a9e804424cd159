"""moto's S3 server, in which a conditional write is one operation, as in S3.

moto looks whether the object exists, and stores it later: of two writers that run at once both can win.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

CONDITIONS = ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH")
WRITES = ("PUT", "POST")


class OneConditionalWrite(DomainDispatcherApplication):
    """Answers one conditional write at a time."""

    guard = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] in WRITES and any(name in environ for name in CONDITIONS):
            with self.guard:
                return super().__call__(environ, start_response)
        return super().__call__(environ, start_response)


if __name__ == "__main__":
    server.DomainDispatcherApplication = OneConditionalWrite  # type: ignore[misc]
    server.main(sys.argv[1:])
