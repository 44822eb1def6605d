"""What is long, and nearly or just allowed: what limits let pass must not freeze the server."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.hostile.attacks import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    HEAD,
    MIB,
    Attack,
    body,
    chat,
    logit_bias,
    metadata,
    name_of,
    prompts,
    resist,
    sends,
    text,
)
from tests.hostile.hostile_server import HostileServer

# A module of its own: default runs do not make its bodies, which take a second and 300 MiB.
pytestmark = pytest.mark.long


def tool_calls(messages: int, calls: int) -> bytes:
    message = {"role": "user", "content": "a", "tool_calls": [{}] * calls}
    return body(model="default", messages=[message] * messages)


def at_once(path: str, data: bytes, count: int) -> Callable[[HostileServer], list[int]]:
    """The same request from several threads together."""

    def run(server: HostileServer) -> list[int]:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(server.post(path, data)[0]))
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statuses

    return run


def sent_and_left(data: bytes, count: int) -> Callable[[HostileServer], list[int]]:
    """Requests whose clients go away before the answer."""

    def run(server: HostileServer) -> list[int]:
        head = HEAD + b"Content-Length: %d\r\n\r\n" % len(data)
        for _ in range(count):
            with server.connect() as connection:
                connection.sendall(head + data)
                time.sleep(0.01)
        return []

    return run


LONG = [
    sends("chat that just fits", CHAT, chat(text(8 * MIB - 1000)), 400),
    sends("a prompt that just fits", GENERATE, prompts(text(8 * MIB - 1000), 1), 400),
    sends("a million ids", GENERATE, body(input_ids=[7] * 1_040_000), 400),
    sends("1,024 lists of 1,000 ids", GENERATE, prompts([7] * 1000, 1024, "input_ids"), 200),
    sends("1,024 completions of ids", COMPLETIONS, body(prompt=[[7] * 1000] * 1024), 200, 400),
    sends("3 million ids", GENERATE, body(input_ids=[7] * 3_000_000), 400),
    sends("ids, the last of them wrong", GENERATE, body(input_ids=[7] * 1_000_000 + [-1]), 400),
    sends("ids, all of them wrong", GENERATE, body(input_ids=["a"] * 1_000_000), 400),
    sends("16,384 messages", CHAT, chat("hi", 16_384), 200, 400),
    sends("16,384 wrong messages", CHAT, chat(7, 16_384), 400),
    sends("60,000 messages", CHAT, chat("hi", 60_000), 400),
    sends("40,000 parts", CHAT, chat([{"type": "text", "text": "a"}] * 40_000), 200, 400),
    sends("40,000 wrong parts", CHAT, chat([{"type": "x"}] * 40_000), 400),
    sends("100,000 unknown fields", CHAT, body(**{f"k{i}": 1 for i in range(100_000)}), 400),
    sends("logit_bias of 100,000 keys", COMPLETIONS, logit_bias(100_000), 400),
    sends("a million stop strings", COMPLETIONS, body(prompt="a", stop=["a"] * 1_000_000), 400),
    sends("a million stop ids", COMPLETIONS, body(prompt="a", stop_token_ids=[1] * 10**6), 400),
    sends("a million names", GENERATE, body(text="a", rid=["a"] * 1_000_000), 400),
    sends("a million priorities", GENERATE, body(text="a", priority=[1] * 1_000_000), 400),
    sends("100,000 sampling_params", GENERATE, body(text="a", sampling_params=[{}] * 10**5), 400),
    sends("a million times nothing", GENERATE, body(text="a", image_data=[""] * 1_000_000), 400),
    sends("a message of nothings", CHAT, tool_calls(messages=16_000, calls=60), 400),
    sends("128 long answers", COMPLETIONS, body(prompt=[7] * 500_000, n=128, max_tokens=1), 200),
    sends("a million flags", GENERATE, body(text="a", return_logprob=[True] * 10**6), 400),
    sends("metadata of strings", COMPLETIONS, metadata(b'""', 3 * MIB), 200, 400),
    sends("metadata of objects", COMPLETIONS, metadata(b'{"a":1}', 30 * MIB), 400),
    sends("template arguments", CHAT, chat("a", chat_template_kwargs={"a": [1] * 10**6}), 200, 400),
    sends("a prompt of quotes", GENERATE, prompts('"' * 8_000_000, 1), 200, 400),
    sends("a prompt of backslashes", GENERATE, prompts("\\" * 8_000_000, 1), 200, 400),
    sends("a prompt of spaces", GENERATE, prompts(" " * 4 * MIB, 1), 200, 400, 503),
    sends("a prompt of one word", GENERATE, prompts("a" * 4 * MIB, 1), 200, 400, 503),
    sends("a prompt of line ends", GENERATE, prompts("\r\n" * MIB, 1), 200, 400, 503),
    sends("a prompt of emoji", GENERATE, prompts("👩‍👧" * 500_000, 1), 200, 400, 503),
    sends("a prompt of accents", GENERATE, prompts("e" + "\u0301" * 2 * MIB, 1), 200, 400, 503),
    sends("1,024 short prompts", GENERATE, prompts("hello", 1024), 200),
    Attack("20 chats of 1 MiB", at_once(CHAT, chat(text(MIB)), 20), (200, 400, 503)),
    Attack("12 bodies of 30 MiB", at_once(GENERATE, prompts(text(30 * MIB), 1), 12), (400, 503)),
    Attack("long prompts, clients gone", sent_and_left(prompts(text(MIB), 1), 50), ()),
]


@pytest.mark.parametrize("attack", LONG, ids=name_of)
def test_what_is_merely_long_harms_no_one(server: HostileServer, attack: Attack) -> None:
    resist(server, attack)
