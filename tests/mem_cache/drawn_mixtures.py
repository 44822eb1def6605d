"""Traffic drawn from a seed: documents re-read at several distances, scans, short conversations.

    python -m tests.mem_cache.drawn_mixtures --first 0 --count 2000

prints by how much `adaptive` serves less (or more) than LRU, of blocks of 512 tokens, the worst
first. Requests have times; nothing tells which belong together.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from sgl_jax.bench.trace.cache_only import LruBlocks, hit_rate, tree_hit_rate
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, TracedRequest

CAPACITIES = (60, 120, 240, 480)
Path = tuple[int, ...]


class Event(NamedTuple):
    """A request to come, and what it is followed by: an interval in seconds and a path each."""

    at_s: float
    number: int
    path: Path
    later: Iterator[tuple[float, Path]]


class Mixture:
    """The requests of a seed, for a cache of `capacity` blocks, of 100 times as many."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(seed)
        self.capacity = rng.choice(CAPACITIES)
        self._next_id = 0
        kinds: list[Callable[[], Iterator[tuple[float, Path]]]]
        kinds = [self._document, self._scan, self._conversation]
        self._kinds = [kind for kind in kinds if rng.random() < 0.8] or kinds
        self._weights = [rng.uniform(0.1, 1.0) for _ in self._kinds]
        # The distances of documents in seconds; about a block is read in a second.
        self._distances = [
            self.capacity * 2.0 ** rng.uniform(-3, 3) for _ in range(rng.randint(1, 4))
        ]
        self._most_uses, self._doc_len = rng.randint(2, 12), rng.randint(1, self.capacity // 12)
        self._jitter, self._scan_len = (
            rng.choice([0.0, 0.2, 1.0]),
            rng.randint(1, self.capacity // 4),
        )
        self._most_turns, self._turn_len = rng.randint(2, 8), rng.randint(1, 4)
        self._pause_s = self.capacity * 2.0 ** rng.uniform(-5, 1)

    def requests(self) -> list[TracedRequest]:
        rng, due, number, start_s = self._rng, list[Event](), 0, 0.0
        requests, num_left = list[TracedRequest](), 100 * self.capacity
        while num_left > 0:
            if not due or start_s <= due[0].at_s:
                later = rng.choices(self._kinds, self._weights)[0]()
                number += 1
                heapq.heappush(due, Event(start_s, number, next(later)[1], later))
                start_s += rng.expovariate(1.0) * self.capacity / 20
                continue
            event = heapq.heappop(due)
            tokens = len(event.path) * BLOCK_TOKENS
            requests.append(TracedRequest(int(event.at_s * 1e3), tokens, 1, event.path))
            num_left -= len(event.path)
            following = next(event.later, None)
            if following is not None:
                at_s = event.at_s + following[0]
                heapq.heappush(due, Event(at_s, event.number, following[1], event.later))
        return requests

    def _take(self, count: int) -> Path:
        self._next_id += count
        return tuple(range(self._next_id - count, self._next_id))

    def _document(self) -> Iterator[tuple[float, Path]]:
        rng = self._rng
        document, distance_s = (
            self._take(rng.randint(1, self._doc_len)),
            rng.choice(self._distances),
        )
        for _ in range(rng.randint(2, self._most_uses)):
            spread = 1 + self._jitter * rng.uniform(-0.9, 0.9)
            yield distance_s * spread, document + self._take(rng.randint(0, 2))

    def _scan(self) -> Iterator[tuple[float, Path]]:
        yield 0.0, self._take(self._rng.randint(1, self._scan_len))

    def _conversation(self) -> Iterator[tuple[float, Path]]:
        rng, path = self._rng, self._take(self._rng.randint(1, 6))
        for _ in range(rng.randint(2, self._most_turns)):
            yield rng.lognormvariate(0, 1) * self._pause_s, path
            path = path[: -rng.randint(0, 1) or None] + self._take(self._turn_len)


def loss(seed: int) -> float:
    """How much less of the mixture's tokens `adaptive` serves than LRU."""
    mixture = Mixture(seed)
    requests, capacity = mixture.requests(), mixture.capacity
    lru = hit_rate(requests, LruBlocks(capacity), capacity)
    return lru - tree_hit_rate(requests, capacity, page_size=BLOCK_TOKENS, policy="adaptive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000)
    words = parser.parse_args()
    losses = {i: loss(i) for i in range(words.first, words.first + words.count)}
    worst = sorted(losses, key=lambda i: -losses[i])
    shown = ", ".join(f"{losses[i]:.4f} (seed {i})" for i in worst[:12])
    num_over = sum(each > 0.002 for each in losses.values())
    mean = sum(losses.values()) / len(losses)
    print(f"{len(losses)} mixtures: mean loss {mean:.4f}, {num_over} over 0.002, worst {shown}")


if __name__ == "__main__":
    main()
