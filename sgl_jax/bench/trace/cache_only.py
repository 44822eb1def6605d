"""Run recorded prompts through a rank's memory, one after another, without a scheduler.

This measures only the prefix cache and its eviction, as in published figures: prompts are kept,
outputs are not; each block of 512 tokens, including a partial last block, takes 512 tokens of the
pool. The page size must divide 512, and affects only the time of a run.
"""

import numpy as np

from sgl_jax.bench.trace.oracles import Trace
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, VOCAB_SIZE, TracedRequest, block_tokens
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache


def tree_hit_rate(
    trace: Trace,
    capacity: int,
    *,
    page_size: int,
    policy: str,
    check_each_request: bool = False,
) -> float:
    """Return the share of all prompt tokens that the radix tree serves.

    Args:
        trace: the requests.
        capacity: blocks of 512 tokens in the pool; a longer prompt is neither served nor kept.
        page_size: tokens, a divisor of 512.
        policy: one of `EVICTION_POLICIES`.
        check_each_request: check the ledger's balance after each; a full audit always ends the run.

    Raises `LedgerError` if the memory's counts do not balance.
    """
    if BLOCK_TOKENS % page_size:
        raise ValueError(f"the page size must divide {BLOCK_TOKENS}, got {page_size}")
    longest = max(len(request.block_ids) for request in trace)
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(1 + capacity * (BLOCK_TOKENS // page_size),),
        num_rows=2,
        max_context_len=longest * BLOCK_TOKENS,
        max_step_tokens=longest * BLOCK_TOKENS,
        max_prompt_logprob_tokens=1,
        vocab_size=VOCAB_SIZE,
    )
    memory = RankMemory(0, sizes, eviction_policy=policy)
    num_cached = 0
    for request in trace:
        if len(request.block_ids) > capacity:
            continue
        num_cached += _serve(memory, request)
        if check_each_request:
            check_balance(memory, 0)
    audit(memory, 0)
    return num_cached / sum(request.input_len for request in trace)


def _serve(memory: RankMemory, request: TracedRequest) -> int:
    """Match, compute and keep one prompt; return its number of cached tokens."""
    tokens = block_tokens(request.block_ids)
    lease = memory.open_lease(tokens)
    num_cached = min(lease.kv_committed_len, request.input_len)
    rows, lens = np.array([lease.row]), np.array([len(tokens)], np.int32)
    fits = memory.grow_rows(rows, lens)
    assert fits, "a prompt within the capacity fits once all others are evicted"
    memory.commit_rows(rows, lens)
    release_kv_cache(memory, lease, tokens, insert=True)
    return num_cached
