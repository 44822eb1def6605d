"""Requests that are nearly right: valid HTTP/1.1 with seeded mistakes in head, framing and body.

Data only: nothing here is sent. `mutated(rng)` draws a case; the same generator draws the same.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.server.malformed_bodies import MALFORMED

_MAX_PIECES = 8
_CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "max_tokens": 4,
}
_GENERATE: dict[str, Any] = {
    "input_ids": [300, 301, 302],
    "sampling_params": {"temperature": 0, "max_new_tokens": 4},
}
_BODIES: tuple[tuple[str, Any], ...] = (
    ("/generate", _GENERATE),
    ("/generate", _GENERATE | {"stream": True}),
    ("/generate", _GENERATE | {"return_logprob": True, "top_logprobs_num": 2, "rid": "fuzz"}),
    ("/generate", {"text": ["What?", "Why?"], "sampling_params": {"max_new_tokens": 3, "n": 2}}),
    ("/generate", _GENERATE | {"session_params": {"id": "fuzz"}}),
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", _CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"model": "default", "prompt": "One, two,", "max_tokens": 4, "stop": "."}),
    ("/v1/completions", {"model": "default", "prompt": [300, 301], "max_tokens": 2, "echo": True}),
    ("/open_session", {"capacity_of_str_len": 0, "streaming": True, "session_id": "fuzz"}),
    ("/close_session", {"session_id": "fuzz"}),
    ("/rollback_session", {"session_id": "fuzz", "num_turns": 1}),
    ("/fork_session", {"session_id": "fuzz"}),
    ("/list_sessions", {}),
    ("/abort_request", {"rid": "fuzz"}),
    ("/flush_cache", {}),
)
_READS = ("/health", "/health_generate", "/v1/models", "/get_model_info", "/get_server_info")
_READS += ("/metrics", "/openapi.json", "/list_sessions", "/v1/models/default", "/nowhere")
_HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**64, -(2**63), 1e308, -0.0, 1e-320, 0.5),
    *("", "\0", "\ud800", "a\r\nb", "\x1b[31m", "x" * 5000, "🙂" * 50, "fuzz", "NaN", [], {}, [[]]),
    *([None], [[0]], {"": ""}, [0] * 300, {"type": "text", "text": "a"}, [{"role": "user"}]),
)
_METHODS = (b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"get")
_METHODS += (b"PRI", b"", b"G\0T", b"POST " * 3, b"A" * 3000)
_TARGETS = (b"*", b"", b"//", b"/%", b"/%00", b"/\xff\xfe", b"http://[::1", b"http://a:b@c/health")
_TARGETS += (
    b"/../../etc/passwd",
    b"/health?" + b"a=b&" * 40,
    b"/" + b"a" * 9000,
    b"/health#x",
    b"a",
)
_VERSIONS = (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"HTTP/1.", b"", b"X")
_LINES = (
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Length: 0"),
    *(b"Transfer-Encoding: identity", b"Content-Length: -1", b"Content-Length: 0x10", b"no colon"),
    *(b"Content-Length: 99999999999999999999", b"Content-Length: 5, 5", b": empty", b" folded: a"),
    *(
        b"Expect: 100-continue",
        b"Expect: the-worst",
        b"Connection: keep-alive",
        b"Host: b",
        b"A:\0",
    ),
    *(
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13",
        b"X: \xff\xfe\x80",
    ),
    *(
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
        b"a b: c",
    ),
    *(b"Authorization: Bearer \xff", b"Authorization: \x01", b"Content-Encoding: gzip", b"X: a\rb"),
    *(
        b"Content-Type: text/plain",
        b"Content-Type: application/json; charset=utf-16",
        b"X: a\nb: c",
    ),
    *(b"Content-Type: multipart/form-data", b"X: " + b"y" * 70_000, b"\r\n".join([b"X: y"] * 500)),
    *(b"Origin: null", b"Range: bytes=0-1", b"X-Forwarded-For: \x00", b"Cookie: " + b";" * 2000),
    *(b"Access-Control-Request-Method: POST", b"Content-Length : 3", b"Trailer: Content-Length"),
)


class Case(NamedTuple):
    """What one client sends, and what it does then.

    Attributes:
        pieces: bytes, each written by itself.
        ending: "wait" for the end of the answer, "half" close after sending, or "vanish" at once.
        method: "HEAD" if the answers to the requests in it have no bodies, else "GET".
    """

    pieces: tuple[bytes, ...]
    ending: str
    method: str


class _Draft(NamedTuple):
    method: bytes
    target: bytes
    version: bytes
    lines: list[bytes]
    body: bytes


def mutated(rng: random.Random) -> Case:
    """The next case: one or two mistakes, in most cases, sent in one or several pieces."""
    draft = _drafted(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        draft = rng.choice(_HEAD_MISTAKES)(rng, draft)
    data = _written(rng, draft)
    if rng.random() < 0.1:
        data = _bytes_changed(rng, data)
    if rng.random() < 0.05:
        data *= rng.randrange(2, 40)  # pipelined
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)]
    ending = rng.choices(("wait", "half", "vanish"), (14, 3, 3))[0]
    return Case(_pieces(rng, data), ending, "HEAD" if draft.method == b"HEAD" else "GET")


def _drafted(rng: random.Random) -> _Draft:
    """A request whose head is right; its body may not be."""
    lines = [b"Host: localhost", b"Connection: close"]
    if rng.random() < 0.2:
        return _Draft(b"GET", rng.choice(_READS).encode(), b"HTTP/1.1", lines, b"")
    if rng.random() < 0.15:
        known = rng.choice(MALFORMED)
        path, body = known.path, known.body
    else:
        path, value = rng.choice(_BODIES)
        if rng.random() < 0.6:
            value = _value_changed(rng, value)
        body = json.dumps(value).encode()
        if rng.random() < 0.2:
            body = _bytes_changed(rng, body)
    lines.append(b"Content-Type: application/json")
    return _Draft(b"POST", path.encode(), b"HTTP/1.1", lines, body)


def _value_changed(rng: random.Random, value: Any) -> Any:
    """JSON with one place replaced, dropped, repeated or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        change = rng.randrange(5)
        if change == 0:
            return {k: v for k, v in value.items() if k != key}
        if change == 1:
            return value | {
                rng.choice(("n", "stop", "rid", "seed", "x", "", "tools")): _hostile(rng)
            }
        return value | {key: _value_changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        change = rng.randrange(3)
        if change == 0:
            return value * rng.randrange(2, 100)
        return [*value[:at], _value_changed(rng, value[at]), *value[at + 1 :]]
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 63, 64, 200))):
            value = [value]
        return value
    return _hostile(rng)


def _hostile(rng: random.Random) -> Any:
    return rng.choice(_HOSTILE_VALUES)


def _bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, dropped, added or repeated."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        change = rng.randrange(4)
        if change == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            del changed[at : at + rng.randrange(1, 20)]
        elif change == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            changed[at:at] = changed[max(0, at - 30) : at]
    return bytes(changed)


def _other_method(rng: random.Random, draft: _Draft) -> _Draft:
    return draft._replace(method=rng.choice(_METHODS))


def _other_target(rng: random.Random, draft: _Draft) -> _Draft:
    return draft._replace(target=rng.choice((*_TARGETS, draft.target + b"/", draft.target + b"?a")))


def _other_version(rng: random.Random, draft: _Draft) -> _Draft:
    return draft._replace(version=rng.choice(_VERSIONS))


def _one_more_line(rng: random.Random, draft: _Draft) -> _Draft:
    lines = list(draft.lines)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(_LINES))
    return draft._replace(lines=lines)


def _one_line_less(rng: random.Random, draft: _Draft) -> _Draft:
    lines = list(draft.lines)
    if lines:
        del lines[rng.randrange(len(lines))]
    return draft._replace(lines=lines)


_HEAD_MISTAKES: tuple[Callable[[random.Random, _Draft], _Draft], ...] = (
    *(_other_method, _other_target, _other_version),
    *(_one_more_line, _one_more_line, _one_more_line, _one_line_less),
)


def _written(rng: random.Random, draft: _Draft) -> bytes:
    """The bytes of a request, its body framed by a length or in chunks, and not always rightly."""
    lines, body = list(draft.lines), draft.body
    if draft.body or rng.random() < 0.1:
        if rng.random() < 0.3:
            lines.append(b"Transfer-Encoding: chunked")
            body = _chunked(rng, body)
        else:
            wrong = rng.choice((-1, 1, 7, -7)) if rng.random() < 0.1 else 0
            lines.append(b"Content-Length: %d" % max(0, len(body) + wrong))
    end = b"\n" if rng.random() < 0.03 else b"\r\n"
    first = b" ".join((draft.method, draft.target, draft.version))
    return end.join((first, *lines, b"", b"")) + body


def _chunked(rng: random.Random, body: bytes) -> bytes:
    """`body` in chunks; in one case of four something about them is wrong."""
    wrong = rng.randrange(32)
    written, at = b"", 0
    while at < len(body):
        piece = body[at : at + rng.choice((1, 10, 100, 1000))]
        at += len(piece)
        size = b"%x" % (len(piece) + (wrong == 0))
        if wrong == 1:
            size = b"-" + size
        elif wrong == 2:
            size = b"f" * 20
        elif wrong == 3:
            size += b";name=" + b"v" * 200
        elif wrong == 4:
            size = b"0x" + size
        written += size + b"\r\n" + piece + (b"" if wrong == 5 else b"\r\n")
    last = {6: b"", 7: b"0\r\n", 8: b"0\r\nContent-Length: 4\r\n\r\n", 9: b"00000\r\nX\r\n\r\n"}
    return written + last.get(wrong, b"0\r\n\r\n")


def _pieces(rng: random.Random, data: bytes) -> tuple[bytes, ...]:
    """`data` as it is, or cut at some places."""
    if rng.random() < 0.6 or not data:
        return (data,)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, _MAX_PIECES)))
    ends = [*cuts, len(data)]
    return tuple(data[start:end] for start, end in zip([0, *cuts], ends, strict=True))
