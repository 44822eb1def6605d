"""A turn reads the longer of what its session's slot holds and what the tree has of its tokens."""

import pytest

from tests.scheduler.conversations import Conversations
from tests.scheduler.driver import generate
from tests.scheduler.test_sessions import talk


def compute(s: Conversations, rid: str, tokens: list[int]) -> None:
    """A plain request has the KV of `tokens` computed, and leaves it to the tree."""
    s.driver.submit(generate(rid, tokens, 1))
    s.run()


def words(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 50 for i in range(num_tokens)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_turn_whose_tokens_a_plain_request_computed_reads_those_of_the_tree(
    page_size: int,
) -> None:
    s = talk(page_size=page_size, pool_tokens=400)
    s.say("s", words(16), 4)
    new = words(150, first=3)
    prompt = s.of["s"].tokens + new
    compute(s, "plain", prompt)
    rid = s.say("s", new)
    assert s.driver.cached[rid] >= (len(prompt) - 1) // page_size * page_size
    rid = s.say("s", [1])
    assert s.driver.cached[rid] == len(prompt) + 3
    s.close_all()
