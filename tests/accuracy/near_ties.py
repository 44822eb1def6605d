"""Where two greedy outputs differ, and whether that was a near tie of the model.

Floating-point sums in another order may tip the balance between two all but equally likely
tokens. Nothing else may make greedy outputs differ.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

NEAR_TIE = 1e-4
# Of one sequence. More would be no chance any more, and each costs two requests.
MAX_DIFFERENCES = 10


class Difference(NamedTuple):
    """At output token `position` another token was chosen; the two best were `margin` apart."""

    position: int
    margin: float


async def differences(
    client: httpx.AsyncClient, prompt: list[int], wanted: list[int], got: list[int]
) -> list[Difference]:
    """All places where a server departs from `wanted`; `client` has its base URL.

    After a difference the two outputs continue different texts. So the server is asked again, for
    what follows the wanted tokens up to and including that place, and that is compared.

    Raises:
        AssertionError: a difference is no near tie, or there are too many.
    """
    found: list[Difference] = []
    start = 0  # `got` continues wanted[:start]
    while got != wanted[start:]:
        assert len(got) == len(wanted) - start, "outputs of different lengths"
        at = start + first_difference(wanted[start:], got)
        margin = await _margin(client, prompt + wanted[:at], {wanted[at], got[at - start]})
        found.append(Difference(at, margin))
        print(f"differs at output token {at}: margin {margin:.2e}")
        assert margin < NEAR_TIE, f"token {at}: {wanted[at]} became {got[at - start]}"
        assert len(found) < MAX_DIFFERENCES
        start = at + 1
        got = await _continue(client, prompt + wanted[:start], len(wanted) - start)
    return found


async def is_near_tie(
    client: httpx.AsyncClient, prompt: list[int], wanted: list[int], got: list[int]
) -> bool:
    """Whether the first difference of two outputs of the same length is a near tie.

    False if there is none.
    """
    if wanted == got:
        return False
    at = first_difference(wanted, got)
    return await _margin(client, prompt + wanted[:at], {wanted[at], got[at]}) < NEAR_TIE


def first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    """Index of the first element that is not the same in both; raises StopIteration if none."""
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


async def generate(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of /generate, which must be a good one."""
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


def greedy(max_new_tokens: int) -> dict[str, Any]:
    """Sampling parameters for exactly so many of the most likely tokens."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


async def _continue(client: httpx.AsyncClient, prompt: list[int], count: int) -> list[int]:
    if count == 0:
        return []
    answer = await generate(client, {"input_ids": prompt, "sampling_params": greedy(count)})
    return list(answer["output_ids"])


async def _margin(client: httpx.AsyncClient, prompt: list[int], chosen: set[int]) -> float:
    """How much more likely the best token after `prompt` is than the second: natural logarithms.

    Both tokens chosen must be these two; else the distance of the lesser one is not known.
    """
    body = {
        "input_ids": prompt,
        "sampling_params": greedy(1),
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answer = await generate(client, body)
    best, second = answer["meta_info"]["output_top_logprobs"][0][:2]
    assert chosen == {best[1], second[1]}, f"{chosen} chosen, but {best} and {second} are best"
    return float(best[0] - second[0])
