"""Time to the first token of a turn whose history is in host memory, or on its disk.

    python -m benchmarks.serving.host_turns --model-path FOLDER --history 4096

The engine's pool holds one and a half conversations and serves several in turns, so each turn finds
its history on the host. It is compared with three other turns: one that computes its history, one
repeated at once with its history on the device, and one after a flush with its history only in the
store's folder (the operating system's cache of these files is dropped). All alternate, so that
other load on the machine affects them alike. Runs with `--hicache-fetch-policy always`: this
comparison decides whether a fetch beats computing.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine

_FIRST = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
_NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True, help="folder with a config.json")
    parser.add_argument("--history", type=int, default=4096, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    rng = random.Random(0)
    pool = words.history * 3 // 2
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(
            words.model_path,
            load_format="dummy",
            device="cpu",
            context_length=words.history + 1024,
            max_running_requests=2,
            chunked_prefill_size=512,
            warmup="none",
            max_total_tokens=pool,
            enable_hierarchical_cache=True,
            hicache_ratio=8.0,
            hicache_fetch_policy="always",
            hicache_storage_backend="file",
            hicache_storage_dir=folder,
            hicache_storage_prefetch_policy="wait_complete",
        ) as engine,
    ):

        def first_token_ms(prompt: list[int]) -> tuple[float, int]:
            begin_s = time.perf_counter()
            (answer,) = engine.generate(input_ids=[prompt], sampling_params=_FIRST, progress=False)
            return 1000 * (time.perf_counter() - begin_s), answer.cached_tokens

        def tokens(count: int) -> list[int]:
            return [rng.randrange(300, engine.info["vocab_size"]) for _ in range(count)]

        histories = [tokens(words.history) for _ in range(2)]
        for history in histories:
            first_token_ms(history)
        times: dict[str, list[float]] = {
            name: [] for name in ("computed", "from the disk", "from the host", "on the device")
        }
        for number in range(1 + words.rounds):
            if number == 1:  # the first round compiles the programs
                for each in times.values():
                    each.clear()
            for history in histories:
                prompt = history + tokens(_NEW_TOKENS)
                settle(engine)
                ms, cached = first_token_ms(prompt)
                assert cached >= words.history - engine.info["page_size"], "it is not on the host"
                times["from the host"].append(ms)
                ms, _ = first_token_ms([*prompt, *tokens(_NEW_TOKENS)])
                times["on the device"].append(ms)
                settle(engine)
                assert engine.flush_cache()
                _drop_cached_files(Path(folder))
                ms, cached = first_token_ms(prompt)
                assert cached >= words.history - engine.info["page_size"], "it is not on the disk"
                times["from the disk"].append(ms)
                ms, _ = first_token_ms(tokens(words.history + _NEW_TOKENS))
                times["computed"].append(ms)
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"{words.history:,} tokens of history, {_NEW_TOKENS} new; {words.rounds} rounds of 2")
    for name, ms in medians.items():
        print(f"{name:<14} {ms:>9.1f} ms, {medians['computed'] / ms:>6.2f} times sooner")


def settle(engine: Engine) -> None:
    """Wait until no copy is under way, as after a user's pause."""
    while any(
        rank["host_copies_waiting"] or any(pool["arriving_blocks"] for pool in rank["host_pools"])
        for rank in engine.server_info()["ranks"]
    ):
        time.sleep(0.05)


def _drop_cached_files(folder: Path) -> None:
    """Evict the store's files from the page cache, so that they are read from the disk again."""
    for path in folder.glob("*/*/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
