"""Whole steps of published models, compiled for real slices: they fit, and nothing is copied.

The steps are those the executor runs (`executor/programs.py`), with as many KV pages as the chip
has room for. `pytest -rP` prints the cost of a step: docs/measurements/planning.md has a table.
"""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax import lax

import sgl_jax.planner
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS
from sgl_jax.kernels.expert_dispatch.tpu.moves import ADD_NAME, GATE_NAME, GATHER_NAME
from sgl_jax.kernels.expert_dispatch.tpu.routing import CHOOSE_NAME, SORT_NAME
from sgl_jax.kernels.grouped_matmul.tpu import NAME, PLAN_NAME
from sgl_jax.kernels.qkv_heads import NORMALISED_NAME, PLAIN_NAME
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.layers.sampling.sample import BLOCK_ROWS
from sgl_jax.models.placement import bytes_per_device
from sgl_jax.models.served import served_config
from sgl_jax.planner.arguments import PlanRequest, Workload, read_config
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.kernel_time import heads_time
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.step_time import collective_time
from sgl_jax.planner.topology import GIB, Topology, has_tpu_compiler, topology_mesh
from tests.tpu.compiling import lower_on, struct
from tests.tpu.copies import copies, pools_of, shapes_kept

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(),
    reason="libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler",
)

MODELS = Path(sgl_jax.planner.__file__).parent / "models"
ROWS = 128  # of a rank
CHUNK = 2048
CONTEXT = 4096
# Shapes of steps: decode rows alone; decode rows and a prefill chunk.
STEPS = ("decode", "mixed")

# Model, slice, dp, tp, layers and shape: all layers, or fewer where the slice has not the memory.
# The loop over layers is compiled once either way. Each kind of model has each generation, and its
# two shapes, one chip and several.
LAYOUTS = (
    ("llama-3.1-8b", "v5e-4", 1, 4, None, "decode"),
    ("llama-3.1-8b", "v5e-4", 2, 2, None, "mixed"),
    ("llama-3.1-8b", "v5p-2", 1, 1, None, "mixed"),
    ("llama-3.1-8b", "v6e-1", 1, 1, None, "decode"),
    ("llama-3.3-70b", "v6e-8", 1, 8, None, "mixed"),
    ("llama-3.1-8b", "tpu7x-2", 1, 1, None, "decode"),
    ("gemma-3-1b", "v5e-1", 1, 1, None, "mixed"),
    ("gemma-3-27b", "v5p-2", 1, 1, None, "decode"),
    ("gemma-3-27b", "v6e-4", 1, 4, None, "decode"),
    ("gemma-3-27b", "tpu7x-2", 1, 2, None, "mixed"),
    ("gemma-4-e2b", "v6e-1", 1, 1, None, "decode"),
    ("gemma-4-e2b", "tpu7x-2", 1, 1, None, "mixed"),
    ("gemma-4-26b-a4b", "v6e-4", 1, 4, None, "mixed"),
    ("gemma-4-26b-a4b", "tpu7x-2", 1, 1, None, "decode"),
    ("gemma-4-31b", "v6e-4", 1, 4, None, "decode"),
    ("gemma-4-31b", "tpu7x-2", 1, 2, None, "mixed"),
    ("gpt-oss-20b", "v5e-8", 1, 8, None, "decode"),
    ("gpt-oss-120b", "v5p-8", 1, 4, None, "mixed"),
    ("gpt-oss-120b", "v6e-16", 1, 16, None, "decode"),
    ("gpt-oss-20b", "tpu7x-2", 1, 1, None, "mixed"),
    ("smollm3-3b", "v6e-1", 1, 1, None, "decode"),
    ("smollm3-3b", "tpu7x-2", 1, 1, None, "mixed"),
    ("ministral-3-8b", "v6e-1", 1, 1, None, "mixed"),
    ("ministral-3-8b", "tpu7x-2", 1, 1, None, "decode"),
    ("seed-oss-36b", "v6e-4", 1, 4, None, "decode"),
    ("seed-oss-36b", "tpu7x-2", 1, 2, None, "mixed"),
    ("qwen3-8b", "v6e-1", 1, 1, None, "decode"),
    ("qwen3-32b", "v6e-8", 1, 8, None, "mixed"),
    ("qwen3-30b-a3b", "v5e-1", 1, 1, 4, "decode"),
    ("qwen3-30b-a3b", "v5p-8", 1, 4, None, "mixed"),
    ("qwen3-30b-a3b", "v6e-1", 1, 1, 16, "mixed"),
    ("qwen3-30b-a3b", "v6e-4", 1, 4, None, "decode"),
    ("qwen3-30b-a3b", "tpu7x-2", 1, 1, None, "mixed"),
    ("qwen3-next-80b-a3b", "v5e-8", 1, 8, 24, "mixed"),
    ("qwen3-next-80b-a3b", "v5p-8", 1, 4, None, "decode"),
    ("qwen3-next-80b-a3b", "v6e-8", 1, 8, None, "mixed"),
    ("qwen3-next-80b-a3b", "tpu7x-8", 1, 8, None, "decode"),
    ("glm-4.5-air", "v6e-8", 1, 8, 32, "decode"),
    ("glm-4.5-air", "tpu7x-8", 1, 8, None, "mixed"),
    ("granite-4.0-h-small", "v6e-4", 1, 4, None, "mixed"),
    ("nemotron-3-nano-30b-a3b", "tpu7x-2", 1, 1, None, "decode"),
)


def _cases():
    for layout in LAYOUTS:
        model, topology, dp, tp, _, step = layout
        name = f"{model}-{topology}-dp{dp}-tp{tp}-{step}"
        yield pytest.param(*layout, id=name, marks=pytest.mark.long)


def _compile(
    model,
    topology_name,
    dp,
    tp,
    step,
    layers=None,
    rows=ROWS,
    draws=True,
    vocab_size=None,
    **settings,
):
    """The engine on paper, its step as the compiler made it, and the bucket of that.

    Without `draws`, the step ends with the logits: the compiler takes most of its time for draws,
    and less where `vocab_size` and the rows are fewer than the model's and a chip's.
    """
    args = ServerArgs(
        model_path=model,
        dp_size=dp,
        tp_size=tp,
        page_size=128,
        max_running_requests=rows * dp,
        chunked_prefill_size=CHUNK,
        context_length=CONTEXT,
        **settings,
    )
    topology = Topology.parse(topology_name)
    config = served_config(read_config(model), args)
    config = dataclasses.replace(
        config, layers=layers or config.layers, vocab_size=vocab_size or config.vocab_size
    )
    request = PlanRequest(args, config, topology, Workload(1024, 1024))
    mesh = topology_mesh(topology, dp, tp)
    pool_pages = tuple(num + 1 for num in plan_memory(request).pool_pages)
    engine = engine_programs(args, request.config, mesh, pool_pages)
    buckets = engine.config.buckets
    bucket = {
        "decode": buckets.smallest(buckets.decode_tokens, rows),
        "several": buckets.smallest(buckets.decode_tokens, rows),
        "mixed": buckets.all[-1],
    }[step]
    programs = engine.programs
    if draws:
        compile_it = programs.compile_decode_steps if step == "several" else programs.compile_step
        return engine, compile_it(bucket), bucket
    programs.trace_halves(bucket)
    computing, _ = programs._traced_halves[bucket]
    options = programs._compiler_options(bucket)
    return engine, computing.compile(compiler_options=options), bucket


def _compiled_layers(engine):
    """The specifications of the layers of which the program has code, one for each copy of the
    code, and of those that run in no loop."""
    specs, outside = [], []
    in_turn = engine.config.build_options.unrolled_layers
    for segment in engine.placed.model.scan_segments:
        turns = min(max(1, in_turn // segment.period), segment.repeats)
        rest = segment.repeats % turns
        period = engine.config.model.layers[segment.first : segment.first + segment.period]
        specs += period * (turns + rest)
        # A loop of one turn is none.
        outside += period * (segment.repeats if segment.repeats // turns == 1 else rest)
    return specs, outside


def _expected_kernels(engine, is_normal, num_tokens):
    """How often the program has each of a layer's kernels."""
    model = engine.config.model
    specs, _ = _compiled_layers(engine)
    expected: Counter[str] = Counter()
    for spec in specs:
        if spec.recurrence is not None:
            kind = "gated_delta" if spec.state_space is None else "state_space"
            expected.update(["causal_conv", f"{kind}_decode", f"{kind}_prefill"])
        elif spec.has_attention:
            expected.update(["paged_decode", "paged_prefill"])
            expected.update(["paged_write"] * (spec.cache_source is None))
            if model.head_dim % LANES == 0:
                expected.update([NORMALISED_NAME if is_normal else PLAIN_NAME])
        if spec.moe is not None:
            is_gated = model.activation != "relu2"
            expected.update([NAME] * (2 + is_gated) + [PLAN_NAME, CHOOSE_NAME])
            if num_tokens <= UNDIVIDED_TOKENS:
                expected.update([SORT_NAME, GATHER_NAME, ADD_NAME] + [GATE_NAME] * is_gated)
    return expected


def _print_figures(cost, heads_s, chip):
    exchange_s = sum(collective_time(collective, chip) for collective in cost.collectives)
    print(
        f"program {cost.estimated_cycles / chip.clock_hz * 1e3:.2f} ms, heads "
        f"{heads_s * 1e3:.2f} ms, collectives {exchange_s * 1e3:.2f} ms, "
        f"temporaries {cost.temp_bytes / 2**20:.0f} MiB"
    )
    for collective in cost.collectives:
        if collective.group_size > 1:
            print(collective)


@pytest.mark.parametrize(("model", "topology", "dp", "tp", "layers", "step"), list(_cases()))
def test_a_step_fits_its_chip_copies_nothing_and_exchanges_no_more_than_it_must(
    model, topology, dp, tp, layers, step
):
    specs = read_config(model).layers[:layers]
    engine, program, bucket = _compile(model, topology, dp, tp, step, specs)
    cost, config = program_cost(program), engine.config.model
    chip = Topology.parse(topology).chip
    pool_bytes = bytes_per_device(pools_of(engine))
    heads = heads_time(bucket.tokens, config, 2, tp, chip)
    _print_figures(cost, heads.total_s, chip)

    assert cost.resident_bytes < chip.usable_hbm_bytes
    assert pool_bytes > chip.usable_hbm_bytes / 5  # a pool worth the name
    assert cost.alias_bytes >= pool_bytes
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    assert cost.temp_bytes < GIB
    if step == "decode":  # logits, which several chips share, what is drawn from, and little else
        # A head that is the embedding gives them by columns: drawing then begins with a copy.
        rows_of_logits = ROWS * (1 + config.tie_word_embeddings) + 6 * BLOCK_ROWS
        assert cost.temp_bytes < 4 * config.vocab_size * rows_of_logits + 48 * 2**20
    _, outside = _compiled_layers(engine)
    is_normal = model.startswith(("qwen3", "gemma"))
    assert Counter(cost.kernels) == _expected_kernels(engine, is_normal, bucket.tokens)
    assert cost.estimated_cycles > 0

    exchanges: Counter[tuple[str, bool]] = Counter()
    for collective in cost.collectives:
        if collective.group_size > 1:
            exchanges[collective.kind, collective.in_loop] += collective.times
    if tp == 1:
        assert exchanges == {}
        return
    assert {c.group_size for c in cost.collectives if c.num_bytes > 4} == {tp}
    in_layers = [c for c in cost.collectives if c.kind == "all-reduce" and c.in_loop]
    # Attention's output and the feed-forward layer's, of all tokens, in bfloat16.
    activations = bucket.tokens * config.hidden_size * 2
    sizes = {activations}
    if model.startswith("gemma-4") and config.moe:  # a dense layer and experts, in one exchange
        sizes.add(2 * activations)
    assert {c.num_bytes for c in in_layers} == sizes
    expected = {
        ("all-reduce", True): 2 * (config.num_layers - len(outside)),
        # The embedding; and, of several ranks, a flag: whether one of them needs rows of logits.
        ("all-reduce", False): 2 * len(outside) + 1 + (dp > 1),
        ("all-gather", False): 1,  # each chip's best token of its slice of the vocabulary
    }
    # Sums of squares: the output of a state-space layer is normalized over all chips' channels.
    spaces = [
        sum(spec.state_space is not None for spec in each) for each in (config.layers, outside)
    ]
    expected["all-gather", False] += spaces[1]
    expected["all-gather", True] = spaces[0] - spaces[1]
    assert exchanges == Counter(expected)


def _several_steps(model, topology, tp, layers, rows=64, **settings):
    """The cost of a launch of several decode steps, whose program copies nothing."""
    engine, program, bucket = _compile(
        model, topology, 1, tp, "several", layers, rows=rows, **settings
    )
    cost = program_cost(program)
    assert cost.alias_bytes >= bytes_per_device(pools_of(engine))
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    return cost


def test_several_decode_steps_in_a_launch_copy_nothing():
    layers = read_config("llama-3.1-8b").layers[:2]
    _several_steps("llama-3.1-8b", "v6e-1", 1, layers, rows=8, vocab_size=4096)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "topology", "tp", "layers"),
    [
        ("llama-3.1-8b", "v6e-1", 1, None),
        ("llama-3.3-70b", "v6e-8", 8, None),
        ("gemma-3-27b", "v6e-4", 4, None),
        ("gpt-oss-20b", "tpu7x-2", 1, None),
        pytest.param(
            *("qwen3-30b-a3b", "v5e-1", 1, 4),
            marks=pytest.mark.xfail(strict=True, reason="a step takes 2.4 % longer"),
        ),
    ],
)
def test_several_decode_steps_in_a_launch_take_no_longer(model, topology, tp, layers):
    specs = read_config(model).layers[:layers]
    _, program, _ = _compile(model, topology, 1, tp, "decode", specs, rows=64)
    one, several = program_cost(program), _several_steps(model, topology, tp, specs)
    print(f"one step {one.estimated_cycles} cycles, one of several {several.estimated_cycles}")
    assert several.temp_bytes < 1.1 * one.temp_bytes + 2**20
    # The loop's trip count is not in the program, so its body counts once.
    assert several.estimated_cycles <= 1.01 * one.estimated_cycles
    assert set(several.kernels) == set(one.kernels)


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("model", "topology", "tp"),
    [
        ("llama-3.1-8b", "v6e-1", 1),
        ("llama-3.3-70b", "v6e-8", 8),
        ("qwen3-next-80b-a3b", "v6e-8", 8),
    ],
)
def test_a_layer_that_drafts_copies_nothing(model, topology, tp, step, tmp_path):
    drafts = {"speculative_algorithm": "MTP", "speculative_num_draft_tokens": 3}
    if model.startswith("llama"):
        config = json.loads((MODELS / f"{model}.json").read_text())
        config |= {"num_hidden_layers": 1, "draft_vocab_size": 32000}
        (tmp_path / "config.json").write_text(json.dumps(config))
        head = {"speculative_draft_model_path": str(tmp_path)}
        drafts |= {"speculative_algorithm": "EAGLE3"} | head
    engine, program, bucket = _compile(model, topology, 1, tp, step, **drafts)
    cost, chip = program_cost(program), Topology.parse(topology).chip
    _print_figures(cost, 0.0, chip)
    assert cost.resident_bytes < chip.usable_hbm_bytes
    assert cost.alias_bytes >= bytes_per_device(pools_of(engine))
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    assert cost.temp_bytes < GIB
    # All queries' KV is written without attention, which would be dropped.
    kernels = Counter(cost.kernels)
    assert kernels["paged_write"] == kernels["paged_decode"] + 1


@pytest.mark.parametrize(
    ("model", "quantization", "slice_name", "tp", "ep", "phase"),
    [
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("llama-3.3-70b", "int8", "v6e-8", 8, 1, "decode"),
            ("llama-3.3-70b", None, "v6e-8", 8, 1, "mixed"),
            ("llama-3.3-70b", "w8a8_int8", "v6e-8", 8, 1, "mixed"),
            ("qwen3-32b", "int8", "v5e-8", 8, 1, "mixed"),
            ("qwen3-32b", "w8a8_fp8", "tpu7x-8", 8, 1, "mixed"),
            ("gemma-3-27b", None, "v6e-4", 4, 1, "mixed"),
            ("qwen3-30b-a3b", None, "v6e-4", 4, 4, "decode"),
            ("qwen3-30b-a3b", "int8", "v6e-4", 4, 4, "mixed"),
        )
    ],
)
def test_sequence_parallel_layers_gather_and_scatter_twice(
    model, quantization, slice_name, tp, ep, phase
):
    layers = read_config(model).quantized(quantization).layers[:2]
    settings = {"hidden_sharding": "tensor", "ep_size": ep, "draws": False}
    engine, program, bucket = _compile(model, slice_name, 1, tp, phase, layers, **settings)
    cost = program_cost(program)
    _print_figures(cost, 0.0, Topology.parse(slice_name).chip)
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    hidden = bucket.tokens * engine.config.model.hidden_size * 2
    exchanges = Counter[str]()
    for own in cost.collectives:
        if own.num_bytes > hidden // 16:
            exchanges[own.kind] += own.times
    # And a sum after the embedding, and all tokens after the last norm.
    assert exchanges == dict.fromkeys(("all-gather", "reduce-scatter"), 2 * len(layers) + 1)


def test_weights_that_a_loop_wants_in_other_tiles_are_found_as_copies():
    mesh = topology_mesh(Topology.parse("tpu7x-2"), 1, 1)
    weights = struct(jnp.bfloat16, 4, 2048, 2048)

    def layers(x, weights):
        return lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]

    def found(options):
        lowered = lower_on(mesh, layers, struct(jnp.bfloat16, 64, 2048), weights)
        text = lowered.compile(compiler_options=options).as_text()
        return copies(text, {weights.shape, weights.shape[1:]}, num_tokens=64)

    assert found({"xla_tpu_control_large_2nd_minor_layout_for_x16": False}) == []
    assert "bf16[4,2048,2048]" in " ".join(found({}))


# Model, slice, dp, tp, ep, copies, shape: whole experts over a rank, and over ranks.
DEALT_OUT = (
    ("qwen3-30b-a3b", "v6e-4", 1, 4, 4, 0, "decode"),
    ("qwen3-30b-a3b", "v5e-4", 2, 2, 4, 0, "mixed"),
    ("qwen3-30b-a3b", "v6e-4", 2, 2, 4, 0, "decode"),
    ("qwen3-30b-a3b", "v6e-4", 2, 2, 4, 0, "mixed"),
    ("qwen3-30b-a3b", "v5p-8", 4, 1, 4, 0, "decode"),
    ("qwen3-30b-a3b", "tpu7x-8", 2, 2, 4, 0, "mixed"),
    ("gpt-oss-20b", "v6e-4", 2, 2, 4, 0, "decode"),
    ("qwen3-next-80b-a3b", "v6e-8", 1, 8, 8, 0, "mixed"),
    ("qwen3-30b-a3b", "v6e-4", 1, 4, 4, 8, "mixed"),
    ("qwen3-30b-a3b", "v6e-4", 2, 2, 4, 8, "decode"),
)


@pytest.mark.long
@pytest.mark.parametrize("case", DEALT_OUT, ids=str)
def test_distributed_experts_are_not_copied_and_ranks_exchange_tokens_alone(case):
    model, topology_name, dp, tp, ep, num_copies, step = case
    layers, settings = read_config(model).layers[:4], {"ep_num_redundant_experts": num_copies}
    engine, program, bucket = _compile(
        model, topology_name, dp, tp, step, layers, ep_size=ep, **settings
    )
    cost, config = program_cost(program), engine.config.model
    _print_figures(cost, 0.0, Topology.parse(topology_name).chip)
    experts = [own for own in engine.placed.declared.values() if own.read == "experts"]
    for own in experts:
        shard = own.array.sharding.shard_shape(own.array.shape)
        assert shard[1] == (config.moe.num_experts + num_copies) // ep
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    assert cost.temp_bytes < GIB
    if ep > tp:
        gathered = [c for c in cost.collectives if c.kind == "all-gather" and c.group_size == dp]
        tokens = dp * bucket.tokens * config.hidden_size * 2
        assert tokens in {c.num_bytes for c in gathered}
        assert max(c.num_bytes for c in gathered) == tokens


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_a_cache_of_8_bits_is_neither_copied_nor_converted(step):
    settings = {"kv_cache_dtype": "fp8_e4m3"}
    engine, program, bucket = _compile("llama-3.1-8b", "v6e-1", 1, 1, step, **settings)
    cost = program_cost(program)
    assert cost.alias_bytes >= bytes_per_device(pools_of(engine))
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    assert cost.temp_bytes < GIB


@pytest.mark.long
def test_unlike_layers_are_compiled_once_for_a_turn_and_nothing_is_copied():
    sparse = read_config("qwen3-30b-a3b").layers[0]
    dense = dataclasses.replace(sparse, moe=None)
    layers = (dense, sparse) * 22 + (dense,) * 4
    engine, program, bucket = _compile("qwen3-30b-a3b", "v6e-4", 1, 4, "decode", layers)
    cost = program_cost(program)
    assert cost.alias_bytes >= bytes_per_device(pools_of(engine))
    assert copies(program.as_text(), shapes_kept(engine), bucket.tokens) == []
    assert cost.temp_bytes < engine.config.logit_bytes
    # Of a loop over pairs two in a turn, and the four that follow; half of a pair has experts.
    specs, outside = _compiled_layers(engine)
    assert (len(specs), len(outside)) == (4 + 4, 4)
    kernels = Counter(cost.kernels)
    assert kernels["paged_decode"] == 4 + 4
    assert kernels[NAME] == 3 * 2
    exchanges = sum(c.times for c in cost.collectives if c.kind == "all-reduce")
    assert exchanges == 2 * len(layers) + 1  # the embedding's, too


# Model, slice, dp, tp, drafts of a row and shape, with experts over all chips.
WITH_LATENTS = (
    ("deepseek-v2-lite", "v6e-4", 4, 1, 0, "mixed"),
    ("deepseek-v3", "tpu7x-32", 32, 1, 0, "decode"),
    ("deepseek-v3", "tpu7x-32", 32, 1, 0, "mixed"),
    ("deepseek-v3", "tpu7x-32", 32, 1, 2, "decode"),
    ("deepseek-v3", "v6e-64", 8, 8, 0, "decode"),
    ("deepseek-v3.2", "v6e-64", 8, 8, 0, "decode"),
    ("deepseek-v3.2", "tpu7x-32", 4, 8, 0, "decode"),
    ("kimi-linear-48b-a3b", "v6e-4", 1, 4, 0, "mixed"),
    ("kimi-linear-48b-a3b", "tpu7x-2", 1, 2, 0, "decode"),
)
# Each step makes these of a layer of DeepSeek-V3 anew: up-projections for the kernel of a chunk,
# 0.1 % of its time, and the scales of eight experts' blocks in whole rows, 1 % of a decode step.
MADE_ANEW = {(128, 128, 512), (128, 512, 128), (8, 2048, 56)}


@pytest.mark.long
@pytest.mark.parametrize("case", WITH_LATENTS, ids=str)
def test_layers_with_latents_copy_neither_their_cache_nor_their_weights(case):
    model, topology_name, dp, tp, num_drafts, step = case
    settings = {"ep_size": dp * tp}
    if num_drafts:
        settings |= {"speculative_algorithm": "MTP", "speculative_num_draft_tokens": num_drafts}
    specs = read_config(model).layers
    first = next(layer for layer, spec in enumerate(specs) if spec.moe)
    # In a hybrid, recurrences come first.
    attending = next(n for n in range(first, len(specs)) if specs[n].recurrence is None)
    layers = specs[first - 1 : attending + 1]
    engine, program, bucket = _compile(model, topology_name, dp, tp, step, layers, **settings)
    cost = program_cost(program)
    _print_figures(cost, 0.0, Topology.parse(topology_name).chip)
    assert cost.alias_bytes >= bytes_per_device(pools_of(engine))
    anew = set(map(math.prod, MADE_ANEW))
    kept = {shape for shape in shapes_kept(engine) if math.prod(shape) not in anew}
    assert copies(program.as_text(), kept, bucket.tokens) == []
    # Hidden states of all ranks' tokens, their sums in float32, and these as they are exchanged.
    gathered = dp * bucket.tokens * engine.config.model.hidden_size * (2 + 4 + 2)
    assert cost.temp_bytes < GIB + gathered
    assert {"paged_write", "paged_decode", "paged_prefill"} <= set(cost.kernels)
