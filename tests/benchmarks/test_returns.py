"""Expected and real returns of recorded agents."""

import pytest

from benchmarks.trace.returns import WINDOWS, return_rows
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, TracedRequest
from sgl_jax.mem_cache.eviction.path_records import PAUSE_S, class_of

NUM_TURNS = 5


def turns(agent: str, first_block: int, pause_s: float) -> list[TracedRequest]:
    """Turns that each add a block, all after the same pause."""
    return [
        TracedRequest(
            arrival_ms=0,
            input_len=number * BLOCK_TOKENS,
            output_len=1,
            block_ids=tuple(range(first_block, first_block + number)),
            agent=agent,
            stop="tool_use",
            think_s=pause_s,
        )
        for number in range(1, NUM_TURNS + 1)
    ]


def test_a_path_is_held_from_the_windows_start_to_its_return() -> None:
    # The first expectation is 60 s. One agent always returns then; the other one always returns at
    # once, so it is soon expected too early for a fetch.
    rows = return_rows([*turns("a", 0, 60.0), *turns("b", 100, 1.0)])
    expected_s = PAUSE_S[class_of(60.0)]
    for row, (begin, end) in zip(rows, WINDOWS, strict=True):
        assert row.window == (begin, end)
        assert row.num_paths == NUM_TURNS
        assert row.num_before == 1
        is_inside = begin * expected_s <= 60.0 <= end * expected_s
        assert row.num_inside == is_inside * (NUM_TURNS - 1)
        if is_inside:
            mean_blocks = (1 + 2 + 3 + 4) / 4
            assert row.block_seconds == pytest.approx((60 - begin * expected_s) * mean_blocks)


def test_forecasts_without_errors_are_met() -> None:
    rows = return_rows(turns("a", 0, 300.0), sigma=0.0)
    assert [row.used_share for row in rows[1:]] == [1.0, 1.0]
