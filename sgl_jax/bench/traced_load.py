"""Recorded traffic as a load for a running server: its prompts, and when each is sent."""

import argparse
from collections.abc import Sequence

import numpy as np

from sgl_jax.bench.trace.reading import TracedRequest, prompt_tokens
from sgl_jax.bench.trace.turns import previous_turns

# Requests that are sent one after another: seconds to wait (from the start of the run, or from the
# end of the answer before) and the number of the request.
Chain = list[tuple[float, int]]


class TracedPrompts(Sequence[list[int]]):
    """The prompts of a recording as token ids in [low, high), built when read: all of a recording
    may be many gigabytes. Prompts share the blocks that they shared originally."""

    def __init__(self, trace: Sequence[TracedRequest], low: int, high: int) -> None:
        self._trace, self._low, self._high = trace, low, high

    def __len__(self) -> int:
        return len(self._trace)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        tokens = prompt_tokens(self._trace[index])
        return np.add(tokens % (self._high - self._low), self._low).tolist()


def traced_chains(trace: Sequence[TracedRequest], words: argparse.Namespace) -> list[Chain]:
    """Return the requests in the order in which they depend on each other: recorded arrivals, or
    with `--closed-loop` the recorded pauses of each agent after its answers."""
    first_ms = trace[0].arrival_ms
    before = previous_turns(trace) if words.closed_loop else [None] * len(trace)
    chain_of: dict[int, Chain] = {}
    chains = []
    for index, request in enumerate(trace):
        previous = before[index]
        if previous is None:
            chain = [((request.arrival_ms - first_ms) * 1e-3 / words.speedup, index)]
            chains.append(chain)
        else:
            chain = chain_of[previous]
            chain.append((request.think_s / words.speedup, index))
        chain_of[index] = chain
    return chains
