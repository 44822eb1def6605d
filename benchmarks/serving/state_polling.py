"""The cost of clients that poll the server's state: `python -m benchmarks.serving.state_polling`.

For each route that reads the engine's state, 16 connections poll without a pause while streams are
served. The table has the served tokens per second, and the processor time of the engine process and
of the server process per token, each over the same without pollers. `/health`, which reads nothing
of the engine, shows the cost of the pollers' processor time and of HTTP.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.serving.rounds import Load, Prompts, add_options, load_of, server

ROUTES = (
    "/health",
    "/health_generate",
    "/get_load",
    "/v1/loads",
    "/get_server_info",
    "/metrics",
    "/list_sessions",
)
NUM_CONNECTIONS = 16
_SETTLE_S = 0.5
_PROMPT_IDS = 400  # every model has more


class Cost(NamedTuple):
    """Tokens per second, and processor seconds per token."""

    rate: float
    engine_s: float
    server_s: float


async def poll(port: int, path: str, num_connections: int = NUM_CONNECTIONS) -> None:
    """Request `path` repeatedly on `num_connections` connections until cancelled."""
    request = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()

    async def ask_on() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{path}: {head.splitlines()[0]!r}")
            (size,) = (
                int(line.partition(b":")[2])
                for line in head.lower().splitlines()
                if line.startswith(b"content-length:")
            )
            await reader.readexactly(size)

    await asyncio.gather(*(ask_on() for _ in range(num_connections)))


@contextmanager
def polled(port: int, path: str) -> Iterator[None]:
    """Run pollers of `path` in a separate process while the context is open."""
    command = [sys.executable, "-m", __spec__.name, "--poll", str(port), path]
    process = subprocess.Popen(command)
    time.sleep(_SETTLE_S)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the pollers of {path} have ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait()


def measure(load: Load, port: int, prompts: Prompts) -> Cost:
    """Serve the prompts once."""
    (listener,) = (
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    )
    own = psutil.Process(listener)
    (engine,) = (each for each in own.children() if "sgl_jax.engine" in each.cmdline())

    def spent_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = spent_s(engine), spent_s(own)
    seconds = asyncio.run(load.serve(port, prompts))
    after = spent_s(engine), spent_s(own)
    engine_s, server_s = ((b - a) / load.num_tokens for a, b in zip(before, after, strict=True))
    return Cost(load.num_tokens / seconds, engine_s, server_s)


def ratios(once: Callable[[], Cost], port: int, path: str) -> list[float]:
    """Return each figure of a round's two blocks with pollers of `path`, over its two without."""
    quiet = [once()]
    with polled(port, path):
        busy = [once(), once()]
    quiet.append(once())
    return [
        sum(each) / sum(other)
        for each, other in zip(zip(*busy, strict=True), zip(*quiet, strict=True), strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; each figure is the median of the rounds' ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--routes", nargs="+", default=ROUTES)
    parser.add_argument("--checkout", type=Path, help="whose server runs; default: this one")
    options = parser.parse_args(argv)
    load, rng = load_of(options), np.random.default_rng(0)
    model_path = options.model_path.resolve()
    flags = ("--model-path", str(model_path), "--log-level", "warning", "--disable-access-log")
    with server(flags, options.checkout) as port:

        def once() -> Cost:
            return measure(load, port, load.random_prompts(rng, _PROMPT_IDS))

        once()  # warms caches
        print("| polled route | tokens/s | engine time per token | server time per token |")
        print("|---|---|---|---|", flush=True)
        for path in options.routes:
            rounds = [ratios(once, port, path) for _ in range(options.rounds)]
            medians = (statistics.median(column) for column in zip(*rounds, strict=True))
            cells = " | ".join(f"{ratio:.3f}" for ratio in medians)
            print(f"| {path} | {cells} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--poll"]:
        asyncio.run(poll(int(sys.argv[2]), sys.argv[3]))
    else:
        main()
