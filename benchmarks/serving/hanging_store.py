"""The time of prompts with a store that hangs, over their time without a store.

    python -m benchmarks.serving.hanging_store --model-path models/demo --call exists

Two engines keep prefixes in host memory, and one of them also has a store whose `exists`, `get` or
`put` never returns. After its first overdue transfer both answer the same uncached prompts, one at
a time and in the order A B B A, so that other load on the machine affects both alike. The store's
probes hang, too.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine
from sgl_jax.executor import model_executor

_FIRST_LIMIT_S = 60.0
_CALLS = ("exists", "get", "put")


class Times(NamedTuple):
    """Times of one prompt: elapsed, and of all processors, which other load affects less."""

    wall_s: float
    cpu_s: float


class HangingStore:
    """A store that hangs in one of its calls. It has every block, unless `put` hangs."""

    def __init__(self, hangs_in: str) -> None:
        self._hangs_in = hangs_in

    def _enter(self, call: str) -> None:
        if call == self._hangs_in:
            threading.Event().wait()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._enter("exists")
        return [self._hangs_in == "get" for _ in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return no block."""
        self._enter("get")
        return [None for _ in keys]

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Drop the blocks."""
        self._enter("put")

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True, help="folder with a config.json")
    parser.add_argument("--call", choices=_CALLS, default="exists", help="that hangs")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100, help="of four prompts")
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model_path": options.model_path,
            "device": "cpu",
            "context_length": options.prompt_len + 64,
            "max_running_requests": 2,
            "max_total_tokens": 4096,
            "warmup": "none",
            "enable_hierarchical_cache": True,
        }
        with_store = {
            "hicache_storage_backend": "file",
            "hicache_storage_dir": folder,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        store = HangingStore(options.call)
        with (
            mock.patch.object(model_executor, "open_block_store", return_value=store),
            Engine(**settings) as without,
            Engine(**settings, **with_store) as hanging,
        ):
            _measure(options, rng, without, hanging)


def _measure(
    options: argparse.Namespace, rng: random.Random, without: Engine, hanging: Engine
) -> None:
    vocab_size = without.info["vocab_size"]

    def seconds(engine: Engine) -> Times:
        prompt = [rng.randrange(vocab_size) for _ in range(options.prompt_len)]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        engine.generate(input_ids=[prompt], sampling_params=sampling, progress=False)
        return Times(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    end_s = time.monotonic() + _FIRST_LIMIT_S
    slowest_s = 0.0
    while not hanging.server_info()["counters"]["store_failures"]:
        slowest_s = max(slowest_s, seconds(hanging).wall_s)
        if time.monotonic() > end_s:
            raise TimeoutError(f"no transfer was overdue within {_FIRST_LIMIT_S:.0f} s")
    print(f"until the first overdue transfer a prompt took {slowest_s:.2f} s at most")
    for _ in range(10):
        for engine in (without, hanging, hanging, without):
            seconds(engine)  # programs are compiled
    rounds = [
        [seconds(engine) for engine in (without, hanging, hanging, without)]
        for _ in range(options.rounds)
    ]
    for clock in Times._fields:
        columns = [[getattr(times, clock) for times in own] for own in rounds]
        ratios = [(b + c) / (a + d) for a, b, c, d in columns]
        before = statistics.median(value for a, _, _, d in columns for value in (a, d))
        after = statistics.median(value for _, b, c, _ in columns for value in (b, c))
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"{clock}: median {1e3 * before:.2f} ms without, {1e3 * after:.2f} ms with, ratio "
            f"{after / before:.3f}; by round {median:.3f}, quartiles {low:.3f} and {high:.3f}"
        )


if __name__ == "__main__":
    main()
