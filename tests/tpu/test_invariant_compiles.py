"""Steps of deterministic inference, compiled for real chips: the kernels of the mode, nothing
copied, and the sums that XLA computes cut alike in all shapes of a step."""

import json
import re
from collections import Counter
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.tuned import invariant_blocks
from sgl_jax.kernels.grouped_matmul.tpu import multiply_rows
from sgl_jax.kernels.quantized_matmul.numbers import QuantizedArrays
from sgl_jax.kernels.quantized_matmul.tpu import tpu_quantized_matmul
from sgl_jax.kernels.row_blocks import TPU_BLOCK_ROWS
from sgl_jax.planner.arguments import read_config
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import has_tpu_compiler
from tests.tpu.compiling import (
    MAX_COMPILE_S,
    compile_on,
    generations,
    num_bytes,
    num_kernels,
    struct,
)
from tests.tpu.copies import copies, shapes_kept
from tests.tpu.test_single_kernels_compile import Shape, compile_attention
from tests.tpu.test_whole_steps import _compile

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(),
    reason="libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler",
)

ATTENTION = {"paged_write", "paged_prefill"}
EXPERTS = {"grouped_matmul", "plan_visits", "choose_experts"}
DELTA = {"gated_delta_decode", "causal_conv"}
# Model, layers, chips of a rank, settings, and kernels of the mode besides products.
DENSE = ("llama-3.1-8b", 1, 1, {}, ATTENTION | {"qkv_heads"})
MODELS: dict[str, tuple[str, int, int, dict[str, Any], set[str]]] = {
    "dense": DENSE,
    "windows, sinks, experts": ("gpt-oss-20b", 2, 1, {}, ATTENTION | EXPERTS),
    "experts": ("qwen3-30b-a3b", 1, 1, {}, ATTENTION | EXPERTS | {"qkv_heads_normalised"}),
    "int8": ("llama-3.1-8b", 1, 1, {"quantization": "int8"}, {"quantized_matmul_numbers"}),
    "four chips": ("llama-3.1-8b", 1, 4, {}, ATTENTION),
    "gated delta nets": ("qwen3-next-80b-a3b", 4, 4, {}, ATTENTION | DELTA),
    "latents": ("deepseek-v2-lite", 2, 1, {}, ATTENTION | EXPERTS),
    "state spaces": ("granite-4.0-h-small", 6, 1, {}, {"state_space_decode", "causal_conv"}),
}
TOPOLOGIES = {"v5e": "v5e-4", "v6e": "v6e-4", "v5p": "v5p-8", "tpu7x": "tpu7x-8"}


def sums_by_xla(text: str) -> set[tuple[str, ...]]:
    """Return the sums within loops of a compiled program, with the parts they are computed in."""
    computations: dict[str, list[str]] = {}
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            lines = computations.setdefault(begin[1], [])
        elif line.startswith(" "):
            lines.append(line)
    found = set()
    for name, lines in computations.items():
        for line in lines if "region" in name and "fused" not in name else ():
            called = re.search(r"calls=%?([\w.-]+)", line)
            inner = computations.get(called[1], []) if called else [line]
            kind = r" = (\S+?)[{ ].*?(convolution|dot|reduce)\("
            kinds = [found_here.groups() for own in inner if (found_here := re.search(kind, own))]
            if kinds:
                window = re.search(r'"window_config":\{(.*?)\}', line)
                sizes = json.loads("{" + window[1] + "}") if window else {}
                bounds = (sizes.get(name) for name in sizes if name.endswith("bounds"))
                found.add((*map(str, sorted(kinds)), *map(str, bounds)))
    return found


def check(name: str, topology: str) -> None:
    model, num_layers, tp, settings, kernels = MODELS[name]
    layers = read_config(model).quantized(settings.get("quantization")).layers[:num_layers]
    settings = settings | {"enable_deterministic_inference": True, "draws": False}
    sums = []
    for step in ("decode", "mixed"):
        engine, program, bucket = _compile(model, topology, 1, tp, step, layers, **settings)
        text = program.as_text()
        assert text is not None
        cost = program_cost(program)
        assert copies(text, shapes_kept(engine), bucket.tokens) == []
        counts = Counter(cost.kernels)
        assert kernels <= set(counts), counts
        # Prompts and decode rows take the same instructions.
        assert not {"paged_decode", "gated_delta_prefill", "state_space_prefill"} & set(counts)
        assert "add_expert_rows" not in counts
        assert "all-reduce(" not in text or tp <= 2
        sums.append(sums_by_xla(text))
    assert sums[0], "norms at least"
    assert sums[0] == sums[1]


@pytest.mark.parametrize("generation", generations("v5e"))
def test_attention_of_all_rows_compiles_in_place_and_soon(generation: str, tpu_mesh: Any) -> None:
    shape = Shape()
    sizes = shape.kv_heads, shape.group, shape.head_dim, shape.page_size
    attend = partial(prefill_attention, blocks=invariant_blocks(*sizes, shape.dtype))
    compiled, seconds, changed, _ = compile_attention(attend, shape, tpu_mesh(generation))
    assert num_kernels(compiled) == 1
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes(changed)
    assert seconds < MAX_COMPILE_S


@pytest.mark.parametrize("generation", generations("v5e"))
def test_a_product_with_one_zero_point_for_each_output_compiles(
    generation: str, tpu_mesh: Any
) -> None:
    inputs, outputs, scheme = 4096, 4096, Scheme("int4", has_zero_points=True)

    def multiply(x: Any, values: Any, scales: Any, zero_points: Any, layer: Any) -> Any:
        own = QuantizedArrays(values, scales, zero_points, None)
        return tpu_quantized_matmul(x, own, layer, scheme, is_invariant=True)

    parts = [(jnp.int4, inputs), (jnp.float32, 1), (jnp.int4, 1)]
    compiled, seconds = compile_on(
        tpu_mesh(generation),
        multiply,
        struct(jnp.bfloat16, TPU_BLOCK_ROWS, inputs),
        *(struct(dtype, 2, rows, outputs) for dtype, rows in parts),
        struct(jnp.int32),
    )
    assert num_kernels(compiled) == 1
    assert seconds < MAX_COMPILE_S


@pytest.mark.long
@pytest.mark.parametrize("generation", ["v6e"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_wide_inputs_fit_vector_memory(
    generation: str, dtype: Any, tpu_mesh: Any
) -> None:
    inputs, outputs = (28_672 if dtype == jnp.float32 else 43_008), 256
    compiled, seconds = compile_on(
        tpu_mesh(generation),
        partial(multiply_rows, transposed=False, dtype=dtype),
        struct(dtype, 4 * TPU_BLOCK_ROWS, inputs),
        struct(dtype, 2, inputs, outputs),
        struct(jnp.int32),
    )
    assert num_kernels(compiled) == 2  # with the plan of visits
    assert seconds < 6 * MAX_COMPILE_S


@pytest.mark.long
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_kernels_of_the_mode_and_sum_alike(name: str, generation: str) -> None:
    check(name, TOPOLOGIES[generation])
