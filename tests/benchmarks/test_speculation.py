"""N-gram drafts on the demonstration model: the same answers in fewer steps."""

import pytest

from benchmarks.demo_model.speculation import TASKS, compare, together

MIN_RATIO = 1.5


@pytest.mark.long
def test_drafts_change_no_answer_and_save_a_third_of_the_steps() -> None:
    comparisons = compare(6, seed=2, context_length=1280, chunked_prefill_size=128, warmup="none")
    for comparison in comparisons:
        print(comparison.line())
        assert comparison.is_identical
        # One request at a time: without drafts a step is a token.
        assert comparison.plain.tokens_per_step == 1.0
        assert comparison.plain.num_drafted == 0
        assert comparison.drafting.num_accepted > 0
    assert [comparison.task for comparison in comparisons] == list(TASKS)
    assert together(comparisons).ratio >= MIN_RATIO
