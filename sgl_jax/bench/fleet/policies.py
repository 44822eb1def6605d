"""Routing policies: the choice of the engine for a request.

A policy uses only facts available to a router: the requests it sent, the outputs that pass through
it (`RouterView` counts both), and the KV events that engines publish.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from sgl_jax.bench.fleet.traffic import FleetRequest
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, prompt_tokens
from sgl_jax.mem_cache.eviction.ghost_pages import PrefixHasher

# Defaults of sglang-router: requests in flight, their ratio, and the share of a prompt.
_BALANCE_ABS, _BALANCE_REL, _CACHE_THRESHOLD = 64, 1.5, 0.3
# If more engines hold a page, only the least loaded engine is a candidate.
_MAX_HOLDERS = 32
# Approximate cost of a running request to the next request, in prompt tokens.
_RUNNING_TOKENS = 512
_NONE: frozenset[int] = frozenset()


class RouterView:
    """The router's count of each engine's work."""

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self.in_flight = np.zeros(num_engines, np.int64)  # requests
        self.waiting_tokens = np.zeros(num_engines, np.int64)  # of prompts before the first token
        self._sent: dict[int, tuple[int, int]] = {}  # number -> engine and tokens to compute

    def record_sent(self, number: int, engine: int, num_tokens: int) -> None:
        """Record that a request went to `engine`, which computes about `num_tokens` of it."""
        self.in_flight[engine] += 1
        self.waiting_tokens[engine] += num_tokens
        self._sent[number] = engine, num_tokens

    def record_first_token(self, number: int) -> None:
        engine, num_tokens = self._sent[number]
        self.waiting_tokens[engine] -= num_tokens
        self._sent[number] = engine, 0

    def record_end(self, number: int) -> None:
        """Record a request's last token, or its refusal."""
        engine, num_tokens = self._sent.pop(number)
        self.in_flight[engine] -= 1
        self.waiting_tokens[engine] -= num_tokens

    def least_loaded(self, number: int) -> int:
        """Return the engine with the fewest requests in flight; ties rotate with `number`."""
        return _argmin_from(self.in_flight, number)


class RoutingPolicy(ABC):
    """Chooses engines. `stored` and `removed` are called only if `reads_events`."""

    reads_events = False

    def __init__(self, view: RouterView, page_size: int) -> None:
        self._view = view
        self._page_size = page_size

    @abstractmethod
    def choose(self, request: FleetRequest) -> tuple[int, int]:
        """Return the engine, and the prompt tokens that it has presumably cached."""

    def stored(self, engine: int, page_hashes: Sequence[int]) -> None:
        """Record that an engine now holds these pages."""
        raise NotImplementedError

    def removed(self, engine: int, page_hashes: Sequence[int]) -> None:
        """Record that an engine no longer holds these pages."""
        raise NotImplementedError


class RoundRobin(RoutingPolicy):
    """Each engine in turn."""

    def choose(self, request: FleetRequest) -> tuple[int, int]:
        return request.number % self._view.num_engines, 0


class LeastLoad(RoutingPolicy):
    """The engine with the fewest requests in flight."""

    def choose(self, request: FleetRequest) -> tuple[int, int]:
        return self._view.least_loaded(request.number), 0


class Sticky(RoutingPolicy):
    """One engine for each conversation, by a hash of its first block."""

    def choose(self, request: FleetRequest) -> tuple[int, int]:
        mixed = (request.conversation * 0x9E3779B97F4A7C15) % 2**64 >> 20
        return mixed % self._view.num_engines, 0


class CacheAware(RoutingPolicy):
    """The rule of sglang-router's `cache_aware`, with its defaults.

    Source: SGLang's model gateway (`policies/cache_aware.rs`), and the documentation of its
    successor (`docs/concepts/routing/cache-aware.md` of lightseekorg/smg).

    If the most loaded engine has over 64 more requests than the least loaded engine, and over 1.5
    times as many, the least loaded engine gets the request. Otherwise it goes to the engine that
    was sent the longest of its prefixes, if that is over 0.3 of the prompt, else to the least
    loaded engine. The router's tree keeps everything it sent, even after an engine evicts it. Here,
    it stores only the last engine of each block, and is never trimmed; the router trims an engine's
    part to 2**26 characters.
    """

    def __init__(self, view: RouterView, page_size: int) -> None:
        super().__init__(view, page_size)
        self._engine_of: dict[int, int] = {}  # block id -> engine that was sent it last

    def choose(self, request: FleetRequest) -> tuple[int, int]:
        blocks, engine_of = request.traced.block_ids, self._engine_of
        depth = bisect_left(blocks, True, key=lambda block: block not in engine_of)
        num_matched = min(depth * BLOCK_TOKENS, request.traced.input_len)
        most, least = int(self._view.in_flight.max()), int(self._view.in_flight.min())
        is_imbalanced = most - least > _BALANCE_ABS and most > _BALANCE_REL * least
        if not is_imbalanced and num_matched > _CACHE_THRESHOLD * request.traced.input_len:
            engine = engine_of[blocks[depth - 1]]
        else:
            engine, num_matched = self._view.least_loaded(request.number), 0
        engine_of.update(dict.fromkeys(blocks, engine))
        return engine, num_matched


class PrefixAware(RoutingPolicy):
    """Choose the engine with the least to compute before the first token, by published KV events.

    An engine's cost is its waiting prompt tokens, this prompt's tokens that it does not hold, and a
    small amount for each of its requests. Candidates are engines that hold much of the prompt, and
    the least loaded engine.
    """

    reads_events = True

    def __init__(self, view: RouterView, page_size: int) -> None:
        super().__init__(view, page_size)
        self._hasher = PrefixHasher(page_size)
        # Page hash -> engine, or engines: most pages have one, and a set takes 200 bytes.
        self._holders: dict[int, int | set[int]] = {}

    def choose(self, request: FleetRequest) -> tuple[int, int]:
        tokens = prompt_tokens(request.traced)
        # The last token is always computed.
        num_pages = (len(tokens) - 1) // self._page_size
        pages = self._hasher.hashes(tokens[: num_pages * self._page_size]).tolist()
        load = self._view.waiting_tokens + _RUNNING_TOKENS * self._view.in_flight
        candidates = {_argmin_from(load, request.number)} | self._candidates(pages, load)
        costs = []
        for engine in candidates:
            num_cached = self._page_size * self._depth(pages, engine)
            costs.append((int(load[engine]) - num_cached, engine, num_cached))
        _, engine, num_cached = min(costs)
        return engine, num_cached

    def _candidates(self, pages: Sequence[int], load: NDArray[np.int64]) -> set[int]:
        """Return engines that hold the longest prefix held by any engine, or a large part of it."""
        depth = bisect_left(pages, True, key=lambda page: page not in self._holders)
        found: set[int] = set()
        while depth:
            holders = self._holders_of(pages[depth - 1])
            if len(holders) > _MAX_HOLDERS:
                found.add(min(holders, key=lambda engine: (load[engine], engine)))
                break
            found |= holders
            depth = depth * 3 // 4
        return found

    def _holders_of(self, page: int) -> Set[int]:
        holders = self._holders.get(page, _NONE)
        return {holders} if isinstance(holders, int) else holders

    def _depth(self, pages: Sequence[int], engine: int) -> int:
        """Return the number of the prompt's first pages that `engine` holds."""
        return bisect_left(pages, True, key=lambda page: engine not in self._holders_of(page))

    def stored(self, engine: int, page_hashes: Sequence[int]) -> None:
        for page in page_hashes:
            others = self._holders.get(page)
            if others is None:
                self._holders[page] = engine
            elif isinstance(others, int):
                self._holders[page] = {others, engine}
            else:
                others.add(engine)

    def removed(self, engine: int, page_hashes: Sequence[int]) -> None:
        for page in page_hashes:
            holders = self._holders[page]
            if isinstance(holders, set) and len(holders) > 1:
                holders.remove(engine)
            else:
                del self._holders[page]


def _argmin_from(values: NDArray[np.int64], number: int) -> int:
    """Return the index of the minimum; of ties, the first from `number` modulo their count."""
    first = number % len(values)
    after, before = int(values[first:].argmin()) + first, int(values[: first + 1].argmin())
    return after if values[after] <= values[before] else before


POLICIES: Mapping[str, Callable[[RouterView, int], RoutingPolicy]] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
        "sticky": Sticky,
        "cache_aware": CacheAware,
        "prefix_aware": PrefixAware,
    }
)
