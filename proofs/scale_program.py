"""A training program without a framework, of 2, 4 or 8 workers, for `scale_runs`.

A step sleeps and adds to an array. A start takes at least `--start-s`, as if a framework were imported
and a step compiled, so that it depends less on what else the machine does. The group is perdure's own
(`KeyValueProcesses`) over a key-value store that process 0 serves on a socket, in place of that of JAX
or PyTorch. The store counts requests; process 0 writes the count at every save to `--requests`.
"""

from __future__ import annotations

import argparse
import os
import socket
import socketserver
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from perdure import CheckpointManager
from perdure.distribute.key_value_group import KeyValueProcesses

HEAD = struct.Struct("!BII")
SET, GET, DELETE = range(3)
LEAF = 65536
CONNECT_S = 120.0


class Server(socketserver.ThreadingTCPServer):
    """The key-value store, in process 0."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Connection)
        self.content: dict[bytes, bytes] = {}
        self.changed = threading.Condition()
        self.requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Connection(socketserver.StreamRequestHandler):
    """The requests of one client, one after the other."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        while head := self.rfile.read(HEAD.size):
            verb, key_size, size = HEAD.unpack(head)
            key, value = self.rfile.read(key_size), self.rfile.read(size)
            with server.changed:
                server.requests += 1
                if verb == SET:
                    server.content[key] = value
                    server.changed.notify_all()
                elif verb == DELETE:
                    server.content.pop(key, None)
                elif verb == GET:
                    server.changed.wait_for(lambda wanted=key: wanted in server.content)
                answer = server.content[key] if verb == GET else b""
            self.wfile.write(HEAD.pack(verb, 0, len(answer)) + answer)


class Client:
    """One connection to the store. A wait ends with the key, or with the store."""

    error: type[Exception] = OSError
    timeout = "timed out"

    def __init__(self, address: tuple[str, int]) -> None:
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                self._socket = socket.create_connection(address)
                break
            except ConnectionRefusedError:  # process 0 does not listen yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    def set(self, key: str, value: bytes) -> None:
        self._ask(SET, key, value)

    def get(self, key: str, seconds: float) -> bytes:
        return self._ask(GET, key)

    def delete(self, key: str) -> None:
        self._ask(DELETE, key)

    def answers(self, text: str) -> bool:
        return False

    def _ask(self, verb: int, key: str, value: bytes = b"") -> bytes:
        name = key.encode()
        self._socket.sendall(HEAD.pack(verb, len(name), len(value)) + name + value)
        _, _, size = HEAD.unpack(self._answers.read(HEAD.size))
        return self._answers.read(size)


def initial() -> dict[str, Any]:
    return {"weights": np.zeros(LEAF), "step": 0}


def advance(state: dict[str, Any]) -> dict[str, Any]:
    """The state after one more step."""
    return {"weights": state["weights"] * 0.999 + state["step"], "step": state["step"] + 1}


def age_s() -> float:
    """Seconds since the kernel started this process."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def leave(store: Client, index: int, count: int) -> None:
    """End process 0, and with it the store, after all others."""
    if index:
        store.set(f"left/{index}", b"")
        return
    for other in range(1, count):
        store.get(f"left/{other}", other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--start-s", type=float, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--requests", type=Path, required=True)
    options = parser.parse_args()
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    server = Server(address) if index == 0 else None
    group = KeyValueProcesses(lambda: Client(address), index, count)
    with CheckpointManager(
        options.run, processes=group, save_interval_steps=options.save_every, recipe={}
    ) as manager:
        state, start = manager.restore_or_initialize(initial())
        time.sleep(max(0.0, options.start_s - age_s()))
        due = time.monotonic()
        for step in range(start, options.steps):
            state = advance(state)
            due += options.step_s
            time.sleep(max(0.0, due - time.monotonic()))
            if server and (step + 1) % options.save_every == 0:
                with open(options.requests, "a") as file:
                    print(os.environ["PERDURE_ATTEMPT"], server.requests, file=file)
            manager.save(step + 1, state, force=step + 1 == options.steps)
    leave(Client(address), index, count)


if __name__ == "__main__":
    main()
