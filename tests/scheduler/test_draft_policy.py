"""Requests whose drafts bring nothing stop drafting, and try again later."""

import numpy as np
import pytest

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.draft_policy import DraftPolicy
from tests.scheduler.driver import make_sizes

ROWS = np.array([2, 5], np.int32)


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


@pytest.fixture
def policy() -> DraftPolicy:
    policy = DraftPolicy(make_sizes(max_draft_tokens=4))
    for row in ROWS.tolist():
        policy.add(row)
    return policy


def test_new_requests_draft(policy: DraftPolicy) -> None:
    assert policy.choose(ROWS, ints(10, 20)).tolist() == [4, 4]


def test_useless_drafts_pause_and_useful_ones_go_on(policy: DraftPolicy) -> None:
    lens = ints(10, 10)
    for _ in range(10):
        lens = lens + ints(1, 4)
        policy.learn(ROWS, ints(4, 4), ints(0, 3), lens)
    assert policy.choose(ROWS, lens).tolist() == [0, 4]
    assert (policy.num_drafted, policy.num_accepted) == (80, 30)


def test_a_pause_ends_and_a_row_that_fails_again_pauses_sooner_and_longer(
    policy: DraftPolicy,
) -> None:
    length = 10
    steps_until_pause, pauses = [], []
    for _ in range(5):
        steps, pause = 0, 0
        while policy.choose(ROWS[:1], ints(length)).any():
            steps, length = steps + 1, length + 1
            policy.learn(ROWS[:1], ints(4), ints(0), ints(length))
        steps_until_pause.append(steps)
        while not policy.choose(ROWS[:1], ints(length)).any():
            length, pause = length + 1, pause + 1
        pauses.append(pause)
    assert steps_until_pause[0] > 3
    assert steps_until_pause[1:] == [2] * 4
    assert pauses == [8, 16, 32, 64, 64]


def test_a_new_request_in_a_paused_row_drafts(policy: DraftPolicy) -> None:
    for length in range(10, 30):
        policy.learn(ROWS[:1], ints(4), ints(0), ints(length))
    policy.add(2)
    assert policy.choose(ROWS[:1], ints(3)).tolist() == [4]


def test_without_speculation_nothing_is_drafted() -> None:
    policy = DraftPolicy(make_sizes())
    assert policy.choose(ROWS, ints(10, 20)).tolist() == [0, 0]
