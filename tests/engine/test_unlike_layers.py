"""Models whose layers are not all of one kind are served: the tokens of their golden data."""

from pathlib import Path

import numpy as np
import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine
from tests.support.covering import covering
from tests.support.long import long

GOLDEN = Path(__file__).parents[1] / "golden"


# What these cache is cached by deepseek_v3, gpt_oss or gemma3, too: each is served once.
SIMILAR = (
    *("deepseek_v2_lite", "deepseek_v2", "kimi_k2"),
    *("qwen3_moe_mixed", "mistral", "qwen2_windows"),
)
# One of each of the other families.
FURTHER = (
    *("smollm3", "seed_oss", "phi3", "olmo3", "glm4_moe", "minimax_m2"),
    *("ministral", "mistral3", "mistral4", "qwen3_vl_moe", "llama4", "gemma4", "gemma4_moe"),
    *("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_reuse", "granite", "granite_moe"),
)
STATES = (
    *("qwen3_5", "qwen3_next", "qwen3_5_moe", "kimi_linear"),
    *("granite_hybrid", "nemotron_h"),
)
RANKS = {"dp_size": 2, "tp_size": 2, "page_size": 1}
CHIPS = {"tp_size": 2, "page_size": 128}


def golden(family, name="golden"):
    data = np.load(GOLDEN / family / f"{name}.npz")
    return data["prompt"].tolist(), data["greedy"].tolist()


def make_engine(family, **settings):
    defaults = {
        "device": "cpu",
        "max_running_requests": 4,
        "max_total_tokens": 512,
        "chunked_prefill_size": 32,
        "warmup": "none",
        "check_memory": "busy",
    }
    return Engine(str(GOLDEN / family), **defaults | settings)


def greedy(num_tokens):
    return SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize(
    "case",
    [
        *long(*[(name, RANKS) for name in ("deepseek_v3", "gemma3", "gpt_oss", *STATES)]),
        *long(*[(family, RANKS) for family in SIMILAR]),
        *long(*[(family, RANKS) for family in FURTHER]),
        *long(*[(family, CHIPS) for family in ("gemma3", "gpt_oss", "deepseek_v3", STATES[0])]),
    ],
    ids=str,
)
def test_unlike_layers_are_served(case):
    family, settings = case
    prompt, expected = golden(family)
    with make_engine(family, **settings) as engine:
        prompts = [prompt, prompt + expected[:3]]
        answers = engine.generate(input_ids=prompts, sampling_params=greedy(len(expected)))
    assert answers[0].output_ids == expected
    assert answers[1].output_ids[: len(expected) - 3] == expected[3:]


# By default test_windows_and_states has the same of a model with states, a session below of one
# with latents, and retracted requests go on from the cache.
@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "gemma3", *FURTHER])
def test_what_goes_on_from_the_cache_is_what_was_computed_without(family):
    prompt, expected = golden(family)
    with make_engine(family) as engine:
        (first,) = engine.generate(input_ids=[prompt], sampling_params=greedy(len(expected)))
        longer = prompt + expected[:5]
        (second,) = engine.generate(input_ids=[longer], sampling_params=greedy(len(expected) - 5))
    assert first.output_ids == expected
    assert second.cached_tokens == len(longer) // 16 * 16
    assert second.output_ids == expected[5:]


@pytest.mark.long
@pytest.mark.parametrize("family", STATES)
def test_a_prompt_goes_on_from_the_last_state_that_is_kept_of_another(family):
    prompt, expected = golden(family)
    with make_engine(family, page_size=4) as engine:
        (first,) = engine.generate(input_ids=[prompt], sampling_params=greedy(len(expected)))
        longer = prompt + expected[:5]
        (second,) = engine.generate(input_ids=[longer], sampling_params=greedy(len(expected) - 5))
        (branch,) = engine.generate(input_ids=[prompt[:30]], sampling_params=greedy(2))
    assert first.output_ids == expected
    assert second.cached_tokens == 44  # the prompt's last whole page
    assert second.output_ids == expected[5:]
    assert branch.cached_tokens == 0


@pytest.mark.long
@pytest.mark.parametrize("family", STATES)
def test_drafts_that_are_refused_leave_the_state_of_what_is_kept(family):
    prompt, expected = golden(family)
    with make_engine(family, speculative_algorithm="NGRAM") as engine:
        # What it repeats makes it likely that a draft is tried, and refused.
        prompts = [prompt, prompt + expected[:8] + prompt[:9] + expected[:4]]
        answers = engine.generate(input_ids=prompts, sampling_params=greedy(len(expected)))
        counters = engine.server_info()["counters"]
    assert counters["drafted_tokens"] > counters["accepted_draft_tokens"]
    with make_engine(family) as engine:
        (plain,) = engine.generate(input_ids=prompts[1:], sampling_params=greedy(len(expected)))
    assert answers[0].output_ids == expected
    assert answers[1].output_ids == plain.output_ids


@pytest.mark.parametrize("family", ["gpt_oss", *long("deepseek_v3", "gemma3", *STATES, *FURTHER)])
def test_retracted_requests_end_as_if_they_had_not_been(family):
    prompt, expected = golden(family)
    with make_engine(family, test_retract=True, page_size=4) as engine:
        prompts = [prompt, prompt[:30], prompt + expected[:3]]
        answers = engine.generate(input_ids=prompts, sampling_params=greedy(len(expected)))
        assert engine.server_info()["counters"]["requests_force_retracted"] > 0
    assert answers[0].output_ids == expected
    assert answers[2].output_ids[: len(expected) - 3] == expected[3:]


@pytest.mark.long
@pytest.mark.parametrize("family", FURTHER)
def test_a_session_says_what_a_whole_prompt_does(family):
    prompt, expected = golden(family)
    with make_engine(family, page_size=4) as engine:
        check_session(engine, prompt, expected, 4)


LONG_PROMPTS = covering(
    (STATES, (1, 16, 128), (1, 2), (1, 2), ("none", "NGRAM"), (None, 64), (False, True)), 2
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "page_size", "dp", "tp", "drafts", "interval", "retract"), LONG_PROMPTS
)
def test_a_long_prompt_says_the_same_alone_cached_and_in_a_session(
    family, page_size, dp, tp, drafts, interval, retract
):
    prompt, expected = golden(family, "long")
    settings = {"max_total_tokens": 1024, "context_length": 256, "test_retract": retract}
    settings |= {"page_size": page_size, "dp_size": dp, "tp_size": tp}
    settings |= {"speculative_algorithm": drafts, "recurrent_snapshot_interval": interval}
    with make_engine(family, **settings) as engine:
        assert say(engine, prompt, len(expected)).output_ids == expected
        cached = say(engine, prompt + expected[:5], len(expected) - 5)
        assert cached.output_ids == expected[5:]
        assert cached.cached_tokens >= 128
        check_session(engine, prompt, expected, page_size)


@pytest.mark.parametrize(
    "settings",
    [{"page_size": 4}, *long({"dp_size": 2, "page_size": 1, "test_retract": True}, {"tp_size": 2})],
    ids=str,
)
def test_a_session_with_latents_says_what_a_whole_prompt_does(settings):
    prompt, expected = golden("deepseek_v3")
    with make_engine("deepseek_v3", **settings) as engine:
        check_session(engine, prompt, expected, settings.get("page_size", 16))


def say(engine, ids, num_tokens, **kwargs):
    (answer,) = engine.generate(
        input_ids=[ids], sampling_params=greedy(num_tokens), progress=False, **kwargs
    )
    return answer


def check_session(engine, prompt, expected, page_size):
    """Check a session that is rolled back, goes on in a turn, and is forked before its next."""
    session_id = engine.open_session(streaming=True)
    in_session = {"session_params": {"id": session_id}}
    assert say(engine, prompt[:-10], 4, **in_session).finish_reason
    engine.rollback_session(session_id, 0)
    first = say(engine, prompt, 4, **in_session)
    assert first.output_ids == expected[:4]
    fork = engine.fork_session(session_id, "the fork")
    for each in (session_id, fork):
        answer = say(engine, expected[4:5], len(expected) - 5, session_params={"id": each})
        assert answer.output_ids == expected[5:]
        assert answer.cached_tokens >= len(prompt) // page_size * page_size
        engine.close_session(each)
