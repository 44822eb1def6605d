"""Layers are cut into scan segments that give them all back in order, and few to compile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.scan_segments import ScanSegment, find_scan_segments
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" * 80, [ScanSegment(0, 1, 80)]),
        ("ab" * 12, [ScanSegment(0, 2, 12)]),
        ("aaaaab" * 4 + "aa", [ScanSegment(0, 6, 4), ScanSegment(24, 1, 2)]),
        ("a" + "b" * 47, [ScanSegment(0, 1, 1), ScanSegment(1, 1, 47)]),
        ("abababaaa", [ScanSegment(0, 2, 3), ScanSegment(6, 1, 3)]),
        ("", []),
    ],
)
def test_scan_segments_of_known_models(kinds, expected):
    assert list(find_scan_segments(kinds)) == expected


def least_sum(kinds):
    """Of periods, by trying every first segment."""
    if not kinds:
        return 0
    return min(
        period + least_sum(kinds[period * repeats :])
        for period in range(1, len(kinds) + 1)
        for repeats in range(1, len(kinds) // period + 1)
        if kinds[: period * repeats] == kinds[:period] * repeats
    )


@given(st.text("abc", max_size=9))
def test_any_layers_come_back_in_order_from_the_fewest(kinds):
    scan_segments = find_scan_segments(kinds)
    run = []
    for segment in scan_segments:
        for turn in range(segment.repeats):
            for position in range(segment.period):
                run.append(segment.layers_like(position)[turn])
                assert kinds[run[-1]] == kinds[segment.first + position]
    assert run == list(range(len(kinds)))
    assert sum(segment.period for segment in scan_segments) == least_sum(kinds)


def program_lines(num_layers):
    """Of a step of a model with a dense layer and one with experts in turn, before compilation."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
        }
    )
    # On a CPU, each layer has matrices of its own.
    mesh = topology_mesh(Topology.parse("v6e-1"), 1, 1)
    engine = engine_programs(ServerArgs(max_running_requests=2), config, mesh, (9,))
    lowered = engine.programs.lower_step(engine.config.buckets.all[0])
    return lowered.as_text().count("\n")


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed")
def test_a_program_does_not_grow_with_depth():
    assert program_lines(12) < 1.01 * program_lines(4)
