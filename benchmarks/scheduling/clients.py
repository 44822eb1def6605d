"""Builders of clients: closed and open loops, bursts, shared prefixes and sessions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from benchmarks.scheduling.traffic import STOP_ID, Client, LoadRequest
from sgl_jax.core.step_plan import Int32Array


class Tail(NamedTuple):
    """A log-normal distribution of lengths from 1 to `most`; many are short, a few very long."""

    median: int
    sigma: float
    most: int


Span = int | tuple[int, int] | Tail  # a length, or the first and last of equally likely lengths
_REQUESTS_PER_CLIENT = 1 << 12  # at most, so that all seeds are distinct

Make = Callable[[np.random.Generator, int], LoadRequest]


def draw(rng: np.random.Generator, span: Span) -> int:
    """Return a length of the span."""
    if isinstance(span, int):
        return span
    if isinstance(span, Tail):
        length = span.median * math.exp(span.sigma * rng.standard_normal())
        return min(max(round(length), 1), span.most)
    return int(rng.integers(span[0], span[1] + 1))


def tokens(rng: np.random.Generator, length: int) -> Int32Array:
    """Return random prompt tokens, int32[length]."""
    return rng.integers(0, STOP_ID, length).astype(np.int32)


def requests(
    group: str,
    prompt: Span,
    output: Span,
    limit: int = 0,
    *,
    abort_after: Span = 0,
    prefixes: tuple[int, int] = (0, 0),
    **fields: Any,
) -> Make:
    """Return a maker of requests with lengths drawn from spans.

    Args:
        prompt: prompt tokens after the shared prefix.
        output: tokens that it generates.
        limit: its `max_new_tokens`; 0: its output's length, so that it ends by its limit.
        abort_after: output tokens after which its client aborts it; 0: never.
        prefixes: a number of shared prefixes and their length; each request begins with one of
            them, and low numbers are more likely (by 1 / number).
        fields: further fields of `LoadRequest`.
    """
    number, length = prefixes
    weights = 1 / np.arange(1, number + 1)

    def make(rng: np.random.Generator, seed: int) -> LoadRequest:
        num_own, num_output = draw(rng, prompt), draw(rng, output)
        own = tokens(rng, num_own)
        if number:
            chosen = int(rng.choice(number, p=weights / weights.sum()))
            shared = tokens(np.random.default_rng((7, chosen)), length)
            own = np.concatenate((shared, own))
        return LoadRequest(
            group,
            seed,
            own,
            num_output if limit else num_output + 1,
            limit or num_output,
            abort_after=draw(rng, abort_after),
            **fields,
        )

    return make


def _stream(make: Make, client: int) -> Iterator[LoadRequest]:
    rng = np.random.default_rng((1, client))
    for seed in _seeds(client):
        yield make(rng, seed)


def _seeds(client: int) -> range:
    return range(client * _REQUESTS_PER_CLIENT, (client + 1) * _REQUESTS_PER_CLIENT)


def closed_loop(
    num_clients: int,
    make: Make,
    *,
    first: int = 0,
    most: int | None = None,
    start_s: float = 0.0,
    stagger_s: float = 0.0,
    think_s: float = 0.0,
) -> list[Client]:
    """Return clients that each send a request after their last one has ended.

    Args:
        first: number of the first client; clients of one load have distinct numbers.
        most: requests of each client; None: no limit.
        start_s: start of the first client; the next clients start `stagger_s` apart.
    """
    return [
        Client(start_s + i * stagger_s, islice(_stream(make, first + i), most), think_s)
        for i in range(num_clients)
    ]


def open_loop(
    num_requests: int, make: Make, per_s: float, *, first: int = 0, burst: int = 1
) -> list[Client]:
    """Return clients of one request each, which arrive as a Poisson process of bursts.

    Args:
        per_s: requests per second.
        burst: requests that arrive together.
    """
    rng = np.random.default_rng((2, first))
    gaps = rng.exponential(burst / per_s, -(-num_requests // burst))
    starts = np.cumsum(gaps) - gaps[0]
    return [
        Client(float(starts[i // burst]), islice(_stream(make, first + i), 1))
        for i in range(num_requests)
    ]


def sessions(
    num_clients: int,
    make: Make,
    *,
    turns: Span,
    think_s: float = 0.0,
    first: int = 0,
    stagger_s: float = 0.0,
    most_tokens: int = 1 << 30,
) -> list[Client]:
    """Return clients whose prompts begin with all earlier prompts and outputs of their session.

    Args:
        turns: requests of a session; a new session follows it.
        most_tokens: a prompt that would have more tokens begins a new history.
    """

    def turns_of(client: int) -> Iterator[LoadRequest]:
        rng = np.random.default_rng((3, client))
        num_left = 0
        for seed in _seeds(client):
            if not num_left:
                history, num_left = np.zeros(0, np.int32), draw(rng, turns)
            request = make(rng, seed)
            if len(history) + len(request.prompt) > most_tokens:
                history = np.zeros(0, np.int32)
            request = replace(request, prompt=np.concatenate((history, request.prompt)))
            yield request
            history, num_left = request.tokens(), num_left - 1

    return [Client(i * stagger_s, turns_of(first + i), think_s) for i in range(num_clients)]
