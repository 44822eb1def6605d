"""A load of streams on a server in a separate process, and rounds that compare two ways to run it.

A round has four blocks, A B B A, so that a drift of the machine's speed affects the ratio least.
Client and server share the machine's cores with the device, if it is a CPU.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DEMO_MODEL

Prompt = Sequence[int] | Mapping[str, Any]  # token ids, or the body of a chat
Prompts = Sequence[Sequence[Prompt]]  # by stream and request

_START_S = 600.0
_POLL_S = 0.2
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """`num_streams` connections, each with `num_requests` requests in turn."""

    num_streams: int
    num_requests: int
    prompt_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_streams * self.num_requests * self.output_len

    async def serve(self, port: int, prompts: Prompts) -> float:
        """Send all prompts. Return the seconds from the first request to the last answer's end."""
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in prompts]
        start = time.perf_counter()
        await asyncio.gather(*map(self._send_all, streams, prompts))
        seconds = time.perf_counter() - start
        for _, writer in streams:
            writer.close()
        return seconds

    async def _send_all(
        self,
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        prompts: Sequence[Prompt],
    ) -> None:
        reader, writer = stream
        for prompt in prompts:
            route, fields = self._request(prompt)
            body = json.dumps(fields | {"stream": True}).encode()
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (route, len(body), body)
            )
            end = b""
            while not end.endswith(_LAST_CHUNK):
                received = await reader.read(65536)
                if not received:
                    raise RuntimeError("the server closed a connection")
                end = (end + received)[-4096:]
            if b'"completion_tokens":%d,' % self.output_len not in end:
                raise RuntimeError(f"an answer ended otherwise: {end!r}")

    def _request(self, prompt: Prompt) -> tuple[bytes, dict[str, Any]]:
        """Return route and body."""
        sampling = {"temperature": 0, "ignore_eos": True}
        if isinstance(prompt, Mapping):
            limit = {"max_tokens": self.output_len, "stream_options": {"include_usage": True}}
            return b"/v1/chat/completions", {**prompt, **sampling, **limit}
        sampling["max_new_tokens"] = self.output_len
        return b"/generate", {"input_ids": prompt, "sampling_params": sampling}

    def random_prompts(self, rng: np.random.Generator, vocab_size: int) -> Prompts:
        """Return prompts of `prompt_len` random tokens."""
        shape = (self.num_streams, self.num_requests, self.prompt_len)
        prompts: Prompts = rng.integers(0, vocab_size, shape).tolist()
        return prompts


@contextmanager
def server(flags: Sequence[str], checkout: Path | None = None) -> Iterator[int]:
    """Start a server with these flags, from `checkout` if given; yield its port once ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    own = ("--port", str(port), "--warmup", "all")
    command = (sys.executable, "-m", "sgl_jax.launch_server", *own, *flags)
    paths = {} if checkout is None else {"PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, cwd=checkout, env={**os.environ, **paths}
    )
    try:
        _await_ready(process, port)
        yield port
    finally:
        process.terminate()
        process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        time.sleep(_POLL_S)
    raise RuntimeError("the server did not start")


def parse_options(description: str | None, argv: Sequence[str] | None) -> tuple[Load, Path, int]:
    """Return the load, the model's folder and the number of rounds of a command line."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser)
    options = parser.parse_args(argv)
    return load_of(options), options.model_path, options.rounds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model, the load and the rounds."""
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL)
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=8, help="of a stream in a block (8)")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8, help="of four blocks each (8)")


def load_of(options: argparse.Namespace) -> Load:
    return Load(options.num_streams, options.num_requests, options.prompt_len, options.output_len)


def print_rounds(
    load: Load,
    names: tuple[str, str],
    times: Callable[[], tuple[float, float]],
    num_rounds: int,
) -> None:
    """Print tokens per second of the two `names`, and the second's over the first's, by rounds.

    `times` runs the four blocks of a round and returns the seconds of both blocks of each name.
    """
    first, second = names
    print(f"{first + ' tok/s':>15}{second + ' tok/s':>15}{f'{second} / {first}':>17}")
    ratios = []
    for _ in range(num_rounds):
        seconds = times()
        ratios.append(seconds[0] / seconds[1])
        rates = [2 * load.num_tokens / each for each in seconds]
        print(f"{rates[0]:15.0f}{rates[1]:15.0f}{ratios[-1]:17.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")
