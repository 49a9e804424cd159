"""A machine that is gone without a word: no process of it could close its connections.

Its kernel does not answer any more. The kernel of a process that is stopped, hangs or is busy does, so
that such a process is never taken for gone.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import suppress

# The errors of a connection whose probes nobody answers.
_UNANSWERED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def probe(connection: socket.socket, seconds: float) -> None:
    """Let the connection fail when the other machine has not answered for about `seconds`.

    For a connection of few bytes: one whose other end is merely stopped, and does not read, would fail
    too once the memory for what it has not read is full.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for it.
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    limits = {idle: 0.4 * seconds, getattr(socket, "TCP_KEEPINTVL", None): 0.2 * seconds}
    limits[getattr(socket, "TCP_KEEPCNT", None)] = 3
    for option, value in limits.items():
        if option is not None:
            # The kernel takes whole seconds, up to 32767.
            connection.setsockopt(socket.IPPROTO_TCP, option, min(max(1, round(value)), 32767))
    # Nothing is probed while bytes are on their way: the report of another machine that is gone.
    if (limit := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        milliseconds = round(1000 * min(max(1, seconds), 32767))
        connection.setsockopt(socket.IPPROTO_TCP, limit, milliseconds)


def is_unanswered(error: OSError) -> bool:
    """Whether the connection failed because the other machine does not answer."""
    return error.errno in _UNANSWERED


def close_connections(address: str) -> None:
    """End the TCP connections of this process to a machine, and with them all waits for it."""
    machine = _normal(address)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError, ValueError):  # no socket, not connected, or closed meanwhile
            is_blocking = os.get_blocking(int(name))
            connection = socket.socket(fileno=int(name))
            try:
                os.set_blocking(int(name), is_blocking)  # `setdefaulttimeout` has changed it
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and _normal(connection.getpeername()[0]) == machine:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def _normal(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed
