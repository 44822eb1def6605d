"""What is advised, of plans put together by hand; and the command that serves what was planned."""

import pytest

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.planner.advice import advise
from sgl_jax.planner.arguments import SERVER_SETTINGS, parse_plan_request
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.estimate import Estimate, StepEstimate, device_bytes
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import ProgramCost
from sgl_jax.planner.report import serve_command
from sgl_jax.planner.step_time import StepTime
from sgl_jax.planner.topology import has_tpu_compiler, topology_mesh

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

LLAMA = ["--model-path", "llama-3.1-8b", "--topology", "v6e-8"]


def crowded_plan(*words):
    """A plan whose memory holds fewer requests than may run."""
    return plan_of(*words, concurrency=1)


def plan_of(*words, concurrency=256, exposed_s=0.0):
    """A plan of a decode step of a second, bound by memory."""
    request = parse_plan_request([*LLAMA, *words])
    time = StepTime(
        *(1.0, 1.0, 1.0),
        heads_s=0.0,
        attention_s=0.0,
        recurrences_s=0.0,
        experts_s=0.0,
        lines_s=0.0,
        quantized_s=0.0,
        collectives_s=exposed_s,
        exposed_s=exposed_s,
        bound="HBM",
    )
    rows = request.args.max_running_requests or concurrency
    step = StepEstimate(rows, rows, ProgramCost(0, 0, 0, 0, 0, 0, (), ()), time)
    return Estimate(request, plan_memory(request), step, step, concurrency, 1.0, 1.0)


@pytest.mark.parametrize(
    ("mesh", "advice"),
    [
        (["--dp-size", "1", "--tp-size", "4"], "more --tp-size"),  # four devices are idle
        (["--dp-size", "2", "--tp-size", "4"], "more --tp-size"),  # of the other rank
        (["--dp-size", "1", "--tp-size", "8"], "a larger slice"),  # one device for each KV head
    ],
)
def test_a_rank_gets_more_devices_only_where_there_are_some_and_heads_to_split(mesh, advice):
    (line,) = (line for line in advise(crowded_plan(*mesh)) if "may run" in line)
    assert f"may run: {advice}, or a larger --mem-fraction-static" in line


@pytest.mark.parametrize(
    ("words", "share", "advice"),
    [
        (["--tp-size", "4"], 0.0, "4 devices of the slice are idle: raise --dp-size or --tp-size"),
        (["--model-path", "qwen3-30b-a3b", "--tp-size", "8"], 0.0, "more than the model's 4 KV"),
        (["--tp-size", "8", "--input-len", "100", "--output-len", "60"], 0.0, "a smaller --page-"),
        (["--tp-size", "8"], 0.4, "collectives take 40% of a decode step: less --tp-size"),
        (["--tp-size", "8", "--max-running-requests", "16"], 0.0, "a larger --max-running-req"),
        (["--tp-size", "8"], 0.0, "fits on fewer chips: v6e-1 with --dp-size 1 --tp-size 1"),
    ],
)
def test_what_stands_out_is_said(words, share, advice):
    lines = advise(plan_of(*words, exposed_s=share))
    assert sum(advice in line for line in lines) == 1


def test_of_a_plan_that_uses_its_slice_well_nothing_is_said():
    assert advise(plan_of("--model-path", "llama-3.3-70b", "--tp-size", "8")) == []


def test_the_serve_command_starts_the_engine_that_was_planned():
    words = ["--tp-size", "8", "--max-total-tokens", "65536", "--dtype", "float32"]
    request = parse_plan_request([*LLAMA, *words])
    command = serve_command(request)
    assert command.startswith("sgl-jax serve --model-path llama-3.1-8b --dp-size 1")
    served = parse_server_args(command.split()[2:])
    for name in SERVER_SETTINGS:
        assert getattr(served, name) == getattr(request.args, name)


def test_layers_that_are_split_over_ranks_are_read_whole():
    def read(*words):
        request = parse_plan_request([*LLAMA, "--dp-size", "4", "--tp-size", "2", *words])
        mesh = topology_mesh(request.topology, 4, 2)
        engine = engine_programs(request.args, request.config, mesh, (64,))
        return device_bytes(engine, request)

    whole, split = read(), read("--weight-sharding", "data")
    assert split == whole
