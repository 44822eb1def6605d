"""With `--enable-deterministic-inference`, a request's tokens and log-probabilities are bit-equal
whatever runs next to it, and however its prompt is computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine
from tests.engine.test_draft_layer import Drafting, eagle3, latents, mtp, windows
from tests.engine.test_host_memory import is_moving
from tests.support.long import long
from tests.support.waiting import until

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = Path(__file__).parents[2] / "models"
LENGTHS = 70, 37, 60, 12, 41, 64, 33, 5, 47
NUM_TOKENS, VOCAB = 16, 120
PAGE = 16


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> None:
    """Pad steps to the shapes of users: answers must not depend on them."""


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float | None]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]


def make_engine(model: Path, **settings: Any) -> Engine:
    defaults = {
        "device": "cpu",
        "warmup": "none",
        "max_running_requests": 2 * len(LENGTHS),
        "max_total_tokens": 4096,
        "page_size": PAGE,
        "check_memory": "busy",
        "enable_deterministic_inference": True,
    }
    return Engine(str(model), **defaults | settings)


def answers(engine: Engine, batch: list[list[int]], **sampling: Any) -> list[Answer]:
    own = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True} | sampling
    outputs = engine.generate(
        input_ids=batch, sampling_params=SamplingParams(**own), return_logprob=True
    )
    return [Answer(out.output_ids, [own.logprob for own in out.logprobs]) for out in outputs]


def scored(engine: Engine, prompt: list[int], answer: Answer) -> Answer:
    (out,) = engine.generate(
        input_ids=[prompt + answer.tokens],
        sampling_params=SamplingParams(temperature=0.0, max_new_tokens=1),
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    return Answer(answer.tokens, [own.logprob for own in out.prompt_logprobs[-NUM_TOKENS:]])


def check(model: Path, **settings: Any) -> None:
    """Compare a request alone with others in a batch, scored, in chunks, cached, and retracted."""
    first, *others = prompts()
    with make_engine(model, **{"disable_radix_cache": True} | settings) as engine:
        (alone,) = answers(engine, [first])
        drawn = answers(engine, [first], temperature=0.8, top_p=0.9, seed=3)
        assert answers(engine, [first, *others])[0] == alone
        assert answers(engine, [*others, first])[-1] == alone
        assert scored(engine, first, alone) == alone
    with make_engine(model, chunked_prefill_size=PAGE, test_retract=True, **settings) as engine:
        assert answers(engine, [*others, first])[-1] == alone
        answers(engine, [[*first[: 3 * PAGE + 1], 4]])
        assert answers(engine, [first, *others])[0] == alone
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
        assert answers(engine, [*others, first], **sampled)[-1:] == drawn


FAMILIES = (
    *("gemma3", "gpt_oss", "deepseek_v3", "llama", "olmo3"),
    *("qwen3_next", "qwen3_5_moe", "kimi_linear", "granite_hybrid", "nemotron_h"),
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"tp_size": 2},
    {"dp_size": 2},
    {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3},
    {"quantization": "int8"},
    {"dtype": "bfloat16"},
)


@pytest.mark.parametrize("family", ["qwen3_moe", *long(*FAMILIES)])
def test_answers_do_not_depend_on_the_batch(family: str) -> None:
    check(GOLDEN / family)


@pytest.mark.parametrize("settings", long(*VARIANTS), ids=str)
def test_so_it_is_with_other_settings(settings: dict[str, Any]) -> None:
    check(GOLDEN / "qwen3", **settings)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next", "deepseek_v3"])
def test_so_it_is_for_prefixes_from_host_memory(family: str) -> None:
    """The pool is too small for all prompts."""
    first, *others = prompts()
    host = {"enable_hierarchical_cache": True, "hicache_ratio": 20.0, "max_total_tokens": 256}
    with make_engine(GOLDEN / family, disable_radix_cache=True) as engine:
        (alone,) = answers(engine, [first])
    with make_engine(GOLDEN / family, **host) as engine:
        for _ in range(3):
            assert answers(engine, [first])[0] == alone
            answers(engine, others)
            until(lambda: not is_moving(engine), "transfers end")
        assert answers(engine, [*others, first])[-1] == alone
        counters = engine.server_info()["counters"]
    assert counters["host_fetched_tokens"] >= 3 * PAGE


@pytest.mark.parametrize("name", long("demo", "demo_hybrid"))
def test_so_it_is_for_larger_models(name: str) -> None:
    check(MODELS / name)


@pytest.mark.parametrize("make", long(mtp, eagle3, latents, windows))
def test_so_it_is_with_drafts_of_a_layer(make: Callable[[Path], Drafting], tmp_path: Path) -> None:
    drafting = make(tmp_path)
    check(drafting.model, context_length=256, **drafting.settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_decode_steps": "4"}, "--num-decode-steps 1, not 4"),
        ({"hidden_sharding": "tensor", "tp_size": 2}, "--hidden-sharding replicated, not tensor"),
    ],
)
def test_settings_that_it_does_not_cover_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_engine(GOLDEN / "qwen3_moe", **settings)
