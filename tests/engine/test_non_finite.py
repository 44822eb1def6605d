"""NaN in the results of one request ends that request, and nothing else, in the real engine."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_jax.core.messages import (
    CloseSession,
    FrontMessage,
    GenerateRequest,
    OpenSession,
    SessionTurn,
)
from sgl_jax.core.sampling_params import SamplingParams
from tests.engine.test_faults import Rig
from tests.support.long import long_but
from tests.support.non_finite import nan_token, nan_weights

BAD = 61  # its embedding is NaN
COMMON = [5 + i % 40 for i in range(36)]
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
HOST_MEMORY = {"enable_hierarchical_cache": True, "hicache_size": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": DRAFTS,
    "host memory": HOST_MEMORY,
    "drafts, host memory": DRAFTS | HOST_MEMORY,
}


@pytest.fixture(scope="module", params=long_but(SETTINGS, "drafts, host memory"))
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("model"), page_size=4, **SETTINGS[request.param])
    yield rig
    rig.core.executor.close()


def message(rid: str, prompt: list[int], **options: Any) -> GenerateRequest:
    sampling: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    sampling |= options.pop("sampling", {})
    return GenerateRequest(
        rid=rid, input_ids=prompt, sampling=SamplingParams(**sampling), **options
    )


def executor_of(rig: Rig) -> Any:
    return rig.executor._inner


def neighbours(prefix: str) -> list[FrontMessage]:
    return [
        message(f"{prefix}0", [3] * 11),
        message(f"{prefix}1", [*COMMON, 7]),
        message(f"{prefix}2", [9, 8, 7], sampling={"temperature": 0.8, "seed": 5}),
    ]


@pytest.mark.long
def test_a_token_whose_embedding_is_nan_ends_its_request_alone(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    clean = rig.run(rig.until_idle(neighbours("clean"))).tokens()
    bad = [*COMMON, BAD, *range(10, 30)]
    before = rig.core.state()["counters"]["nonfinite_rows"]

    def script() -> Iterator[list[FrontMessage]]:
        yield from rig.until_idle([message("bad", bad), *neighbours("near")])
        # The pages that it has freed hold NaN. Who gets them must not read it.
        yield from rig.until_idle(neighbours("next"))

    with nan_token(executor_of(rig), BAD), caplog.at_level(logging.ERROR):
        channel = rig.run(script())
    end = channel.ends()["bad"]
    assert (end.status_code, end.code) == (500, "internal_server_error")
    assert "bad" not in channel.tokens() or channel.tokens()["bad"] == []
    for i in range(3):
        for prefix in ("near", "next"):
            assert channel.ends()[f"{prefix}{i}"].type == "length"
            assert channel.tokens()[f"{prefix}{i}"] == clean[f"clean{i}"]
    assert rig.core.state()["counters"]["nonfinite_rows"] == before + 1
    assert caplog.text.count("NaN or infinity") == 1
    # Without NaN, the same prompt is served, and finds none of what was computed with it.
    again = rig.run(rig.until_idle([message("again", bad)]))
    assert again.ends()["again"].type == "length"
    cached = [o.cached_tokens for batch in again.sent for o in getattr(batch, "outputs", [])]
    assert max(cached) <= len(COMMON)


def test_nan_weights_end_every_request_and_good_ones_serve_again(rig: Rig) -> None:
    expected = rig.run(rig.until_idle(neighbours("first"))).tokens()
    with nan_weights(executor_of(rig)):
        channel = rig.run(rig.until_idle(neighbours("lost")))
    assert {end.status_code for end in channel.ends().values()} == {500}
    after = rig.run(rig.until_idle(neighbours("after"))).tokens()
    for i in range(3):
        assert after[f"after{i}"] == expected[f"first{i}"]


def test_a_session_goes_on_after_a_turn_that_was_not_finite(rig: Rig) -> None:
    turn = SessionTurn(id=f"s{id(rig)}")
    opened = OpenSession(rid="open", session_id=turn.id, streaming=True)

    def script() -> Iterator[list[FrontMessage]]:
        yield [opened]
        yield from rig.until_idle([message("one", COMMON, session=turn)])
        yield from rig.until_idle([message("bad", [4, BAD, 6], session=turn)])
        yield from rig.until_idle([message("two", [4, 6], session=turn)])
        yield [CloseSession(rid="close", session_id=turn.id)]

    with nan_token(executor_of(rig), BAD):
        channel = rig.run(script())
    assert channel.ends()["bad"].status_code == 500
    history = [*COMMON, *channel.tokens()["one"], 4, 6]
    alone = rig.run(rig.until_idle([message("alone", history)]))
    assert channel.tokens()["two"] == alone.tokens()["alone"]


def test_prompt_logprobs_of_nan_end_the_request(rig: Rig) -> None:
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    with nan_token(executor_of(rig), BAD):
        channel = rig.run(
            rig.until_idle(
                [message("bad", [3, BAD, 5], **wanted), message("good", [3, 4, 5], **wanted)]
            )
        )
    assert channel.ends()["bad"].status_code == 500
    assert channel.ends()["good"].type == "length"
