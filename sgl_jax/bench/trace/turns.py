"""Turns of recorded agents: which request follows which, and the figures of each kind of turn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_jax.bench.trace.reading import TracedRequest

_KINDS = {"tool_use": "after a tool call", "end_turn": "after a final answer"}
_FIRST, _UNKNOWN = "first", "after another answer"
TURN_KINDS = (_FIRST, *_KINDS.values(), _UNKNOWN)


def previous_turns(trace: Sequence[TracedRequest]) -> list[int | None]:
    """Return for each request the index of its agent's request before it; None for the first, and
    for requests without an agent."""
    last: dict[str, int] = {}
    previous = []
    for index, request in enumerate(trace):
        previous.append(None if request.agent is None else last.get(request.agent))
        if request.agent is not None:
            last[request.agent] = index
    return previous


def turn_kinds(trace: Sequence[TracedRequest]) -> list[str]:
    """Return the kind of each request, of `TURN_KINDS`: by the answer of the agent before it."""
    return [
        _FIRST if before is None else _KINDS.get(trace[before].stop, _UNKNOWN)
        for before in previous_turns(trace)
    ]


def turn_values(trace: Sequence[TracedRequest], logs: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return for each kind of turn, and for all: turns that arrived, those completed, the share of
    their prompts found in the cache, and mean seconds to the first token. `logs` are
    `RequestLog`s."""
    kinds, values = np.array(turn_kinds(trace)), {}
    arrived = np.array([not np.isnan(log.arrival_s) for log in logs])
    completed = np.array([log.refusal is None and not np.isnan(log.end_s) for log in logs])
    prompts = np.array([request.input_len for request in trace])
    cached = np.array([log.cached_tokens for log in logs])
    first_s = np.array([log.first_token_s - log.arrival_s for log in logs])
    for kind in (*TURN_KINDS, "all"):
        is_kind = (kinds == kind) | (kind == "all")
        done = completed & is_kind
        if done.any():
            values[kind] = {
                "turns": int((arrived & is_kind).sum()),
                "completed": int(done.sum()),
                "hit_rate": float(cached[done].sum() / prompts[done].sum()),
                "mean_ttft_s": float(first_s[done].mean()),
                "max_ttft_s": float(first_s[done].max()),
            }
    return values
