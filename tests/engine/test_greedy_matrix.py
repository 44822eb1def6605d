"""Greedy outputs do not depend on how memory is paged, chunked, cached, overlapped or sharded.

Every variant runs under a load that does not fit its pool, so that pages are evicted and requests
retracted in the midst of it. A token may differ only at a near tie of the top two logits.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine
from tests.support.covering import covering

VOCAB_SIZE = 256
NEAR_TIE = 1e-4
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
AXES = ((1, 16, 128), (64, 2048), (True, False), (True, False), (1, 2), (1, 2))


# Every three values of axes occur in all variants.
FIRST = (
    (16, 64, True, True, 1, 1),
    (1, 2048, False, False, 2, 2),
)
VARIANTS = [
    pytest.param(*values, marks=() if values == FIRST[0] else pytest.mark.long)
    for values in covering(AXES, 3, FIRST)
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small Qwen3 with room for two chips; weights are random."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def make_engine(model_folder: Path) -> Any:
    """Engines on that model."""

    def make(**settings: Any) -> Engine:
        return Engine(
            str(model_folder),
            load_format="dummy",
            device="cpu",
            context_length=512,
            warmup="none",
            check_memory="busy",
            **settings,
        )

    return make


def load() -> tuple[list[list[int]], list[SamplingParams]]:
    """Twelve requests, half of them continuing one of two common stems."""
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(48)] for _ in range(2)]
    prompts, params = [], []
    for i in range(12):
        stem = stems[i % 2] if i % 4 < 2 else []
        prompts.append(stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3, 90))])
        params.append(SamplingParams(max_new_tokens=rng.randrange(20, 80), **GREEDY))
    return prompts, params


@pytest.fixture(scope="module")
def expected(make_engine: Any) -> list[list[int]]:
    """What one request at a time gives, on one device with room for it."""
    prompts, params = load()
    # Of the shapes of a variant of the default run.
    shapes = {"page_size": 16, "chunked_prefill_size": 64, "max_running_requests": 8}
    with make_engine(
        disable_overlap_schedule=True, disable_radix_cache=True, max_total_tokens=512, **shapes
    ) as engine:
        return [
            engine.generate(input_ids=[prompt], sampling_params=sampling)[0].output_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]


@pytest.mark.parametrize(("page_size", "chunk", "overlap", "radix", "dp", "tp"), VARIANTS)
def test_every_variant_generates_the_same_tokens(
    make_engine: Any,
    expected: list[list[int]],
    page_size: int,
    chunk: int,
    overlap: bool,
    radix: bool,
    dp: int,
    tp: int,
) -> None:
    prompts, params = load()
    with make_engine(
        page_size=page_size,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        disable_radix_cache=not radix,
        dp_size=dp,
        tp_size=tp,
        max_running_requests=8 * dp,
        max_total_tokens=512 // dp,
        schedule_conservativeness=0.0,
        load_balance_method="round_robin",
    ) as engine:
        results = engine.generate(input_ids=prompts, sampling_params=params)
        counters = engine.server_info()["counters"]
        differing = [
            (i, result.output_ids)
            for i, result in enumerate(results)
            if result.output_ids != expected[i]
        ]
        for i, tokens in differing:
            assert_near_tie(engine, prompts[i], expected[i], tokens)
    assert len(differing) <= 1
    assert counters["requests_retracted"] > 0
    assert counters["evicted_pages"] > 0 or not radix


def assert_near_tie(
    engine: Engine, prompt: list[int], wanted: list[int], tokens: list[int]
) -> None:
    """At the first difference the top two log-probabilities must be all but equal."""
    first = next(i for i, (a, b) in enumerate(zip(wanted, tokens, strict=True)) if a != b)
    (result,) = engine.generate(
        input_ids=[prompt + wanted[:first]],
        sampling_params=SamplingParams(max_new_tokens=1, **GREEDY),
        return_logprob=True,
        top_logprobs_num=2,
    )
    best, second = result.logprobs[0].top_logprobs
    print(f"differs at output token {first}: margin {best - second:.2e}")
    assert best - second < NEAR_TIE
