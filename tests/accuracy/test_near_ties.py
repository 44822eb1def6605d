"""A difference counts as chance only where the two best tokens are all but equally likely."""

import asyncio
import json

import httpx
import pytest

from tests.accuracy.near_ties import Difference, differences, is_near_tie

PROMPT = [7, 7]
WANTED = [1, 2, 3, 4, 5]


class ScriptedModel:
    """Continues any prompt with what follows it in `PROMPT + WANTED`, but for `odd`, added last.

    After `PROMPT + WANTED[:at]` the two best tokens are `best[at]`, `margin` apart.
    """

    def __init__(self, margin: float, best: dict[int, tuple[int, int]], odd: int | None = None):
        self._margin, self._best, self._odd = margin, best, odd

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        at = len(body["input_ids"]) - len(PROMPT)
        assert body["input_ids"] == PROMPT + WANTED[:at]
        if body.get("return_logprob"):
            first, second = self._best[at]
            top = [[[-1.0, first, None], [-1.0 - self._margin, second, None]]]
            return httpx.Response(200, json={"meta_info": {"output_top_logprobs": top}})
        output = WANTED[at:]
        if self._odd is not None:
            output[-1] = self._odd
        return httpx.Response(200, json={"output_ids": output})

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url="http://model", transport=httpx.MockTransport(self.answer)
        )


def found(model: ScriptedModel, got: list[int]) -> list[Difference]:
    return asyncio.run(differences(model.client(), PROMPT, WANTED, got))


def test_equal_outputs_differ_nowhere() -> None:
    assert found(ScriptedModel(0.0, {}), WANTED) == []


def test_after_a_near_tie_the_rest_is_judged_from_the_wanted_tokens() -> None:
    model = ScriptedModel(5e-5, {1: (2, 9)})
    ((position, margin),) = found(model, [1, 9, 8, 8, 8])
    assert position == 1
    assert margin == pytest.approx(5e-5)


def test_a_second_difference_is_found_behind_the_first() -> None:
    model = ScriptedModel(5e-5, {1: (2, 9), 4: (6, 5)}, odd=6)
    assert [place.position for place in found(model, [1, 9, 8, 8, 8])] == [1, 4]


def test_a_clear_difference_is_a_wrong_answer() -> None:
    with pytest.raises(AssertionError, match="token 1: 2 became 9"):
        found(ScriptedModel(2e-4, {1: (2, 9)}), [1, 9, 3, 4, 5])


def test_a_token_that_is_not_among_the_two_best_is_a_wrong_answer() -> None:
    with pytest.raises(AssertionError, match="are best"):
        found(ScriptedModel(0.0, {1: (2, 3)}), [1, 9, 3, 4, 5])


def test_a_missing_token_is_a_wrong_answer() -> None:
    with pytest.raises(AssertionError, match="lengths"):
        found(ScriptedModel(0.0, {}), WANTED[:-1])


def test_equal_outputs_are_no_near_tie() -> None:
    model = ScriptedModel(5e-5, {1: (2, 9)})
    assert not asyncio.run(is_near_tie(model.client(), PROMPT, WANTED, WANTED))
    assert asyncio.run(is_near_tie(model.client(), PROMPT, WANTED, [1, 9, 8, 8, 8]))
