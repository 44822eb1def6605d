"""The engine's models say what transformers says, in float32, however the work is cut up.

Golden data: tests/golden, made by scripts/make_golden.py.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from sgl_jax.checkpoint.convert import convert
from tests.models.golden_server import GOLDEN, Chunk, Server, assert_close, golden

WITH_WINDOWS = ("mistral", "qwen2_windows", "gemma3", "gpt_oss")
WITH_STATES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
WITH_LATENTS = ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe_mixed"),
    *WITH_WINDOWS,
    *WITH_STATES,
    *WITH_LATENTS,
)
# Of each other family one case is tried by default.
FURTHER = (
    *("smollm3", "phi3", "olmo3", "glm4_moe", "minimax_m2"),
    *("mistral3", "mistral4", "qwen3_vl_moe", "llama4", "gemma4", "gemma4_moe", "deepseek_v32"),
    *("glm_moe_dsa_reuse", "kimi_linear", "granite_hybrid", "nemotron_h"),
)
HYBRIDS = ("kimi_linear", "granite_hybrid", "nemotron_h")
WITH_STATE_SPACES = ("granite_hybrid", "granite_hybrid_dense", "nemotron_h", "nemotron_h_dense")
FURTHER_EXPERTS = (
    *("glm4_moe", "glm4_moe_groups", "minimax_m2"),
    *("mistral4", "qwen3_vl_moe", "llama4", "gemma4_moe", "deepseek_v32", "glm_moe_dsa"),
    *("glm_moe_dsa_reuse", "kimi_linear", "granite_moe", "granite_hybrid", "nemotron_h"),
)
FURTHER_SHAPES = (
    *("seed_oss", "phi3_window", "glm4_moe_groups"),
    *("ministral", "ministral3", "qwen3_vl", "glm_moe_dsa"),
    *("granite", "granite_moe", "granite_hybrid_dense", "nemotron_h_dense"),
)


class Setup(NamedTuple):
    dp: int = 1
    tp: int = 1
    ep: int = 1
    copies: int = 0
    page_size: int = 16
    weight_sharding: str = "replicated"
    attention_backend: str = "auto"
    unrolled_layers: int | None = None
    sequence_parallel: bool = False


ONE_TOKEN_PAGES = Setup(page_size=1)
ONE_PAGE_A_ROW = Setup(page_size=128)
TWO_CHIPS = Setup(tp=2)
MORE_CHIPS_THAN_KV_HEADS = Setup(tp=4)
TWO_RANKS = Setup(dp=2)
ONE_TOKEN_PAGES_OF_TWO = Setup(tp=2, page_size=1)
SPLIT_WEIGHTS = Setup(dp=2, tp=2, weight_sharding="data")
UNROLLED = Setup(tp=2, unrolled_layers=2)
SEQUENCE_PARALLEL = Setup(tp=2, sequence_parallel=True)
SEQUENCE_PARALLEL_UNROLLED = Setup(dp=2, tp=2, unrolled_layers=2, sequence_parallel=True)
SEQUENCE_PARALLEL_OVER_FOUR = Setup(tp=4, sequence_parallel=True)
SEQUENCE_PARALLEL_SPLIT_WEIGHTS = Setup(dp=2, tp=2, weight_sharding="data", sequence_parallel=True)
SIMULATED_TPU = Setup(attention_backend="pallas")
EXPERTS_OVER_A_RANK = Setup(tp=2, ep=2)
EXPERTS_OVER_RANKS = Setup(dp=2, tp=2, ep=4)
SEQUENCE_PARALLEL_WHOLE_EXPERTS = Setup(dp=2, tp=2, ep=4, copies=3, sequence_parallel=True)
COPIED_EXPERTS = Setup(tp=2, ep=2, copies=1)
COPIED_EXPERTS_OVER_RANKS = Setup(dp=2, ep=2, copies=3)


@pytest.mark.parametrize(
    ("family", "setup"),
    [
        *[(family, ONE_TOKEN_PAGES) for family in FAMILIES],
        *[(family, ONE_TOKEN_PAGES) for family in HYBRIDS],
        *[(family, ONE_TOKEN_PAGES_OF_TWO) for family in FURTHER if family not in HYBRIDS],
        ("llama", SPLIT_WEIGHTS),
        ("qwen2", MORE_CHIPS_THAN_KV_HEADS),
        ("qwen3", TWO_RANKS),
        ("qwen3", UNROLLED),
        ("qwen3", SEQUENCE_PARALLEL_UNROLLED),
        ("llama", SEQUENCE_PARALLEL_SPLIT_WEIGHTS),
        ("qwen3_moe", EXPERTS_OVER_A_RANK),
        ("qwen3_moe_mixed", SEQUENCE_PARALLEL_WHOLE_EXPERTS),
        ("gpt_oss_mxfp4", COPIED_EXPERTS_OVER_RANKS),
        *[
            pytest.param(family, setup, marks=pytest.mark.long)
            for family, setup in (
                *[
                    (family, setup)
                    for family in WITH_WINDOWS
                    for setup in (Setup(), ONE_PAGE_A_ROW, TWO_RANKS)
                ],
                *((family, TWO_CHIPS) for family in ("gpt_oss", "qwen3_5")),
                *((family, EXPERTS_OVER_RANKS) for family in ("gpt_oss", "deepseek_v3")),
                *(("llama", setup) for setup in (TWO_CHIPS, SEQUENCE_PARALLEL)),
                *(("qwen3_moe_mixed", own) for own in (SPLIT_WEIGHTS, UNROLLED, COPIED_EXPERTS)),
                ("gemma3", TWO_CHIPS),
                ("qwen2_windows", SEQUENCE_PARALLEL),
                ("gemma3", SEQUENCE_PARALLEL),
                ("qwen3_5", SEQUENCE_PARALLEL),
                ("qwen2", SEQUENCE_PARALLEL_OVER_FOUR),
                ("qwen3_next", SPLIT_WEIGHTS),
                ("mistral", TWO_CHIPS),
                ("qwen2_windows", TWO_CHIPS),
                ("qwen3_moe", SPLIT_WEIGHTS),
                ("qwen3_moe", MORE_CHIPS_THAN_KV_HEADS),
                ("gpt_oss_mxfp4", Setup()),
                ("gemma3", MORE_CHIPS_THAN_KV_HEADS),
                ("gemma3", UNROLLED),
                ("gpt_oss", MORE_CHIPS_THAN_KV_HEADS),
                ("gpt_oss", UNROLLED),
                ("gpt_oss_mxfp4", SPLIT_WEIGHTS),
                ("gpt_oss_mxfp4", MORE_CHIPS_THAN_KV_HEADS),
                ("qwen3_next", TWO_CHIPS),
                ("qwen3_next", UNROLLED),
                ("qwen3_5_moe", TWO_CHIPS),
                ("qwen3_5_moe", SPLIT_WEIGHTS),
                ("gemma3", SPLIT_WEIGHTS),
                ("qwen3_5", TWO_RANKS),
                ("gpt_oss", SPLIT_WEIGHTS),
                ("gpt_oss", EXPERTS_OVER_A_RANK),
                ("qwen3_moe", EXPERTS_OVER_RANKS),
                ("qwen3_moe", SEQUENCE_PARALLEL),
                ("gpt_oss", SEQUENCE_PARALLEL),
                ("qwen3_next", EXPERTS_OVER_A_RANK),
                ("qwen3_next", EXPERTS_OVER_RANKS),
                ("gpt_oss_mxfp4", COPIED_EXPERTS),
                ("qwen3_moe_mixed", COPIED_EXPERTS_OVER_RANKS),
                *[
                    (family, setup)
                    for family in WITH_LATENTS
                    for setup in (Setup(), ONE_PAGE_A_ROW, TWO_CHIPS, TWO_RANKS)
                ],
                *[
                    (family, setup)
                    for family in ("deepseek_v2_lite", "deepseek_v3")
                    for setup in (EXPERTS_OVER_A_RANK, Setup(dp=2, ep=2))
                ],
                ("deepseek_v2_lite", UNROLLED),
                ("deepseek_v3", SPLIT_WEIGHTS),
                ("deepseek_v3", SEQUENCE_PARALLEL),
                ("kimi_k2", EXPERTS_OVER_RANKS),
                ("kimi_k2", COPIED_EXPERTS_OVER_RANKS),
                *[
                    (family, setup)
                    for family in (*FURTHER, *FURTHER_SHAPES)
                    for setup in (Setup(), ONE_PAGE_A_ROW, TWO_RANKS)
                ],
                *[(family, ONE_TOKEN_PAGES_OF_TWO) for family in (*HYBRIDS, *FURTHER_SHAPES)],
                *[
                    (family, setup)
                    for family in FURTHER_EXPERTS
                    for setup in (EXPERTS_OVER_A_RANK, EXPERTS_OVER_RANKS, Setup(dp=2, ep=2))
                ],
                *[
                    (family, setup)
                    for family in ("phi3", "olmo3", "minimax_m2", "llama4", "gemma4", "gemma4_moe")
                    for setup in (MORE_CHIPS_THAN_KV_HEADS, SPLIT_WEIGHTS, SEQUENCE_PARALLEL)
                ],
                *[
                    (family, setup)
                    for family in ("granite_hybrid", "granite_hybrid_dense", "nemotron_h")
                    for setup in (MORE_CHIPS_THAN_KV_HEADS, SPLIT_WEIGHTS, SEQUENCE_PARALLEL)
                ],
                ("nemotron_h", UNROLLED),
                *[(family, SIMULATED_TPU) for family in ("smollm3", "olmo3", "llama4")],
                *[
                    (family, setup)
                    for family in ("deepseek_v32", "glm_moe_dsa_reuse", "kimi_linear")
                    for setup in (TWO_CHIPS, SPLIT_WEIGHTS, SEQUENCE_PARALLEL, UNROLLED)
                ],
                *[
                    (family, setup)
                    for family in ("gemma4", "gemma4_moe")
                    for setup in (SIMULATED_TPU, UNROLLED)
                ],
                ("qwen3_moe", SIMULATED_TPU),
                ("gemma3", SIMULATED_TPU),
                ("gpt_oss", SIMULATED_TPU),
            )
        ],
    ],
    ids=str,
)
def test_prefill_whole_or_chunked_and_decode_match_transformers(family, setup):
    data = golden(family)
    prompt, greedy = data["prompt"], data["greedy"]
    server = Server(GOLDEN / family, **setup._asdict())
    # Request 0 prefills in three chunks. Beside it, request 1 prefills in one, then decodes.
    bounds = (0, 7, 23, len(prompt))
    positions = len(prompt)
    for step, (start, stop) in enumerate(pairwise(bounds)):
        chunk = Chunk(0, start, prompt[start:stop])
        if step == 0:
            other = Chunk(1, 0, prompt[:17])
            first, second = (chunk, other)
            expected = np.concatenate([data["prompt_logits"][:7], data["prompt_logits"][:17]])
        else:
            other = Chunk(1, 16 + step, prompt[16 + step : 17 + step])
            first, second = (other, chunk)
            expected = data["prompt_logits"][[16 + step, *range(start, stop)]]
        for logits in server.step([[first, second]] * setup.dp, num_decode=int(step > 0)):
            assert_close(logits, expected)
    for step, token in enumerate(greedy[:-1]):
        decode = Chunk(0, positions + step, np.array([token]))
        for logits in server.step([[decode]] * setup.dp, num_decode=1):
            assert_close(logits[0], data["greedy_logits"][step + 1])
            assert logits[0].argmax() == greedy[step + 1]
    # Request 2 prefills in one chunk.
    for logits in server.step([[Chunk(2, 0, prompt)]] * setup.dp, num_decode=0):
        assert_close(logits, data["prompt_logits"])
        assert logits[-1].argmax() == greedy[0]


@pytest.mark.parametrize(
    ("family", "setup"),
    [
        ("qwen3_5", Setup()),
        pytest.param("granite_hybrid_dense", Setup(), marks=pytest.mark.long),
        *[
            pytest.param(family, setup, marks=pytest.mark.long)
            for family in (*WITH_STATES, "kimi_linear", *WITH_STATE_SPACES)
            for setup in (ONE_TOKEN_PAGES, ONE_PAGE_A_ROW, TWO_CHIPS, TWO_RANKS)
        ],
    ],
    ids=str,
)
def test_a_prompt_of_several_chunks_of_a_recurrence_matches_transformers(family, setup):
    data = golden(family, "long")
    prompt, logits = data["prompt"], data["prompt_logits"]
    last = len(prompt) - len(logits)  # the first position whose logits are known
    server = Server(GOLDEN / family, **setup._asdict(), max_len=256)
    for start, stop in pairwise((0, 67, 128, len(prompt))):
        chunk = Chunk(0, start, prompt[start:stop])
        # Beside it, the same prompt in other pieces.
        other = Chunk(1, start // 2, prompt[start // 2 : stop // 2])
        found = server.step([[chunk, other]] * setup.dp, num_decode=0, num_tokens=192)
    for rank in found:
        assert_close(rank[last - start : stop - start], logits)
    for whole in server.step([[Chunk(2, 0, prompt)]] * setup.dp, num_decode=0, num_tokens=192):
        assert_close(whole[last:], logits)
    half = len(prompt) // 2
    rest = Chunk(1, half, prompt[half:])
    for found in server.step([[rest]] * setup.dp, num_decode=0, num_tokens=192):
        assert_close(found[last - half :], logits)
    for step, token in enumerate(data["greedy"][:-1]):
        rows = [Chunk(request, len(prompt) + step, np.array([token])) for request in range(3)]
        for found in server.step([rows] * setup.dp, num_decode=3, num_tokens=192):
            for row in found:
                assert_close(row, data["greedy_logits"][step + 1])


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss_mxfp4",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("gpt_oss", "gemma3", "deepseek_v2_lite", "deepseek_v3")
        ),
    ],
)
def test_rows_that_are_padded_for_a_tpu_change_nothing(family, tmp_path, monkeypatch):
    for module in ("decoder", "gpt_oss", "deepseek"):
        monkeypatch.setattr(f"sgl_jax.models.{module}.row_size", lambda size: size + 3)
    data, folder = golden(family), GOLDEN / family
    convert(folder, tmp_path / "orbax", "float32")
    for server in (Server(folder, tp=2), Server(tmp_path / "orbax", tp=4)):
        assert server.params["embedding"]["weight"].shape[1] == 35
        (logits,) = server.step([[Chunk(0, 0, data["prompt"])]], num_decode=0)
        assert_close(logits, data["prompt_logits"])


def test_sequence_parallel_chips_need_not_divide_the_tokens():
    data, server = golden("gpt_oss"), Server(GOLDEN / "gpt_oss", **SEQUENCE_PARALLEL._asdict())
    (logits,) = server.step([[Chunk(0, 0, data["prompt"])]], num_decode=0, num_tokens=61)
    assert_close(logits, data["prompt_logits"])


def test_ranks_do_not_disturb_each_other():
    """Two ranks use the same page ids for different texts."""
    data = golden("qwen3")
    server = Server(GOLDEN / "qwen3", dp=2)
    whole, half = Chunk(0, 0, data["prompt"]), Chunk(0, 0, data["prompt"][20:])
    first, second = server.step([[whole], [half]], num_decode=0)
    assert_close(first, data["prompt_logits"])
    (alone,) = Server(GOLDEN / "qwen3").step([[half]], num_decode=0)
    assert_close(second, alone)


@pytest.mark.long
def test_simulated_kernels_find_the_weights_and_the_cache_of_unlike_layers():
    data = golden("qwen3_moe_mixed")
    server = Server(GOLDEN / "qwen3_moe_mixed", **SIMULATED_TPU._asdict())
    (logits,) = server.step([[Chunk(0, 0, data["prompt"][:17])]], 0, num_tokens=32)
    assert_close(logits, data["prompt_logits"][:17])
    (logits,) = server.step([[Chunk(0, 17, data["prompt"][17:18])]], 1, num_tokens=32)
    assert_close(logits, data["prompt_logits"][17:18])
