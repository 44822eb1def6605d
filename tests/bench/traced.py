"""Requests for tests of recorded traffic."""

from pathlib import Path

from sgl_jax.bench.trace.reading import BLOCK_TOKENS, TracedRequest

EXCERPT = Path(__file__).parents[1] / "traces" / "conversation_excerpt.jsonl"


def request(*block_ids, arrival_ms=0, input_len=None, output_len=1):
    length = input_len or len(block_ids) * BLOCK_TOKENS
    return TracedRequest(arrival_ms, length, output_len, block_ids)
