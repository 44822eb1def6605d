"""What one client can do to a server. Each attack returns the statuses it was answered with.

Bodies are made before the attack begins, so that the time measured is the server's.
"""

import json
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.hostile.hostile_server import HostileServer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
WORDS = "The quick brown fox jumps over the lazy dog. "


class Attack(NamedTuple):
    name: str
    run: Callable[[HostileServer], list[int]]


def text(num_chars: int) -> str:
    return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]


def sends(name: str, path: str, body: bytes) -> Attack:
    """One request."""
    return Attack(name, lambda server: [server.post(path, body)[0]])


def chat(num_chars: int) -> bytes:
    messages = [{"role": "user", "content": text(num_chars)}]
    return json.dumps({"model": "default", "messages": messages, "max_tokens": 1}).encode()


def prompts(count: int, num_chars: int) -> bytes:
    sampling = {"max_new_tokens": 1}
    return json.dumps({"text": [text(num_chars)] * count, "sampling_params": sampling}).encode()


def logit_bias(num_keys: int) -> bytes:
    bias = ",".join(f'"{key}":0' for key in range(num_keys))
    return b'{"prompt":"hi","logit_bias":{' + bias.encode() + b"}}"


def nested_metadata(num_bytes: int) -> bytes:
    lists = b"[]," * (num_bytes // 3)
    return b'{"prompt":"hi","metadata":{"a":[' + lists + b"[]]}}"


def pipelined_gets(server: HostileServer, count: int = 500_000) -> list[int]:
    """Many requests on one connection, none of whose answers is waited for."""
    requests = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * 1000
    with server.connect(10) as connection:
        try:
            for _ in range(count // 1000):
                connection.sendall(requests)
            time.sleep(2.0)
        except (ConnectionError, TimeoutError):
            pass  # closed or no longer read: refusing is right
    return []


def half_sent_requests(server: HostileServer, count: int = 200) -> list[int]:
    """Connections that begin a request and never end it: a third each in the head, the body, and
    before the first byte."""
    heads = [
        b"",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 1000,
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000\r\n\r\n" + b'{"text": "' + b"a" * 200_000,
    ]
    connections = [server.connect() for _ in range(count)]
    for index, connection in enumerate(connections):
        connection.sendall(heads[index % len(heads)])
    time.sleep(2.0)
    for connection in connections:
        connection.close()
    return []


def endless_header(server: HostileServer, num_bytes: int = 200 * 2**20) -> list[int]:
    with server.connect(10) as connection:
        try:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nX-Long: ")
            for _ in range(num_bytes // 2**20):
                connection.sendall(b"a" * 2**20)
        except (ConnectionError, TimeoutError):
            pass
    return []


def endless_url(server: HostileServer, num_bytes: int = 200 * 2**20) -> list[int]:
    with server.connect(10) as connection:
        try:
            connection.sendall(b"GET /")
            for _ in range(num_bytes // 2**20):
                connection.sendall(b"a" * 2**20)
        except (ConnectionError, TimeoutError):
            pass
    return []


def many_headers(server: HostileServer, count: int = 2_000_000) -> list[int]:
    with server.connect(10) as connection:
        try:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
            for _ in range(count // 1000):
                connection.sendall(b"a: b\r\n" * 1000)
        except (ConnectionError, TimeoutError):
            pass
    return []


def named_attacks() -> list[Attack]:
    """Those that once froze a server."""
    return [
        sends("chat of 8 MiB", CHAT, chat(8 * 2**20)),
        sends("chat of 30 MiB", CHAT, chat(30 * 2**20)),
        sends("1,024 prompts of 10,800 characters", GENERATE, prompts(1024, 10_800)),
        sends("logit_bias of 2.6 M keys", COMPLETIONS, logit_bias(2_600_000)),
        sends("metadata of 27 MiB", COMPLETIONS, nested_metadata(27 * 2**20)),
        Attack("500,000 pipelined GETs", pipelined_gets),
        Attack("200 half-sent requests", half_sent_requests),
        Attack("a header without end", endless_header),
        Attack("a URL without end", endless_url),
        Attack("2,000,000 headers", many_headers),
    ]
