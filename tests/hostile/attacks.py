"""What one client can do to a server. Each attack returns the statuses it was answered with.

Bodies are made before the attack begins, so that the time measured is the server's.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tests.hostile.hostile_server import HostileServer, assert_unharmed

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
WORDS = "The quick brown fox jumps over the lazy dog. "
MIB = 2**20
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Attack(NamedTuple):
    """`allowed`: the statuses that it may be answered with; 0 is a closed connection."""

    name: str
    run: Callable[[HostileServer], list[int]]
    allowed: tuple[int, ...]


def name_of(attack: Attack) -> str:
    return attack.name


def resist(server: HostileServer, attack: Attack) -> None:
    def run() -> None:
        assert set(attack.run(server)) <= set(attack.allowed)

    assert_unharmed(server, attack.name, run)


def sends(name: str, path: str, body: bytes, *allowed: int) -> Attack:
    """One request."""
    return Attack(name, lambda server: [server.post(path, body)[0]], allowed)


def sends_raw(name: str, *pieces: bytes, allowed: Iterable[int] = (0, 400)) -> Attack:
    """Bytes on a connection, as they are."""
    return Attack(name, lambda server: [raw(server, pieces)], tuple(allowed))


def raw(server: HostileServer, pieces: Iterable[bytes], answer_s: float = 5.0) -> int:
    """The status that these bytes are answered with; 0 if there is none."""
    with server.connect(answer_s) as connection:
        with contextlib.suppress(ConnectionError, TimeoutError):
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError, TimeoutError):
            line = connection.recv(4096).split(b" ")
            return int(line[1]) if line[0].startswith(b"HTTP/") else 0
    return 0


def text(num_chars: int) -> str:
    return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def chat(content: Any, count: int = 1, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}] * count
    return body(model="default", messages=messages, max_tokens=1, **fields)


def prompts(prompt: Any, count: int, field: str = "text") -> bytes:
    return body(**{field: [prompt] * count}, sampling_params={"max_new_tokens": 1})


def logit_bias(num_keys: int) -> bytes:
    bias = ",".join(map('"{}":0'.format, range(num_keys)))
    return b'{"prompt":"hi","logit_bias":{' + bias.encode() + b"}}"


def metadata(value: bytes, num_bytes: int) -> bytes:
    values = (value + b",") * (num_bytes // (len(value) + 1))
    return b'{"prompt":"hi","metadata":{"a":[' + values + value + b"]}}"


def pipelined(request: bytes, count: int) -> Callable[[HostileServer], list[int]]:
    """Many requests on one connection, none of whose answers is waited for."""

    def run(server: HostileServer) -> list[int]:
        raw(server, (request * 1000 for _ in range(count // 1000)))
        return []

    return run


def half_sent_requests(server: HostileServer, count: int = 200) -> list[int]:
    """Connections that begin a request and never end it: a third each in the head, the body, and
    before the first byte."""
    heads = [
        b"",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 1000,
        HEAD + b'Content-Length: 1000000\r\n\r\n{"text": "' + b"a" * 200_000,
    ]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(count)]
        for index, connection in enumerate(connections):
            connection.sendall(heads[index % len(heads)])
        time.sleep(2.0)
    return []


def idle_connections(server: HostileServer, count: int = 600) -> list[int]:
    """More than the server takes, opened and left."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(server.connect())
        time.sleep(1.0)
    return []


def endless(head: bytes, piece: bytes, num_bytes: int = 200 * MIB) -> tuple[bytes, ...]:
    return (head, *([piece * (MIB // len(piece))] * (num_bytes // MIB)))


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

# Those that froze the server, or filled it, before there were limits.
NAMED = [
    sends("chat of 8 MiB", CHAT, chat(text(8 * MIB)), 400, 413),
    sends("chat of 30 MiB", CHAT, chat(text(30 * MIB)), 400, 413),
    sends("1,024 prompts of 10,800", GENERATE, prompts(text(10_800), 1024), 200),
    sends("logit_bias of 2.6 M keys", COMPLETIONS, logit_bias(2_600_000), 400),
    sends("metadata of 27 MiB", COMPLETIONS, metadata(b"[]", 27 * MIB), 400),
    Attack(
        "500,000 pipelined GETs",
        pipelined(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 500_000),
        (),
    ),
    Attack("200 half-sent requests", half_sent_requests, ()),
    sends_raw("a header without end", *endless(b"GET / HTTP/1.1\r\nX: ", b"a"), allowed=(0, 431)),
    sends_raw("a URL without end", *endless(b"GET /", b"a"), allowed=(0, 414, 431)),
    sends_raw(
        "headers without end", *endless(b"GET / HTTP/1.1\r\n", b"a: b\r\n"), allowed=(0, 431)
    ),
]

# Short, and quick to run.
QUICK = [
    sends("65 levels", COMPLETIONS, b'{"prompt":' + b"[" * 65 + b"]" * 65 + b"}", 400),
    sends("100,000 levels", COMPLETIONS, b"[" * 100_000, 400),
    sends("levels in metadata", COMPLETIONS, metadata(b"[" * 64 + b"]" * 64, 1), 400),
    sends("an integer of a million digits", COMPLETIONS, b'{"seed":' + b"1" * MIB + b"}", 400),
    sends("a fraction of a million digits", COMPLETIONS, b'{"top_p":0.' + b"1" * MIB + b"}", 400),
    sends("an exponent of a million digits", COMPLETIONS, b'{"top_p":1e' + b"1" * MIB + b"}", 400),
    sends("one key 100,000 times", COMPLETIONS, b"{" + b'"a":1,' * 10**5 + b'"a":1}', 400),
    sends("a key of 8 MiB", COMPLETIONS, body(**{"a" * 8 * MIB: 1}), 400),
    sends("no UTF-8 after 8 MiB", GENERATE, b'{"text":"' + b"a" * 8 * MIB + b'\xff"}', 400),
    sends("a quote that never ends", GENERATE, b'{"text":"' + b"a" * 8 * MIB, 400),
    sends("8 MiB of backslashes", GENERATE, b"\\" * 8 * MIB, 400),
    sends("8 MiB of zeros", GENERATE, bytes(8 * MIB), 400),
    sends("8 MiB of spaces", GENERATE, b" " * 8 * MIB, 400),
    sends("8 MiB to a session", "/open_session", b" " * 8 * MIB, 413),
    sends("8 MiB to no route", "/nowhere", b" " * 8 * MIB, 413),
    sends("33 MiB", GENERATE, b" " * 33 * MIB, 413),
    sends_raw("noise", bytes(range(256)) * 4096),
    sends_raw("a TLS greeting", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
    # The page at / needs no header.
    sends_raw("HTTP/0.9", b"GET /\r\n\r\n", allowed=(0, 200, 400)),
    sends_raw("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    sends_raw("HTTP/7.3", b"GET / HTTP/7.3\r\n\r\n"),
    sends_raw("an unknown method", b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    sends_raw("a null in a header", b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n"),
    sends_raw("a header without colon", b"GET / HTTP/1.1\r\nHost a\r\n\r\n"),
    sends_raw(
        "a URL beyond ASCII",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        allowed=(400, 404),
    ),
    sends_raw("line ends for ever", *endless(b"", b"\r\n"), allowed=(0, 400, 431)),
    sends_raw("a negative length", HEAD + b"Content-Length: -1\r\n\r\n"),
    sends_raw("two lengths", HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    sends_raw("a length beyond 64 bits", HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n"),
    sends_raw("a length of 2^62", HEAD + b"Content-Length: %d\r\n\r\n" % 2**62, allowed=(413,)),
    sends_raw(
        "length and chunks",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ),
    sends_raw("a chunk of wrong size", CHUNKED + b"zz\r\n"),
    sends_raw("a chunk of 2^64", CHUNKED + b"1" + b"0" * 16 + b"\r\n"),
    sends_raw("chunks of a byte", CHUNKED + b"1\r\n \r\n" * 50_000 + b"0\r\n\r\n", allowed=(431,)),
    sends_raw("chunks without end", *endless(CHUNKED, b"8\r\n        \r\n"), allowed=(0, 413, 431)),
    sends_raw("a chunk extension without end", *endless(CHUNKED + b"1;", b"a"), allowed=(0, 431)),
    sends_raw("trailers without end", *endless(CHUNKED + b"0\r\n", b"a: b\r\n"), allowed=(0, 431)),
    sends_raw("a trailer without end", *endless(CHUNKED + b"0\r\na: ", b"a"), allowed=(0, 431)),
    sends_raw(
        "an upgrade to WebSocket",
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        allowed=(0, 200, 400),
    ),
    sends_raw(
        "a tunnel",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        allowed=(0, 400, 404, 405),
    ),
    Attack(
        "pipelined POSTs",
        pipelined(HEAD + b"Content-Length: 2\r\n\r\n{}", 100_000),
        (),
    ),
    Attack("600 idle connections", idle_connections, ()),
]
