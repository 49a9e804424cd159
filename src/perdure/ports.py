"""Ports for services that meet later: of a group of processes, whoever starts it."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from perdure.errors import LaunchError

HOST = "127.0.0.1"


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports of `host` that were free a moment ago, all different; "" and "::" are all addresses.

    Not from the range that the kernel hands out by itself: one of those may be gone to an outgoing
    connection before the worker listens. Raises `LaunchError` where there are fewer.
    """
    low, high = 20000, _first_ephemeral()
    with ExitStack() as held:
        found: list[int] = []
        for port in random.SystemRandom().sample(range(low, high), high - low):
            each = held.enter_context(_socket(host))
            try:
                each.bind((host, port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise LaunchError(f"expected {count} free ports from {low} to {high}, found {len(found)}")


def taken(port: int, host: str = HOST) -> bool:
    """Whether somebody listens on `port`."""
    with _socket(host) as each:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is only closing is free
        try:
            each.bind((host, port))
        except OSError:
            return True
    return False


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _first_ephemeral() -> int:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    try:
        first = int(path.read_text().split()[0])
    except (OSError, ValueError):
        first = 32768
    return first if first > 21000 else 65536
