"""Finds free ports for the services of a group of processes."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from perdure.errors import LaunchError

HOST = "127.0.0.1"


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Different free ports of `host` ("" and "::": all addresses), or LaunchError.

    None is from the range that the kernel assigns by itself, because an outgoing connection could
    take it.
    """
    low, high = 20000, _first_ephemeral()
    rng = random.SystemRandom()
    with ExitStack() as held:
        ports: list[int] = []
        tried: set[int] = set()
        while len(tried) < high - low:  # drawn one by one: to shuffle all takes 20 ms
            port = rng.randrange(low, high)
            if port in tried:
                continue
            tried.add(port)
            listener = held.enter_context(_socket(host))
            try:
                listener.bind((host, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise LaunchError(f"expected {count} free ports from {low} to {high}, found {len(ports)}")


def is_taken(port: int, host: str = HOST) -> bool:
    """Whether a process listens on `port`."""
    with _socket(host) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closing port is free
        try:
            listener.bind((host, port))
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
