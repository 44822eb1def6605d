"""Kernels and steps of published recipes, and of drawn models, compile for their chips."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_jax.planner.arguments import PlanRequest, Workload
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh
from tests.tpu.kernel_calls import KernelCall, calls_of_recipe
from tests.tpu.recipes import RECIPES, Recipe

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(),
    reason="libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler",
)

MAX_KERNEL_S = 60  # latent attention; others take a few seconds
BY_DEFAULT = "qwen3-14b-awq-v6e-1-dp1-tp1"
_compiled: set[tuple[str, str]] = set()  # generations and keys: many recipes share shapes


def compile_calls(recipe: Recipe, calls: dict[str, KernelCall], tpu_mesh) -> list[str]:
    """Compile each call for the recipe's chip, and return what failed."""
    generation, failures = Topology.parse(recipe.topology).generation, []
    for key, call in calls.items():
        if (generation, key) in _compiled:
            continue
        shapes = ", ".join(f"{own.dtype.name}{list(own.shape)}" for own in call.arrays)
        try:
            seconds = call.compile_for(tpu_mesh(generation))
        except Exception as error:  # of the compiler, of any type
            failures.append(f"{call.name}({shapes}): {str(error)[:300]}")
            continue
        _compiled.add((generation, key))
        if seconds > MAX_KERNEL_S:
            failures.append(f"{call.name}({shapes}): {seconds:.0f} s")
    return failures


def test_the_table_covers_four_generations_with_at_least_forty_recipes() -> None:
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES) >= 40
    generations = [Topology.parse(recipe.topology).generation for recipe in RECIPES]
    assert all(generations.count(name) >= 7 for name in ("v5e", "v6e", "v5p", "tpu7x"))
    for recipe in RECIPES:
        Topology.parse(recipe.topology).check_mesh(recipe.dp, recipe.tp)


# By default test_activations_compile has the kernels of 8-bit activations.
def test_the_products_of_a_recipe_of_4_bits_compile(tpu_mesh) -> None:
    recipe = next(own for own in RECIPES if own.name == BY_DEFAULT)
    calls = calls_of_recipe(recipe)
    products = {key: own for key, own in calls.items() if own.name == "multiply_quantized"}
    smallest = min(products, key=lambda key: products[key].arrays[0].size)
    assert len(products) == 8
    assert compile_calls(recipe, {smallest: products[smallest]}, tpu_mesh) == []


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda own: own.name)
def test_every_kernel_of_a_recipe_compiles(recipe, tpu_mesh) -> None:
    calls = calls_of_recipe(recipe)
    assert len(calls) >= 2
    assert compile_calls(recipe, calls, tpu_mesh) == []


# Kernels of all kinds, with two layers of the published widths.
_TWO_LAYERS = (("num_hidden_layers", 2),)
ANY_KIND = {
    "heads": Recipe("", "qwen3-8b", "v5e-1", 1, sizes=_TWO_LAYERS),
    "int8": Recipe("", "qwen3-8b", "v5e-1", 1, quantization="int8", sizes=_TWO_LAYERS),
    "w8a8": Recipe("", "qwen3-8b", "v5e-1", 1, quantization="w8a8_int8", sizes=_TWO_LAYERS),
    "groups": Recipe("", "qwen3-8b", "v5e-1", 1, checkpoint="awq", sizes=_TWO_LAYERS),
    "experts": Recipe("", "qwen3-30b-a3b", "v6e-1", 1, sizes=_TWO_LAYERS),
    "sinks and MXFP4": Recipe("", "gpt-oss-20b", "v6e-1", 1, sizes=_TWO_LAYERS),
    "latents": Recipe("", "deepseek-v2-lite", "v5p-2", 1, sizes=_TWO_LAYERS),
    "states": Recipe("", "qwen3-next-80b-a3b", "tpu7x-8", 8, sizes=(("num_hidden_layers", 4),)),
    "scattered experts": Recipe("", "qwen3-30b-a3b", "v6e-4", 2, dp=2, ep=4, sizes=_TWO_LAYERS),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        pytest.param(kind, rows, marks=pytest.mark.long)
        for kind in ANY_KIND
        for rows in (3, 37, 100, 161)
    ],
)
def test_kernels_compile_for_any_number_of_rows(kind, rows, tpu_mesh) -> None:
    recipe = ANY_KIND[kind]._replace(rows=rows * ANY_KIND[kind].dp, chunk=509)
    assert compile_calls(recipe, calls_of_recipe(recipe), tpu_mesh) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda own: own.name)
def test_the_steps_of_a_recipe_fit_their_chips(recipe, step) -> None:
    topology = Topology.parse(recipe.topology)
    request = PlanRequest(recipe.args, recipe.config, topology, Workload(1024, 1024))
    memory = plan_memory(request)
    assert memory.fits
    assert memory.kv_tokens >= 2048
    pages = tuple(num + 1 for num in memory.pool_pages)
    mesh = topology_mesh(topology, recipe.dp, recipe.tp)
    engine = engine_programs(recipe.args, recipe.config, mesh, pages)
    decode, mixed = engine.config.buckets.first
    cost = program_cost(engine.programs.compile_step(decode if step == "decode" else mixed))
    assert cost.resident_bytes < topology.chip.usable_hbm_bytes


@st.composite
def drawn_recipes(draw: st.DrawFn) -> Recipe:
    """A dense model or one of experts, of any sizes that a mesh can share."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16]))
    kv_heads = max(kv_heads, tp) if kv_heads % tp else kv_heads
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8]))
    sizes = {
        "hidden_size": 128 * draw(st.integers(4, 64)),
        "num_hidden_layers": 2,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([64, 128, 256])),
    }
    has_experts = draw(st.booleans())
    if has_experts:
        sizes |= {
            "moe_intermediate_size": 64 * tp * draw(st.integers(1, 24)),
            "num_experts": 8 * draw(st.integers(1, 32)),
            "num_experts_per_tok": draw(st.integers(1, 8)),
        }
    else:
        sizes["intermediate_size"] = 128 * tp * draw(st.integers(2, 160 // tp))
    quantization = ["none", "int8"] if has_experts else ["none", "int8", "w8a8_int8", "w8a8_fp8"]
    generation = draw(st.sampled_from(["v5e", "v6e", "v5p", "tpu7x"]))
    return Recipe(
        *("drawn", "qwen3-30b-a3b" if has_experts else "qwen3-8b"),
        next(own.name for own in Topology.all_of(generation) if own.num_devices >= tp),
        tp,
        quantization=draw(st.sampled_from(quantization)),
        rows=draw(st.integers(1, 256)),
        chunk=draw(st.sampled_from([256, 512, 1024, 2048, 4096])),
        sizes=tuple(sizes.items()),
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(recipe=drawn_recipes())
def test_kernels_of_drawn_models_compile(recipe, tpu_mesh) -> None:
    assert compile_calls(recipe, calls_of_recipe(recipe), tpu_mesh) == []
