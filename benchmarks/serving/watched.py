"""The cost of being watched: `python -m benchmarks.serving.watched`.

Served tokens per second while a viewer has the memory view open and metrics are scraped each
second, over tokens per second of the same server without them. Blocks come in the order quiet,
watched, watched, quiet, and the ratio is that of each such round. Viewer and scraper are processes
of their own, which share the machine's cores with client, server and device.
"""

import argparse
import asyncio
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import DEMO_MODEL
from benchmarks.serving.over_bare import Load, server

_SETTLE_S = 0.5
_PROMPT_IDS = 400  # every model has more


@contextmanager
def watched(port: int) -> Iterator[None]:
    """A viewer and a scraper of the server at `port`, for as long as this is open."""
    url = f"http://127.0.0.1:{port}"
    # One connection and one process for all scrapes, as Prometheus has.
    scrapes = ["curl", "-sf", "--rate", "1/s", "-o", "/dev/null", f"{url}/metrics?[1-100000]"]
    commands = (["curl", "-sNo", "/dev/null", f"{url}/memory/events"], scrapes)
    processes = [subprocess.Popen(command) for command in commands]
    time.sleep(_SETTLE_S)
    try:
        yield
        for process, command in zip(processes, commands, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"{command} has ended with {process.returncode}")
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        time.sleep(_SETTLE_S)


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
    flags = ("--model-path", str(options.model_path), "--log-level", "warning")
    with server(flags) as port:

        def serve() -> float:
            shape = (load.num_streams, load.num_requests, load.prompt_len)
            prompts = rng.integers(0, _PROMPT_IDS, shape, dtype=np.int32)
            return asyncio.run(load.serve(port, prompts))

        serve()  # warms caches
        print(f"{'quiet tok/s':>12}{'watched tok/s':>15}{'watched / quiet':>17}")
        ratios = []
        for _ in range(options.rounds):
            quiet_s = serve()
            with watched(port):
                watched_s = serve() + serve()
            quiet_s += serve()
            ratios.append(quiet_s / watched_s)
            rates = [2 * load.num_tokens / seconds for seconds in (quiet_s, watched_s)]
            print(f"{rates[0]:12.0f}{rates[1]:15.0f}{ratios[-1]:17.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
