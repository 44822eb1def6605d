"""Quantized checkpoints, as public tools write them, give the logits of their dequantized weights.

Golden data: tests/golden/quantized, made by scripts/make_quantized_golden.py. Its reference
computes in float64, and quantizes activations where the checkpoint does.
"""

from itertools import pairwise

import numpy as np
import pytest

from sgl_jax.models.config import ModelConfig
from tests.models.golden_server import GOLDEN, Chunk, Server, golden

FOLDERS = sorted(folder.name for folder in (GOLDEN / "quantized").iterdir())
# XLA's own defaults, in place of those of `tests/support/quick_compilation.py`.
OPTIMISED = {"xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 3}
TOLERANCE = 1e-3  # of the logits' range
# With two chips, each quantizes its own part of the inputs of `o_proj` and `down_proj` by a scale
# of its own; and sums in another order put a number near the boundary of two roundings on its
# other side. Both are errors of quantization, as large as those that the reference has.
TOLERANCE_OF_TWO_CHIPS = 0.06
ON_TWO_CHIPS = "ct_int4_asymmetric_group32"


def tolerance(name, tp=1, **_):
    config = ModelConfig.from_path(GOLDEN / "quantized" / name)
    is_weight_only = all(rule.scheme.activation is None for _, rule in config.quantization.rules)
    return TOLERANCE if is_weight_only or tp == 1 else TOLERANCE_OF_TWO_CHIPS


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        *[(name, {}) for name in FOLDERS],
        *[
            pytest.param(
                name,
                {"tp": 2},
                marks=() if name == ON_TWO_CHIPS else pytest.mark.long,
            )
            for name in FOLDERS
        ],
        ("ct_int4_group32", {"dp": 2}),
        pytest.param(
            "moe_ct_int8_weight_only", {"tp": 2, "ep": 2, "copies": 2}, marks=pytest.mark.long
        ),
        pytest.param(
            "moe_ct_int4_group32", {"dp": 2, "ep": 2, "copies": 2}, marks=pytest.mark.long
        ),
        pytest.param("moe_fp8_block", {"dp": 2, "ep": 2, "copies": 4}, marks=pytest.mark.long),
        *(
            pytest.param("latent_fp8_block", chips, marks=pytest.mark.long)
            for chips in ({"dp": 2, "ep": 2}, {"tp": 2, "ep": 2})
        ),
        pytest.param(
            "ct_int8_dynamic", {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.long
        ),
        *(
            pytest.param(name, {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.long)
            for name in ("ct_int8_weight_only", "ct_fp8_kv_scales", "ct_int4_group32")
        ),
        pytest.param(
            *("moe_ct_int8_weight_only", {"tp": 2, "ep": 2, "sequence_parallel": True}),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_prefill_whole_or_chunked_and_decode_match_the_reference(name, chips):
    data = golden(f"quantized/{name}")
    # Compiled quickly, this one's logits are off by .008 of their range: less than those of two
    # chips, whose sums have another order, but above the tolerance of one.
    options = OPTIMISED if name == "ct_fp8_static" else None
    server = Server(GOLDEN / "quantized" / name, **chips, compiler_options=options)
    ranks, prompt = chips.get("dp", 1), data["prompt"]
    allowed = tolerance(name, **chips) * np.ptp(data["prompt_logits"])

    def check(chunks, expected, *, num_decode):
        for logits in server.step([chunks] * ranks, num_decode):
            np.testing.assert_allclose(logits, expected, rtol=0, atol=allowed)

    check([Chunk(0, 0, prompt)], data["prompt_logits"], num_decode=0)
    for start, stop in pairwise((0, 7, 23, len(prompt))):
        chunk = Chunk(1, start, prompt[start:stop])
        check([chunk], data["prompt_logits"][start:stop], num_decode=0)
    for step, token in enumerate(data["greedy"][:-1]):
        rows = [Chunk(request, len(prompt) + step, np.array([token])) for request in range(2)]
        check(rows, data["greedy_logits"][[step + 1] * 2], num_decode=2)
