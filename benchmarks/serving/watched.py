"""The cost of being watched: `python -m benchmarks.serving.watched`.

Served tokens per second while a viewer has the memory view open and metrics are scraped each
second, over tokens per second of the same server without them. Blocks come in the order quiet,
watched, watched, quiet, and the ratio is that of each such round. Viewer and scraper are separate
processes, which share the machine's cores with client, server and device.
"""

import asyncio
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from benchmarks.serving.rounds import parse_options, print_rounds, server

_SETTLE_S = 0.5
_PROMPT_IDS = 400  # every model has more


@contextmanager
def watched(port: int) -> Iterator[None]:
    """Run a viewer and a scraper of the server at `port` while the context is open."""
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
    load, model_path, num_rounds = parse_options(__doc__, argv)
    rng = np.random.default_rng(0)
    flags = ("--model-path", str(model_path), "--log-level", "warning")
    with server(flags) as port:

        def serve() -> float:
            return asyncio.run(load.serve(port, load.random_prompts(rng, _PROMPT_IDS)))

        def times() -> tuple[float, float]:
            quiet_s = serve()
            with watched(port):
                watched_s = serve() + serve()
            return quiet_s + serve(), watched_s

        serve()  # warms caches
        print_rounds(load, ("quiet", "watched"), times, num_rounds)


if __name__ == "__main__":
    main()
