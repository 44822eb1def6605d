"""Streams of prompts, and what share of their tokens a prefix cache of a given size serves."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from sgl_jax.core.engine_sizes import FULL_ATTENTION
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.cache_walk import audit_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer

EXCERPT = Path(__file__).parents[1] / "traces" / "conversation_excerpt.jsonl"
ROW = 1
Prompt = list[int]  # a prompt by its pages: equal numbers in front are a common prefix


def excerpt() -> list[Prompt]:
    """The recorded prompts, a page for each of their blocks."""
    return [json.loads(line)["hash_ids"] for line in EXCERPT.read_text().splitlines()]


def fresh_pages() -> Iterator[int]:
    """Numbers of pages that no prompt has had yet."""
    return iter(range(10_000_000))


def take(pages: Iterator[int], count: int) -> Prompt:
    """The next `count` of `pages`."""
    return [next(pages) for _ in range(count)]


def system_prompts() -> list[Prompt]:
    """Forty system prompts, some popular, each followed by a question of its own."""
    rng, pages = Random(1), fresh_pages()
    shared_prefixes = [take(pages, 8) for _ in range(40)]
    weights = [1 / (i + 1) for i in range(40)]
    return [
        rng.choices(shared_prefixes, weights)[0] + take(pages, rng.randint(1, 6))
        for _ in range(600)
    ]


def conversations() -> list[Prompt]:
    """Thirty conversations at a time, each of eight turns that repeat all before."""
    rng, pages = Random(2), fresh_pages()
    turns = [take(pages, 2) for _ in range(30)]
    prompts = []
    for _ in range(600):
        i = rng.randrange(30)
        turns[i] = turns[i] + take(pages, 2)
        prompts.append(turns[i])
        if len(turns[i]) == 18:
            turns[i] = take(pages, 2)
    return prompts


def branches() -> list[Prompt]:
    """Twenty-five documents, left at any page for something else, which sometimes is the document
    from then on."""
    rng, pages = Random(6), fresh_pages()
    documents = [take(pages, 20) for _ in range(25)]
    prompts = []
    for _ in range(600):
        i = rng.randrange(25)
        common = documents[i][: rng.randrange(2, len(documents[i]) + 1)]
        prompts.append(common + take(pages, rng.randint(1, 6)))
        if rng.random() < 0.3:
            documents[i] = prompts[-1]
    return prompts


def tree_search() -> list[Prompt]:
    """Twelve tasks at a time. Each begins with a prompt; from a state that was reached some
    attempts go on, one of which is the next state; now and then they go on from a state before."""
    rng, pages = Random(8), fresh_pages()
    tasks = [[take(pages, 6)] for _ in range(12)]
    prompts = [task[0] for task in tasks]
    while len(prompts) < 600:
        states = rng.choice(tasks)
        state = states[-1] if rng.random() < 0.8 else rng.choice(states)
        attempts = [state + take(pages, rng.randint(1, 3)) for _ in range(rng.randint(2, 5))]
        prompts += attempts
        states.append(rng.choice(attempts))
        if len(states) == 7:
            states[:] = [take(pages, 6)]
            prompts.append(states[0])
    return prompts


def long_documents() -> list[Prompt]:
    """Twelve long documents, each read for a few questions in turn."""
    rng, pages = Random(7), fresh_pages()
    documents = [take(pages, 60) for _ in range(12)]
    prompts = []
    for _ in range(400):
        i = min(int(rng.expovariate(0.5)), 11)
        prompts.append(documents[i] + take(pages, rng.randint(1, 3)))
        if rng.random() < 0.1:
            documents = [take(pages, 60), *documents[:-1]]
    return prompts


def uniform_reuse() -> list[Prompt]:
    """A hundred documents, each as likely as any other."""
    rng, pages = Random(3), fresh_pages()
    documents = [take(pages, 5) for _ in range(100)]
    return [rng.choice(documents) for _ in range(600)]


def scan_and_hot_set() -> list[Prompt]:
    """Twenty documents that are read again and again, among long prompts that never return."""
    rng, pages = Random(4), fresh_pages()
    documents = [take(pages, 5) for _ in range(20)]
    return [rng.choice(documents) if rng.random() < 0.4 else take(pages, 12) for _ in range(600)]


def moving_working_set() -> list[Prompt]:
    """Fifty documents, of which the one that has been there longest is often replaced."""
    rng, pages = Random(5), fresh_pages()
    documents = [take(pages, 5) for _ in range(50)]
    prompts = []
    for _ in range(600):
        if rng.random() < 0.1:
            documents = [*documents[1:], take(pages, 5)]
        prompts.append(rng.choice(documents) + take(pages, 1))
    return prompts


class Replay:
    """A cache of `num_pages` pages of one or more tokens that serves prompts one by one.

    Each prompt is kept whole as far as there is room for it, and no answer is.
    """

    def __init__(self, num_pages: int, eviction_policy: str, page_size: int = 1) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages + 1)
        self.cache = RadixCache(
            FULL_ATTENTION, [self.allocator], page_size, eviction_policy=eviction_policy
        )
        self.num_tokens = 0
        self.num_hit = 0

    def serve(self, prompt: Prompt) -> int:
        """Match, make room, insert; returns the tokens that were found."""
        tokens = self.tokens_of(prompt)
        match = self.cache.match_prefix(tokens)
        wanted = len(prompt) - match.pages.shape[1]
        self.cache.evict(max(wanted - self.allocator.num_free, 0))
        own = self.allocator.alloc(min(wanted, self.allocator.num_free), ROW)
        node = match.node
        if len(own):
            pages = np.concatenate([match.pages[0], own])
            offer = LeaseOffer(ROW, pages[None], node)
            kept = self.cache.accept(tokens[: len(pages) * self.page_size], offer)
            assert kept is not None
            node = kept.node
        if node is not None:
            self.cache.unlock(node)
        self.num_tokens += len(tokens)
        self.num_hit += match.length
        return match.length

    def tokens_of(self, prompt: Prompt) -> Int32Array:
        """The prompt's tokens: of a page, all have its number."""
        return np.repeat(np.array(prompt, np.int32), self.page_size)

    def holds(self, prompt: Prompt) -> bool:
        """Whether all of the prompt is cached."""
        return self.cache.peek(self.tokens_of(prompt)) == len(prompt) * self.page_size


def hit_rate(prompts: list[Prompt], num_pages: int, eviction_policy: str) -> float:
    """The share of prompt tokens that the cache serves."""
    replay = Replay(num_pages, eviction_policy)
    for prompt in prompts:
        replay.serve(prompt)
    audit_cache(replay.cache, [])
    return replay.num_hit / replay.num_tokens
