"""Loads drawn from a seed, unlike the loads with which the scheduler was tuned."""

from functools import partial
from typing import Any

import numpy as np

from benchmarks.scheduling.clients import (
    Make,
    Span,
    Tail,
    closed_loop,
    open_loop,
    requests,
    sessions,
)
from benchmarks.scheduling.traffic import Client, Load

DRAWN = "drawn-"  # before the seed, in the name of a load
_SECONDS = 8.0
_STEP_S = 0.005  # about the time of a step, to choose rates of arrivals
_CLIENTS_PER_GROUP = 10_000  # numbers


def drawn_load(seed: int) -> Load:
    """Return a load of one to three groups of clients that ask for about all of the pool."""
    rng = np.random.default_rng((4, seed))
    pool_tokens = int(2 ** rng.uniform(11, 16))
    dp_size = int(rng.choice([1, 1, 2, 4]))
    page_size = int(rng.choice([1, 16, 16, 128])) if pool_tokens >= 8_192 else 16
    num_groups = int(rng.integers(1, 4))
    shares = rng.dirichlet(np.ones(num_groups)) * rng.uniform(0.6, 2.0) * dp_size
    parts, texts = [], []
    for number, share in enumerate(shares.tolist()):
        part, text = _draw_group(rng, number, share * pool_tokens, pool_tokens)
        parts.append(part)
        texts.append(text)
    return Load(
        f"{DRAWN}{seed}",
        f"dp {dp_size}, {pool_tokens} tokens, pages of {page_size}: " + "; ".join(texts),
        lambda: [client for part in parts for client in part()],
        _SECONDS,
        pool_tokens=pool_tokens,
        page_size=page_size,
        dp_size=dp_size,
        num_rows=int(rng.choice([64, 256])),
        chunk_tokens=int(rng.choice([256, 2_048])),
    )


def _draw_group(
    rng: np.random.Generator, number: int, wanted_tokens: float, pool_tokens: int
) -> tuple[Any, str]:
    """Return a builder of clients that ask for about `wanted_tokens` at once, and its text."""
    most = pool_tokens // 4
    prompt = int(2 ** rng.uniform(3, np.log2(most)))
    output = int(2 ** rng.uniform(2, min(11.0, np.log2(most))))
    kind = rng.choice(["closed", "closed", "open", "burst", "sessions"])
    output_span: Span = Tail(output, 0.8, most) if rng.random() < 0.3 else (output // 2 + 1, output)
    limit = 0 if rng.random() < 0.25 else int(rng.choice([output, 2 * output, most]))
    aborts = (1, output) if limit and rng.random() < 0.15 else 0
    prefixes = (int(rng.integers(1, 30)), prompt) if rng.random() < 0.3 else (0, 0)
    own_prompt: Span = (max(prompt // 8, 1), prompt)
    make = requests(
        f"group {number}", own_prompt, output_span, limit, abort_after=aborts, prefixes=prefixes
    )
    num_clients = min(max(round(wanted_tokens / (prompt + output)), 1), 100)
    text = (
        f"{num_clients} {kind}, prompts to {prompt}, outputs to {output}, limit {limit or output}"
    )
    return partial(_clients, kind, num_clients, make, output, most, number), text


def _clients(
    kind: str, num_clients: int, make: Make, output: int, most: int, number: int
) -> list[Client]:
    first = number * _CLIENTS_PER_GROUP
    if kind == "closed":
        return closed_loop(num_clients, make, first=first)
    if kind == "sessions":
        return sessions(
            num_clients, make, turns=(2, 5), think_s=0.1, first=first, most_tokens=2 * most
        )
    per_s = num_clients / (_STEP_S * output)
    num_requests = min(round(per_s * _SECONDS), _CLIENTS_PER_GROUP)
    burst = num_clients if kind == "burst" else 1
    return open_loop(num_requests, make, per_s, first=first, burst=burst)
