"""Expected returns: what is remembered of conversations, and what is evicted by it."""

from random import Random

import numpy as np
import pytest

from sgl_jax.bench.trace.cache_only import tree_hit_rate
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, TracedRequest
from sgl_jax.mem_cache.eviction.path_records import (
    _MAX_RECORDS,
    _MAX_TENANTS,
    FIRST_CLASS,
    NUM_RETURN_CLASSES,
    PAUSE_S,
    REPLACED,
    PathEnd,
    PathRecords,
    PathReturn,
    class_of,
)
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree_node import TreeNode

LEAF = TreeNode(1, np.zeros(0, np.int32), None, 1, child_key=b"", namespace="")


class Conversations:
    """Paths of numbered pages that end at given times."""

    def __init__(self) -> None:
        self.records = PathRecords()

    def end(
        self,
        pages: list[int],
        arrived_s: float,
        now_s: float,
        num_answered: int = 0,
        leaf: TreeNode = LEAF,
        **given: object,
    ) -> PathReturn:
        end = PathEnd(0, arrived_s, **given)  # type: ignore[arg-type]
        hashes = np.array(pages, np.int64)
        return self.records.ended(hashes, len(pages) - num_answered, leaf, end, now_s)


def test_each_pause_has_a_class_of_its_length() -> None:
    for pause_s in (1.0, 1.5, 8.0, 60.0, 300.0, 2845.0):
        assert PAUSE_S[class_of(pause_s)] <= pause_s < PAUSE_S[class_of(pause_s)] * 2**0.25 * 1.001
    assert class_of(-1.0) == class_of(0.5) == NUM_RETURN_CLASSES - 1
    assert class_of(1e9) == REPLACED + 1


def test_pauses_of_a_conversation_are_averaged_and_final_answers_pause_longer() -> None:
    talk, prompt, now_s = Conversations(), list(range(100)), 0.0
    assert talk.end(prompt, 0.0, now_s).return_class == FIRST_CLASS
    classes = []
    for _ in range(12):
        arrived_s, now_s = now_s + 8.0, now_s + 20.0
        prompt += range(len(prompt), len(prompt) + 3)
        classes.append(talk.end(prompt, arrived_s, now_s).return_class)
    assert classes == sorted(classes)
    assert abs(classes[-1] - class_of(8.0)) <= 1
    final = talk.end([*prompt, 500], now_s + 8.0, now_s + 9.0, is_final=True)
    assert PAUSE_S[final.return_class] == pytest.approx(4 * PAUSE_S[classes[-1]])
    told = talk.end([*prompt, 500, 501], now_s + 8.0, now_s + 9.0, pause_s=300.0)
    assert told.return_class == class_of(300.0)
    assert len(talk.records) == 1


def test_the_rest_that_a_longer_prompt_replaces_is_named_with_its_leaf() -> None:
    talk, prompt = Conversations(), list(range(100))
    talk.end([*prompt, 900, 901], 0.0, 0.0, num_answered=2)
    grown = talk.end([*prompt[:-1], 200, 201], 1.0, 1.0)
    assert grown.replaced.tolist() == [99, 900, 901]
    assert grown.former is LEAF
    assert not len(talk.end([*prompt[:-1], 200, 201, 202], 2.0, 2.0).replaced)


def test_prompts_that_share_less_than_half_are_one_agents_only_by_its_id() -> None:
    talk = Conversations()
    talk.end(list(range(100)), 0.0, 0.0)
    assert not len(talk.end([*range(20), *range(200, 280)], 1.0, 1.0).replaced)
    assert len(talk.records) == 2
    agent = ("key", "a")
    talk.end([*range(300, 400)], 1.0, 1.0, agent=agent)
    compacted = talk.end([*range(300, 320), 900], 2.0, 2.0, agent=agent)
    assert compacted.replaced.tolist() == list(range(336, 400))
    talk.end([7, 8, 9], 3.0, 3.0, agent=agent)  # a side request with the agent's id
    assert len(talk.records) == 4
    assert not len(talk.end([*range(300, 320), 900], 4.0, 4.0, agent=("other", "a")).replaced)


def test_agents_that_share_a_long_beginning_keep_their_records_apart() -> None:
    """As two agents with the same instructions and tools, of one key or of two."""
    talk, shared = Conversations(), list(range(100))
    for first, second in (
        ({"agent": ("", "k::a")}, {"agent": ("", "l::b")}),
        ({"tenant": "k"}, {"tenant": "l"}),
        ({"agent": ("", "k::a"), "tenant": "k"}, {}),
    ):
        talk.records.clear()
        talk.end([*shared, 200, 201], 0.0, 10.0, pause_s=1.0, **first)
        other = talk.end([*shared, 300, 301], 74.0, 80.0, pause_s=1.0, **second)
        assert not len(other.replaced)
        assert other.return_class == class_of(1.0)  # an error of the first's is not the other's
        assert len(talk.records) == 2
        grown = talk.end([*shared, 200, 201, 202], 18.0, 90.0, **first)
        assert grown.return_class == round(0.7 * FIRST_CLASS + 0.3 * class_of(8.0))


def test_a_request_sent_before_the_answer_does_not_continue_it() -> None:
    """Further choices of one prompt tell nothing of the pauses, and replace no other choice."""
    talk, prompt = Conversations(), list(range(100))
    for i in range(8):
        choice = talk.end([*prompt, 200 + i], 5.0, 10.0 + i, num_answered=1, agent=("", "a"))
        assert choice.return_class == FIRST_CLASS
        assert not len(choice.replaced)
    late = talk.end([*prompt, 207, 208], 25.0, 30.0, agent=("", "a"))
    assert late.return_class == round(0.7 * FIRST_CLASS + 0.3 * class_of(8.0))


def test_forecasts_are_corrected_by_the_errors_of_their_tenant() -> None:
    talk, prompt, now_s = Conversations(), list(range(100)), 0.0
    for _ in range(200):  # of a tenant that always forecasts a second
        talk.end(prompt, now_s, now_s, pause_s=1.0, tenant="liar")
        now_s += 64.0
    liar = talk.end(prompt, now_s, now_s, pause_s=1.0, tenant="liar")
    assert abs(liar.return_class - class_of(64.0)) <= 1
    honest = talk.end([7, 8], now_s, now_s, pause_s=1.0, tenant="honest")
    assert honest.return_class == class_of(1.0)
    for _ in range(50):  # too long forecasts do not earn shorter ones
        talk.end(prompt, now_s, now_s, pause_s=86_400.0, tenant="mixed")
        now_s += 64.0
    assert talk.end(prompt, now_s, now_s, pause_s=300.0, tenant="mixed")[0] == class_of(300.0)
    for i in range(_MAX_TENANTS + 9):
        talk.records._note_error(str(i), 1.0)
    assert len(talk.records._errors) == _MAX_TENANTS


def test_the_number_of_records_is_bounded() -> None:
    talk = Conversations()
    for i in range(_MAX_RECORDS + 50):
        talk.end([10 * i, 10 * i + 1], 0.0, 0.0)
    assert len(talk.records) == _MAX_RECORDS
    assert sum(map(len, talk.records._by_owner.values())) <= 2 * _MAX_RECORDS
    assert not len(talk.end([0, 5], 1.0, 1.0).replaced)
    talk.records.clear()
    for i in range(2 * _MAX_RECORDS):
        talk.end([1, 2], 0.0, 0.0, agent=("", str(i)))
    assert len(talk.records) == len(talk.records._by_owner) == _MAX_RECORDS
    talk.records.clear()
    assert len(talk.records) == len(talk.records._by_owner) == 0


def agents(num_agents: int, seed: int = 1) -> list[TracedRequest]:
    """Agents with histories of 8 to 40 blocks; every third one pauses for minutes, not seconds."""
    rng, next_id = Random(seed), iter(range(10_000_000))
    paths = [[next(next_id) for _ in range(rng.randint(8, 40))] for _ in range(num_agents)]
    due = [(rng.uniform(0, 60), i) for i in range(num_agents)]
    trace = []
    for _ in range(1200):
        due.sort()
        now_s, i = due.pop(0)
        # The last block is partial, so the next prompt replaces it.
        paths[i] = [*paths[i][:-1], *(next(next_id) for _ in range(rng.choice([1, 2, 2])))]
        length, path = len(paths[i]) * BLOCK_TOKENS, tuple(paths[i])
        trace.append(TracedRequest(int(now_s * 1000), length, 1, path, agent=str(i)))
        if len(paths[i]) > 60:
            paths[i] = [next(next_id) for _ in range(10)]
        due.append((now_s + rng.lognormvariate(5.3 if i % 3 == 0 else 2.3, 0.7), i))
    return trace


def test_agents_find_more_where_paths_expected_last_are_evicted_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = agents(40)
    found = tree_hit_rate(trace, 400, page_size=512, policy="adaptive", check_each_request=True)
    monkeypatch.setattr(RankMemory, "tick", lambda self, now_s: None)
    without = tree_hit_rate(trace, 400, page_size=512, policy="adaptive")
    lru = tree_hit_rate(trace, 400, page_size=512, policy="lru")
    assert found >= max(without, lru) + 0.02
