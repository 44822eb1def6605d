"""The whole server's speed over the bare programs': `python -m benchmarks.serving.over_bare`.

A server of its own process serves a few streams over HTTP, each of which sends its next request
when its last one has ended. The same tokens are computed by the same compiled programs, launched
one after another with nothing between them: the prompts in as few steps as hold them, then a decode
step of all streams for each token. Blocks come in the order served, bare, bare, served, and the
ratio is that of each such round, so that a machine whose speed drifts spoils it least. The client
and the server share the machine's cores with the device, if that is a CPU.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import DEMO_MODEL
from benchmarks.device.__main__ import decode_plan
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.executor.model_executor import ModelExecutor

_START_S = 600.0
_POLL_S = 0.2
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """`num_streams` connections, each with `num_requests` requests of random tokens in turn."""

    num_streams: int
    num_requests: int
    prompt_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        """Output tokens in all."""
        return self.num_streams * self.num_requests * self.output_len

    async def serve(self, port: int, prompts: np.ndarray) -> float:
        """Seconds from the first request to the last answer's end.

        `prompts` are int32[num_streams, num_requests, prompt_len].
        """
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in prompts]
        start = time.perf_counter()
        await asyncio.gather(*map(self._send_all, streams, prompts.tolist()))
        seconds = time.perf_counter() - start
        for _, writer in streams:
            writer.close()
        return seconds

    async def _send_all(
        self,
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        reader, writer = stream
        sampling = {"temperature": 0, "max_new_tokens": self.output_len, "ignore_eos": True}
        for prompt in prompts:
            body = json.dumps(
                {"input_ids": prompt, "sampling_params": sampling, "stream": True}
            ).encode()
            writer.write(
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            end = b""
            while not end.endswith(_LAST_CHUNK):
                received = await reader.read(65536)
                if not received:
                    raise RuntimeError("the server closed a connection")
                end = (end + received)[-4096:]
            if b'"completion_tokens":%d,' % self.output_len not in end:
                raise RuntimeError(f"an answer ended otherwise: {end!r}")

    def bare(self, executor: ModelExecutor) -> float:
        """Seconds of the bare programs for the same tokens, one request of each stream at once."""
        sizes = executor.sizes
        at_once = max(1, min(sizes.max_chunk_tokens // self.prompt_len, self.num_streams))
        prefill = prefill_plan(sizes, at_once, self.prompt_len)
        middle = self.prompt_len + self.output_len // 2
        decode = decode_plan(sizes, self.num_streams, middle)
        return self.num_requests * (
            executor.time_bare_steps(prefill, -(-self.num_streams // at_once))
            + executor.time_bare_steps(decode, self.output_len - 1)
        )


def prefill_plan(sizes: EngineSizes, num_prompts: int, prompt_len: int) -> StepPlan:
    """A step of whole prompts from their first tokens on."""
    plan = decode_plan(sizes, num_prompts, prompt_len)
    (rank,) = plan.ranks
    rank = rank._replace(
        kv_starts=np.zeros_like(rank.rows),
        q_lens=np.full_like(rank.rows, prompt_len),
        num_decode=0,
    )
    return replace(plan, ranks=(rank,))


@contextmanager
def server(flags: Sequence[str]) -> Iterator[int]:
    """Start a server with these flags; its port once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = (sys.executable, "-m", "sgl_jax.launch_server", "--port", str(port), *flags)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
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


def main(argv: Sequence[str] | None = None) -> None:
    """Print tokens per second both ways, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL)
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=8, help="of a stream in a block (8)")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8, help="of four blocks each (8)")
    options = parser.parse_args(argv)
    load = Load(options.num_streams, options.num_requests, options.prompt_len, options.output_len)
    rng = np.random.default_rng(0)
    args = ServerArgs(model_path=str(options.model_path), warmup="none", decode_log_interval=0)
    executor = ModelExecutor(args)
    flags = ("--model-path", args.model_path, "--decode-log-interval", "0")
    with server(flags) as port:

        def serve() -> float:
            shape = (load.num_streams, load.num_requests, load.prompt_len)
            prompts = rng.integers(0, executor.sizes.vocab_size, shape, dtype=np.int32)
            return asyncio.run(load.serve(port, prompts))

        def bare() -> float:
            return load.bare(executor)

        serve(), bare()  # warms caches
        print(f"{'bare tok/s':>12}{'served tok/s':>14}{'served / bare':>15}")
        ratios = []
        for _ in range(options.rounds):
            served_s = serve()
            bare_s = bare() + bare()
            served_s += serve()
            ratios.append(bare_s / served_s)
            rates = [2 * load.num_tokens / seconds for seconds in (bare_s, served_s)]
            print(f"{rates[0]:12.0f}{rates[1]:14.0f}{ratios[-1]:15.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
