"""Layers with a recurrence go on from the states of slots, wherever a prompt is cut."""

from itertools import pairwise

import pytest

from tests.models.golden_server import GOLDEN, Chunk, Server, assert_close, golden
from tests.support.long import long

FAMILIES = ("qwen3_5", *long("qwen3_next", "granite_hybrid", "nemotron_h"))


@pytest.fixture(scope="module", params=FAMILIES)
def served(request):
    """A server whose program is compiled once, and its golden data."""
    return Server(GOLDEN / request.param), golden(request.param)


def run(server, tokens, bounds, *, num_decode=0, request=0):
    """Logits of each position of a request that is computed in chunks between `bounds`."""
    for start, stop in pairwise(bounds):
        chunk = Chunk(request, start, tokens[start:stop])
        (logits,) = server.step([[chunk]], num_decode if start else 0)
        yield slice(start, stop), logits


@pytest.mark.parametrize(
    "bounds",
    [(0, 1, 2, 3, 4, 45), (0, 44, 45), (0, 16, 17, 45), range(46)],
    ids=["short ones first", "one token last", "a page, then one token", "token by token"],
)
def test_a_prompt_may_be_cut_anywhere(served, bounds):
    server, data = served
    for where, logits in run(server, data["prompt"], bounds):
        assert_close(logits, data["prompt_logits"][where])


def test_decode_rows_compute_a_prompt_as_prefill_rows_do(served):
    server, data = served
    for where, logits in run(server, data["prompt"], range(46), num_decode=1):
        assert_close(logits, data["prompt_logits"][where])


def test_any_snapshot_may_be_gone_on_from_again_and_again(served):
    server, data = served
    prompt, expected = data["prompt"], data["prompt_logits"]
    kept = {1: 1, 16: 2, 23: 3, 45: 4}
    whole = Chunk(0, 0, prompt, keeps=tuple(kept.items()))
    (logits,) = server.step([[whole]], num_decode=0)
    assert_close(logits, expected)
    for length in (23, 1, 16, 23):
        rest = Chunk(0, length, prompt[length:], source=kept[length])
        (logits,) = server.step([[rest]], num_decode=0)
        assert_close(logits, expected[length:])
    first = Chunk(0, 45, data["greedy"][:1], source=kept[45])
    (logits,) = server.step([[first]], num_decode=1)
    assert_close(logits[0], data["greedy_logits"][1])


def test_rows_of_one_step_have_states_of_their_own(served):
    server, data = served
    prompt, expected = data["prompt"], data["prompt_logits"]
    server.step([[Chunk(0, 0, prompt[:12]), Chunk(1, 0, prompt[:5])]], num_decode=0)
    chunks = [
        Chunk(0, 12, prompt[12:13]),
        Chunk(1, 5, prompt[5:21], keeps=((20, 2),)),
        Chunk(2, 0, prompt[:30], keeps=((7, 1), (30, 3))),
    ]
    (logits,) = server.step([chunks], num_decode=1)
    assert_close(logits[:1], expected[12:13])
    assert_close(logits[1:17], expected[5:21])
    assert_close(logits[17:], expected[:30])
    chunks = [
        Chunk(1, 20, prompt[20:25], source=2),
        Chunk(2, 7, prompt[7:12], source=1),
    ]
    (logits,) = server.step([chunks], num_decode=0)
    assert_close(logits[:5], expected[20:25])
    assert_close(logits[5:], expected[7:12])
