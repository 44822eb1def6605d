"""Requests of synthetic loads, and the clients that send them.

Everything here is determined before a run: a generated token depends on its request's seed and its
position only, so a turn of a session can contain the answers to earlier turns.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Int32Array

# The policies by which requests may start later than with a simple scheduler.
DUE_BY_SERVICE = "others pass a large request until they had as much service as it needs"
FEWER_RETRACTS = "memory is kept for the growth of running requests, so that fewer are retracted"
VOCAB_SIZE = 1 << 20
STOP_ID = VOCAB_SIZE - 1  # ends an output; no prompt contains it


def generated_tokens(seeds: Any, positions: Any) -> Any:
    """Return the tokens that requests of these seeds generate at these positions, in [0, STOP_ID).

    Args:
        seeds: int64[n], or a number.
        positions: int64[n], or a number; counted from the beginning of the prompt.
    """
    return (seeds * 7919 + positions * 104_729) % STOP_ID


@dataclass(frozen=True)
class LoadRequest:
    """A request of a client.

    Attributes:
        group: the name under which its times are reported.
        seed: determines its output; unique in a load.
        prompt: int32[n] token ids.
        output_len: tokens it generates before a stop token ends it; the stop token is the last.
        limit: the `max_new_tokens` that the client asks for.
        abort_after: output tokens after which the client aborts it; 0: never.
        tenant: name of its tenant; "": none.
        dp_rank: the rank that it is pinned to; None: any.
    """

    group: str
    seed: int
    prompt: Int32Array
    output_len: int
    limit: int
    abort_after: int = 0
    priority: int = 0
    tenant: str = ""
    dp_rank: int | None = None

    @property
    def max_len(self) -> int:
        """Return the most tokens of prompt and output that the limit allows."""
        return len(self.prompt) + self.limit

    @property
    def end_len(self) -> int:
        """Return the tokens of prompt and output at its end, unless it is aborted."""
        return len(self.prompt) + min(self.output_len, self.limit)

    def tokens(self) -> Int32Array:
        """Return prompt and output, int32[end_len]; a session's next turn begins with them."""
        positions = np.arange(len(self.prompt), self.end_len)
        output = generated_tokens(self.seed, positions).astype(np.int32)
        if self.output_len <= self.limit:
            output[-1:] = STOP_ID
        return np.concatenate((self.prompt, output))

    def page_keys(self, page_size: int) -> list[int]:
        """Return a key of each full page of its tokens and all tokens before it."""
        data, width, key = self.tokens().tobytes(), 4 * page_size, 0
        keys = []
        for start in range(0, len(data) - width + 1, width):
            key = hash((key, data[start : start + width]))
            keys.append(key)
        return keys


@dataclass(frozen=True)
class Client:
    """Sends requests one after another, each `think_s` after the end of the one before it."""

    start_s: float
    requests: Iterator[LoadRequest]
    think_s: float = 0.0


@dataclass(frozen=True)
class Load:
    """A synthetic load and the engine that serves it.

    Attributes:
        about: the load in words.
        clients: returns new clients; two calls return equal clients.
        seconds: the run ends at this time of the logical clock, or with the last request.
        pool_tokens: size of the KV pool in tokens, per rank.
        num_rows: requests that may run on a rank.
        chunk_tokens: prompt tokens per rank and step.
        context: tokens of a request at most; 0: as many as the pool holds.
        args: changes to the defaults of `SchedulerArgs`.
        sizes: changes to `EngineSizes`.
        reason: the documented policy by which a simple scheduler may do better here.
    """

    name: str
    about: str
    clients: Callable[[], list[Client]]
    seconds: float
    pool_tokens: int
    page_size: int = 16
    dp_size: int = 1
    num_rows: int = 256
    chunk_tokens: int = 2048
    context: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def has_reference(self) -> bool:
        """Return whether the reference supports all features of the load."""
        return not self.sizes and not {"enable_priority_scheduling", "fair_share"} & set(self.args)

    def engine_sizes(self) -> EngineSizes:
        num_pages = self.pool_tokens // self.page_size
        sizes = EngineSizes(
            dp_size=self.dp_size,
            page_size=self.page_size,
            pool_pages=(1 + num_pages,),
            num_rows=self.num_rows + 1,
            max_context_len=self.context or num_pages * self.page_size,
            max_step_tokens=self.chunk_tokens + self.num_rows,
            max_prompt_logprob_tokens=128,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(STOP_ID,),
        )
        return sizes._replace(**self.sizes)
