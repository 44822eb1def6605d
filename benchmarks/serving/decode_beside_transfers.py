"""Decode throughput while prefixes move between the device and host memory.

    python -m benchmarks.serving.decode_beside_transfers --model-path FOLDER --direction in

Some rows decode. Meanwhile other requests arrive at a fixed pace and generate one token; all of
their prompts but one token is cached. They use one history, which does not move, or several in
turns, each of which moves. With `in`, the device's pool has no room for all, so each is fetched.
With `out`, host memory has none, so each is copied once more (`write_through_selective`). So the
two differ only by the transfers. Blocks of both, and of rows that decode without other requests,
alternate as A B C C B A, so that other load on the machine affects them alike.
"""

import argparse
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, repeat

from benchmarks.serving.host_turns import settle
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine

_NUM_HISTORIES = 4
_PAGE_SIZE = 16
_ARMS = ("alone", "in place", "moved")
_MAX_OTHERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True, help="folder with a config.json")
    parser.add_argument("--direction", choices=("in", "out"), required=True)
    parser.add_argument("--history", type=int, default=1024, help="tokens of a prefix")
    parser.add_argument("--rows", type=int, default=4, help="that decode")
    parser.add_argument("--output-len", type=int, default=256, help="of each row in a block")
    parser.add_argument("--period", type=int, default=16, help="decoded tokens for each prefix")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    # Room for the rows and one history and a half, and room for all.
    few = options.rows * (options.output_len + 32) + options.history * 3 // 2
    many = few + (_NUM_HISTORIES + 1) * options.history
    pool, host = (few, many) if options.direction == "in" else (many, few)
    with Engine(
        options.model_path,
        load_format="dummy",
        device="cpu",
        page_size=_PAGE_SIZE,
        context_length=options.history + options.output_len + 64,
        max_running_requests=options.rows + _MAX_OTHERS,
        chunked_prefill_size=512,
        warmup="none",
        max_total_tokens=pool,
        radix_eviction_policy="lru",
        enable_hierarchical_cache=True,
        hicache_ratio=host / pool,
        hicache_write_policy="write_through_selective",
        hicache_fetch_policy="always",
    ) as engine:
        _Blocks(engine, options).print_rounds()


class _Blocks:
    """Blocks of rows that decode while requests arrive; `options` are the command line's."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self._engine, self._options, self._rng = engine, options, random.Random(0)
        self._histories = [self._tokens(options.history) for _ in range(_NUM_HISTORIES)]
        self._in_turns = cycle(self._histories)
        self._threads = ThreadPoolExecutor(1 + _MAX_OTHERS)
        self._num_requests = options.output_len // options.period - 1
        self._period_s = 0.0
        self.num_moved = 0  # tokens, in the last block

    def print_rounds(self) -> None:
        """Print the throughput of each round's blocks, and the ratio with its spread."""
        options = self._options
        for history in self._histories * 2:  # the second time they are copied
            self._find(history)
        for _ in range(2):  # the first blocks of each arm compile
            self._period_s = self._seconds("alone") / options.output_len * options.period
        for arm in _ARMS:
            self._seconds(arm)
        print("tokens/s of rows", *_ARMS, "moved / in place", sep="\t")
        ratios = []
        for number in range(options.rounds):
            seconds = dict.fromkeys(_ARMS, 0.0)
            for arm in (*_ARMS, *_ARMS[::-1]):
                seconds[arm] += self._seconds(arm)
                expected = self._num_requests * options.history * (arm == "moved")
                if abs(self.num_moved - expected) > expected / 10:
                    print(f"{self.num_moved:,} tokens were moved in a block, not {expected:,}")
            ratios.append(seconds["in place"] / seconds["moved"])
            num_tokens = 2 * options.rows * options.output_len
            rates = (f"{num_tokens / seconds[arm]:8.1f}" for arm in _ARMS)
            print(f"round {number:<10}", *rates, f"{ratios[-1]:.3f}", sep="\t", flush=True)
        first, median, third = statistics.quantiles(ratios, n=4)
        print(f"median ratio {median:.3f}, quartiles {first:.3f} and {third:.3f}")

    def _seconds(self, arm: str) -> float:
        """Return the seconds in which the rows decode all their tokens."""
        options = self._options
        histories = self._in_turns if arm == "moved" else repeat(self._histories[0])
        num_before = self._num_moved()
        begin_s = time.perf_counter()
        prompts = [self._tokens(8) for _ in range(options.rows)]
        rows = self._threads.submit(self._generate, prompts, options.output_len)
        others = []
        for _ in range(0 if arm == "alone" else self._num_requests):
            time.sleep(self._period_s)
            others.append(self._threads.submit(self._find, next(histories)))
        rows.result()
        seconds = time.perf_counter() - begin_s
        for other in others:
            other.result()
        self.num_moved = self._num_moved() - num_before
        self._find(self._histories[0])  # it is in place when the next block begins
        return seconds

    def _find(self, history: list[int]) -> None:
        """Serve a request for one token; all of its prompt but one token is cached."""
        self._generate([[*history, 5]], 1)

    def _generate(self, prompts: list[list[int]], count: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
        self._engine.generate(input_ids=prompts, sampling_params=sampling, progress=False)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(300, self._engine.info["vocab_size"]) for _ in range(count)]

    def _num_moved(self) -> int:
        """Return the number of tokens moved since the start, after all transfers have ended."""
        settle(self._engine)
        counters = self._engine.server_info()["counters"]
        if self._options.direction == "in":
            return int(counters["host_fetched_tokens"])
        return int(counters["host_copied_pages"]) * _PAGE_SIZE


if __name__ == "__main__":
    main()
