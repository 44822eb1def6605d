"""Loads for caches of pages, drawn from a seed, and searched for such that a policy does badly.

    python -m tests.mem_cache.drawn_loads draw --count 2000 [--without-shadows]
    python -m tests.mem_cache.drawn_loads search --searches 10

The first prints how much less (or more) `adaptive` serves than the better of LRU and LFU, the
second the loads that a hill climb finds for which that is worst.

A load is a few phases; each phase mixes up to three kinds of traffic. Its prompts read 60 to 100
times as many pages as the cache has: an order can only be chosen by what it was seen to serve, so
what a change of the load costs is counted in turnovers of the cache.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from sgl_jax.mem_cache.eviction.shadow_caches import ShadowCaches
from tests.mem_cache.cache_loads import Prompt, fresh_pages, hit_rate, take

SIZES = (40, 80, 164, 320)
Traffic = Iterator[Prompt]


@dataclass(frozen=True)
class Kind:
    """A kind of traffic: `length` pages of a prompt, `spread` of a cache that its documents take,
    `uses` of each, `skew` of a Zipf law, `drift` of a set, `tail` pages of a question."""

    name: str
    weight: float
    length: int
    spread: float
    uses: int
    skew: float
    drift: float
    tail: int

    def traffic(self, rng: Random, pages: Iterator[int], num_pages: int) -> Traffic:
        """Prompts without end for a cache of `num_pages`."""
        count = max(2, round(self.spread * num_pages / self.length))
        return KINDS[self.name](self, rng, pages, count)


@dataclass(frozen=True)
class Load:
    """Prompts for a cache of `num_pages`: each phase of equal length, and all by the seed."""

    num_pages: int
    turnovers: int
    seed: int
    phases: tuple[tuple[Kind, ...], ...]
    in_turn: bool

    def prompts(self) -> list[Prompt]:
        """None is longer than half of the cache."""
        rng, pages = Random(self.seed), fresh_pages()
        prompts: list[Prompt] = []
        num_read, total = 0, self.turnovers * self.num_pages
        for number, kinds in enumerate(self.phases, 1):
            traffic = [kind.traffic(rng, pages, self.num_pages) for kind in kinds]
            weights = [kind.weight for kind in kinds]
            while num_read < total * number // len(self.phases):
                turn = len(prompts) % len(kinds)
                chosen = traffic[turn] if self.in_turn else rng.choices(traffic, weights)[0]
                prompts.append(next(chosen)[: self.num_pages // 2])
                num_read += len(prompts[-1])
        return prompts


def scans(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """Prompts that never return."""
    while True:
        yield take(pages, kind.length)


def popular(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """Documents, some more popular than others, with questions."""
    documents = [take(pages, kind.length) for _ in range(count)]
    weights = list(accumulate((i + 1) ** -kind.skew for i in range(count)))
    while True:
        yield rng.choices(documents, cum_weights=weights)[0] + take(pages, kind.tail)


def loop(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """Documents that are read in turn."""
    documents = [take(pages, kind.length) for _ in range(count)]
    while True:
        yield from documents


def distant(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """Documents that are read so many times, always at the same distance, and then no more."""
    documents = [take(pages, kind.length) for _ in range(count)]
    left = [rng.randint(1, kind.uses) for _ in range(count)]
    while True:
        for i in range(count):
            if not left[i]:
                documents[i], left[i] = take(pages, kind.length), kind.uses
            left[i] -= 1
            yield documents[i]


def conversations(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """Conversations that grow by a few pages with each turn, behind one system prompt."""
    stem = take(pages, kind.tail)
    turns = [stem + take(pages, kind.length) for _ in range(count)]
    while True:
        i = rng.randrange(count)
        yield turns[i]
        is_last = len(turns[i]) >= len(stem) + kind.uses * kind.length
        turns[i] = (stem if is_last else turns[i]) + take(pages, kind.length)


def moving(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """A set of documents of which the oldest is replaced now and then."""
    documents = [take(pages, kind.length) for _ in range(count)]
    while True:
        if rng.random() < kind.drift:
            documents = [*documents[1:], take(pages, kind.length)]
        yield rng.choice(documents)


def bursts(kind: Kind, rng: Random, pages: Iterator[int], count: int) -> Traffic:
    """A few documents at a time, read some times each, and then others."""
    while True:
        documents = [take(pages, kind.length) for _ in range(1 + kind.tail)]
        for _ in range(kind.uses * len(documents)):
            yield rng.choice(documents)


KINDS: dict[str, Callable[[Kind, Random, Iterator[int], int], Traffic]] = {
    each.__name__: each for each in (scans, popular, loop, distant, conversations, moving, bursts)
}


def drawn_kind(rng: Random) -> Kind:
    """Any kind of traffic."""
    return Kind(
        name=rng.choice(list(KINDS)),
        weight=rng.uniform(0.1, 1),
        length=rng.randint(1, 10),
        spread=rng.choice([rng.uniform(0.2, 1.2), rng.uniform(0.2, 4)]),
        uses=rng.randint(2, 12),
        skew=rng.choice([0, rng.uniform(0, 1.6)]),
        drift=rng.uniform(0.01, 0.4),
        tail=rng.randint(0, 4),
    )


def drawn_phase(rng: Random) -> tuple[Kind, ...]:
    """Up to three kinds."""
    return tuple(drawn_kind(rng) for _ in range(rng.choice([1, 2, 2, 3])))


def drawn_load(seed: int) -> Load:
    """The load of a seed."""
    rng = Random(seed)
    phases = tuple(drawn_phase(rng) for _ in range(rng.choice([1, 1, 2, 3, 4])))
    return Load(rng.choice(SIZES), rng.randint(60, 100), seed, phases, rng.random() < 0.3)


def neighbour(load: Load, rng: Random) -> Load:
    """The load with one thing changed."""
    phases = list(load.phases)
    i = rng.randrange(len(phases))
    change = rng.randrange(6)
    if change == 0:
        return replace(load, num_pages=rng.choice(SIZES))
    if change == 1:
        return replace(load, in_turn=not load.in_turn)
    if change == 2:
        phases[i] = drawn_phase(rng)
    elif change == 3 and len(phases) < 4:
        phases.insert(i, drawn_phase(rng))
    else:
        j = rng.randrange(len(phases[i]))
        field = rng.choice(["weight", "length", "spread", "uses", "skew", "drift", "tail"])
        other = replace(phases[i][j], **{field: getattr(drawn_kind(rng), field)})
        phases[i] = (*phases[i][:j], other, *phases[i][j + 1 :])
    return replace(load, phases=tuple(phases))


def lfu_hit_rate(prompts: list[Prompt], num_pages: int) -> float:
    """The share that LFU serves: least used since it entered the cache first, of those the least
    recently used, of a prompt its end. What a prompt reads stays while it is served."""
    uses: dict[int, int] = {}  # of the pages in the cache
    keys: dict[int, tuple[int, int, int]] = {}
    heap: list[tuple[tuple[int, int, int], int]] = []
    num_hit = 0
    for now, prompt in enumerate(prompts):
        num_found = next((i for i, page in enumerate(prompt) if page not in uses), len(prompt))
        num_hit += num_found
        for i, page in enumerate(prompt):
            uses[page] = uses.get(page, -1) + 1
            keys[page] = (uses[page], now, -i)
            heapq.heappush(heap, (keys[page], page))
        spared = []
        while len(uses) > num_pages:
            key, page = heapq.heappop(heap)
            if keys.get(page) != key:
                continue
            if key[1] == now:
                spared.append((key, page))
                continue
            del uses[page], keys[page]
        for entry in spared:
            heapq.heappush(heap, entry)
    return num_hit / sum(map(len, prompts))


def loss(load: Load) -> float:
    """How much less of the prompts' tokens `adaptive` serves than the better of LRU and LFU."""
    prompts = load.prompts()
    lru = hit_rate(prompts, load.num_pages, "lru")
    better = max(lru, lfu_hit_rate(prompts, load.num_pages))
    return better - hit_rate(prompts, load.num_pages, "adaptive")


def searched(seed: int, num_steps: int) -> tuple[float, Load]:
    """The load of the greatest loss that a hill climb finds from a drawn one."""
    rng = Random(seed)
    worst = max((drawn_load(rng.randrange(10**9)) for _ in range(8)), key=loss)
    greatest = loss(worst)
    for _ in range(num_steps):
        other = neighbour(worst, rng)
        if (found := loss(other)) > greatest:
            worst, greatest = other, found
    return greatest, worst


def main() -> None:
    """Print losses of drawn loads, or the loads of a search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["draw", "search"])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="drawn loads")
    parser.add_argument("--searches", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="of each search")
    parser.add_argument(
        "--without-shadows",
        action="store_true",
        help="draw: the cache always follows its own order",
    )
    words = parser.parse_args()
    if words.what == "search":
        for seed in range(words.first, words.first + words.searches):
            greatest, load = searched(seed, words.steps)
            print(f"{greatest:.4f} {load!r}", flush=True)
        return
    if words.without_shadows:
        ShadowCaches.is_due = False
    losses = {i: loss(drawn_load(i)) for i in range(words.first, words.first + words.count)}
    mean = sum(losses.values()) / len(losses)
    worst = sorted(losses, key=lambda i: -losses[i])
    shown = ", ".join(f"{losses[i]:.4f} (seed {i})" for i in worst[:12])
    num_over = sum(each > 0.02 for each in losses.values())
    print(f"{len(losses)} loads: mean loss {mean:.4f}, {num_over} over 0.02, worst {shown}")


if __name__ == "__main__":
    main()
