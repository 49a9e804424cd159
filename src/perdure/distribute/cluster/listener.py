"""Where process 0 of a group listens: at the coordinator's address, not at every one of its machine."""

from __future__ import annotations

import ipaddress
import socket

ALL = ""
"""Stands for every address of this machine."""


def listen(host: str, port: int) -> socket.socket:
    """A listener at the address of this machine that `host` names (see `local_address`).

    Args:
        host: The coordinator's host, as the other processes know it.
        port: Its port; 0 takes a free one.

    Raises:
        OSError: The port is taken.
    """
    address = local_address(host)
    if address == ALL:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server((ALL, port), family=family, dualstack_ipv6=dual, backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def local_address(host: str) -> str:
    """The address of this machine that `host` names; `ALL` if no address here is certain to be meant.

    That is so if `host` is the address of a forwarder or of a service in front of this machine. It is
    also so if a name other than localhost means the loopback here: many systems give their own name
    the address 127.0.1.1, while other machines reach them under a different one.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ALL
    # IPv4 first: a process without IPv6 is more likely than one without IPv4.
    for address in sorted({str(entry[4][0]) for entry in found}, key=lambda text: ":" in text):
        if ipaddress.ip_address(address).is_loopback and not _means_loopback(host):
            return ALL
        if _is_local(address):
            return address
    return ALL


def _means_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().partition(".")[0] == "localhost"


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
