"""The planner's answers: a sweep of which one mesh fits, and models that do not fit."""

import dataclasses
import json

import pytest

from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.planner import __main__ as command
from sgl_jax.planner import sweep as sweep_module
from sgl_jax.planner import topology as topology_module
from sgl_jax.planner.advice import advise
from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.estimate import (
    DoesNotFitError,
    ExpertBalance,
    StepDoesNotFitError,
    expert_balance,
)
from sgl_jax.planner.memory import plan_memory, smallest_fit
from sgl_jax.planner.report import as_dict, as_text, balance_lines
from sgl_jax.planner.topology import has_tpu_compiler

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

# Too large for one device of 31.25 GiB, with heads that four cannot share.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LOAD = ["--input-len", "512", "--output-len", "256", "--max-running-requests", "16"]
STEPS = ["--chunked-prefill-size", "128", "--max-total-tokens", "65536"]
STEPS += ["--enable-hierarchical-cache"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def outcomes(model_path):
    """Of all meshes of four devices."""
    words = ["--model-path", model_path, "--topology", "v6e-4", "--sweep"]
    return sweep_module.sweep(parse_plan_request([*words, *LOAD, *STEPS]))


@pytest.fixture(scope="module")
def plan(outcomes):
    """Of the mesh that fits."""
    return outcomes[2, 2, 1]


def test_memory_is_divided_as_the_engine_does(plan):
    weights_bytes = 2 * (
        2 * 2048 * 4096 // 2  # embedding and head, half on each device
        + 96 * (4096 * (6 + 2 * 2) * 128 // 2 + 6 * 128 * 4096 // 2 + 3 * 4096 * 16384 // 2)
        + 96 * (2 * 4096 + 2 * 128)  # norms, whole on each
        + 4096
    )
    memory = plan.memory
    assert memory.weight_bytes == weights_bytes
    assert memory.kv_tokens == 65536
    assert memory.kv_token_bytes == 96 * 2 * 128 * 2  # K and V of a head
    assert memory.kv_bytes == (512 + 1) * 128 * memory.kv_token_bytes
    assert plan.decode.cost.argument_bytes >= weights_bytes + memory.kv_bytes


def test_the_load_fills_rows_or_memory(plan):
    assert plan.concurrency == 8  # 16 running requests over two ranks
    assert plan.max_context == 4096
    assert plan.decode.tokens == 8
    assert plan.prefill.tokens == 128
    rounds = plan.concurrency * 512 / 128 * plan.prefill.time.total_s
    rounds += 256 * plan.decode.time.total_s
    assert plan.requests_per_s == pytest.approx(2 * 8 / rounds)
    assert plan.output_tokens_per_s_per_chip == pytest.approx(plan.requests_per_s * 256 / 4)


def test_every_exchange_of_a_step_is_listed(plan):
    by_kind = {(c.kind, c.in_loop): c.times for c in plan.decode.cost.collectives}
    assert by_kind[("all-reduce", True)] == 192  # two a layer
    text = as_text(plan)
    assert "192 all-reduce of bf16[8,4096] over 2 devices in the layers" in text


def test_text_and_json_say_the_same(plan):
    text, values = as_text(plan), json.loads(json.dumps(as_dict(plan)))
    assert values["memory"]["kv_tokens"] == 65536
    assert "65,536 tokens a rank" in text
    assert f"{values['output_tokens_per_s']:,.0f} output tokens/s" in text
    assert f"expected {values['expected_output_tokens_per_s']:,.0f} output tokens/s" in text
    for line in values["assumptions"] + values["advice"]:
        assert line in text
    assert f"Serve with: {values['serve_command']}" in text


def test_the_balance_of_recorded_loads_is_reported(plan, tmp_path):
    assert "times the mean load" not in as_text(plan)
    assert as_dict(plan)["expert_balance"] is None
    # Of 128 experts on four devices, those of the first are chosen three times as often.
    file, loads = tmp_path / "loads.json", [[3] * 32 + [1] * 96] * 48
    file.write_text(json.dumps({"logical_count": loads}))
    words = ["--model-path", "qwen3-30b-a3b", "--topology", "v6e-4", "--tp-size", "4"]
    experts = ["--ep-size", "4", "--init-expert-location", str(file)]
    request = parse_plan_request([*words, *experts])
    balance = expert_balance(EngineConfig.resolve(request.args, request.config, "tpu"))
    assert balance == ExpertBalance(in_order=pytest.approx(2.0), placed=pytest.approx(1.0))  # type: ignore[arg-type]
    line = f"by {file} the device whose experts are chosen most has 1.00 times the mean load, "
    placed = dataclasses.replace(plan, request=request, balance=balance)
    assert balance_lines(placed) == [line + "2.00 times with experts in order"]


def test_what_windows_save_is_told_where_there_are_windows(plan):
    assert plan.requests_without_windows is None
    assert "every layer" not in as_text(plan)
    held = plan.memory.num_requests
    windowed = dataclasses.replace(plan, requests_without_windows=held // 2)
    told = f"{held:,} of these; if every layer kept every token {held // 2:,}"
    assert f"{told}, {held / (held // 2):.2f} times as many" in as_text(windowed)
    assert as_dict(windowed)["requests_without_windows"] == held // 2


def test_loading_a_prefix_is_compared_with_computing_it(plan):
    first, last = plan.loading.times
    assert (first.tokens, last.tokens) == (1024, 4096)
    token_bytes = 2 * plan.memory.kv_token_bytes  # on both devices, each with a link
    assert last.host_s == pytest.approx(4096 * token_bytes / (2 * 32e9))
    assert last.store_s == pytest.approx(last.host_s + 4096 * token_bytes / 3e9)
    # Chunks of 128 tokens; a longer prefix has more to attend to.
    assert first.compute_s == pytest.approx(8 * plan.prefill.time.total_s, rel=0.05)
    assert last.compute_s > 4 * first.compute_s
    assert plan.memory.host_tokens == 2 * 65536
    text, values = as_text(plan), json.loads(json.dumps(as_dict(plan)))
    assert "of 704.00 GiB, 131,072 tokens a rank beside 65,536" in text
    assert f"  4,096 tokens: from the host {last.host_s * 1e3:.2f} ms, from a store " in text
    assert "loading from the host is sooner than computing from 128 tokens on" in text
    assert values["prefix_loading"]["times"][1]["store_s"] == last.store_s
    assert " --enable-hierarchical-cache --max-running" in values["serve_command"]


def test_a_plan_comes_with_advice(plan):
    assert any("a larger --max-running-requests" in line for line in advise(plan))


def test_a_sweep_says_what_fits_what_does_not_and_what_cannot_be(outcomes, plan):
    assert list(outcomes) == [(4, 1, 1), (2, 2, 1), (1, 4, 1)]
    _, no_room, fits, no_heads = sweep_module.sweep_table(outcomes).splitlines()
    assert no_room.lstrip().startswith("4 x 1 weights and tables take 3")
    assert "leaves no page" in no_room
    assert no_heads.lstrip().startswith("1 x 4 ")
    assert "heads" in no_heads
    values = fits.split()
    assert values[:5] == ["2", "x", "2", f"{2 * plan.memory.kv_tokens:,}", "16"]
    assert float(values[5]) == pytest.approx(plan.decode.time.total_s * 1e3, abs=0.01)
    assert values[-1] == f"{plan.output_tokens_per_s_per_chip:,.0f}"


def test_a_sweep_deals_experts_out_to_all_chips_of_a_rank_or_of_the_slice(plan, monkeypatch):
    asked = []

    def estimate(request):
        args = request.args
        asked.append((args.dp_size, args.tp_size, args.ep_size))
        if args.ep_size == 1:
            raise DoesNotFitError("too large")
        return dataclasses.replace(plan, requests_per_s=args.dp_size * args.ep_size)

    monkeypatch.setattr(sweep_module, "make_estimate", estimate)
    request = parse_plan_request(["--model-path", "deepseek-v2-lite", "--topology", "v6e-4"])
    table = sweep_module.sweep_table(sweep_module.sweep(request)).splitlines()
    assert asked == [(4, 1, 1), (4, 1, 4), (2, 2, 1), (2, 2, 2), (2, 2, 4), (1, 4, 1), (1, 4, 4)]
    assert table[1].strip() == "4 x 1 too large"
    assert table[5].split()[:5] == ["2", "x", "2,", "ep", "4"]
    assert table[-1] == "Fastest: --dp-size 4 --tp-size 1 --ep-size 4"


def test_a_sweeps_plot_shows_the_meshes_that_fit(outcomes, model_path, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "sweep", lambda request: outcomes)
    words = ["--model-path", model_path, "--topology", "v6e-4", "--sweep"]
    assert command.main([*words, "--plot", str(tmp_path / "sweep.svg")]) == 0
    plot = (tmp_path / "sweep.svg").read_text()
    assert "<!-- 2 x 2 -->" in plot  # as text is written beside its outlines
    assert "4 x 1" not in plot


def test_a_sweep_as_json_has_a_line_for_each_mesh(outcomes, model_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "sweep", lambda request: outcomes)
    words = ["--model-path", model_path, "--topology", "v6e-4", "--sweep", "--json"]
    assert command.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["dp_size"], row["tp_size"], row["fits"]) for row in rows] == [
        (4, 1, False),
        (2, 2, True),
        (1, 4, False),
    ]
    assert rows[0]["reason"] == outcomes[4, 1, 1]
    assert rows[1]["output_tokens_per_s"] == outcomes[2, 2, 1].output_tokens_per_s


def test_a_model_that_does_not_fit_is_told_where_it_would(capsys):
    words = ["--model-path", "llama-3.3-70b", "--topology", "v6e-4", "--tp-size", "4"]
    assert command.main(words) == 1
    told = capsys.readouterr().out
    assert "Does not fit: weights and tables take" in told
    assert "Nearest that does: v6e-8 with --dp-size 1 --tp-size 8." in told
    assert command.main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_another_mesh_of_the_same_slice_is_the_nearest_if_it_fits(capsys):
    words = ["--model-path", "llama-3.3-70b", "--topology", "v6e-8", "--dp-size", "8"]
    assert command.main(words) == 1
    assert "Nearest that does: v6e-8 with --dp-size 1 --tp-size 8." in capsys.readouterr().out


def test_a_sweep_of_which_nothing_fits_plots_nothing_and_says_so(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["--model-path", "llama-3.3-70b", "--topology", "v6e-1", "--sweep"]
    assert command.main([*words, "--plot", str(tmp_path / "sweep.svg")]) == 1
    assert "weights and tables take" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def refused(words, capsys):
    """The second sentence of a refusal."""
    assert command.main(words) == 1
    return capsys.readouterr().out.splitlines()[1]


def test_a_limit_too_low_for_one_request_is_what_is_named(capsys):
    words = ["--model-path", "llama-3.1-8b", "--topology", "v6e-1", "--max-total-tokens", "1024"]
    assert refused(words, capsys) == (
        "Nearest that does: v6e-1 with --dp-size 1 --tp-size 1, without --max-total-tokens or with "
        "at least 2048."
    )


def test_a_slice_that_is_too_small_and_a_low_limit_are_both_named(capsys):
    words = ["--model-path", "llama-3.3-70b", "--topology", "v6e-1", "--max-total-tokens", "1024"]
    assert refused(words, capsys) == (
        "Nearest that does: v6e-8 with --dp-size 1 --tp-size 8, without --max-total-tokens or with "
        "at least 2048."
    )


@pytest.mark.parametrize(
    ("limit", "nearest"),
    [
        (["--max-total-tokens", "10000000"], "v6e-4 with --dp-size 4 --tp-size 1, without"),
        ([], "v6e-4 with --dp-size 2 --tp-size 2."),
    ],
)
def test_what_the_compiler_refused_is_not_named_again(limit, nearest, monkeypatch, capsys):
    def refuse(request):
        raise StepDoesNotFitError("the compiler of the chip refuses the step: Ran out of memory.")

    monkeypatch.setattr(command, "make_estimate", refuse)
    words = ["--model-path", "llama-3.1-8b", "--topology", "v6e-4", "--dp-size", "4", *limit]
    assert command.main(words) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("Ran out of memory.")
    assert not first.endswith("..")
    assert second.startswith(f"Nearest that does: {nearest}")
    if limit:
        most = int(second.rstrip(".").rpartition(" ")[2])
        assert "or with at most" in second
        assert 2048 < most < 10_000_000


def test_a_slice_without_room_for_the_tokens_asked_for_does_not_fit():
    words = ["--model-path", "llama-3.1-8b", "--topology", "v6e-4", "--tp-size", "4"]
    found = smallest_fit(parse_plan_request([*words, "--max-total-tokens", "200000"]))
    # 16 GB of weights and 26 GB of KV are more than one chip's 32 GB.
    assert (found.topology.name, found.args.tp_size) == ("v6e-4", 2)


def test_a_load_longer_than_memory_is_refused_before_anything_is_compiled(model_path, capsys):
    words = ["--model-path", model_path, "--topology", "v6e-4", "--tp-size", "2"]
    words += ["--max-total-tokens", "512", "--input-len", "1000", "--output-len", "24"]
    assert command.main(words) == 1
    assert "a rank holds 512 KV tokens, one request of the load needs 1,024" in (
        capsys.readouterr().out
    )


def test_the_smallest_fit_has_as_many_ranks_as_fit():
    request = parse_plan_request(
        ["--model-path", "qwen3-8b", "--topology", "v5e-8", "--tp-size", "8"]
    )
    found = smallest_fit(request)
    assert (found.topology.name, found.args.dp_size, found.args.tp_size) == ("v5e-4", 2, 2)
    assert plan_memory(found).kv_tokens >= 2048


def test_without_the_compiler_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(topology_module, "has_tpu_compiler", lambda: False)
    assert command.main(["--model-path", "qwen3-8b", "--topology", "v6e-1"]) == 2
    assert "pip install 'sgl-jax[tpu]'" in capsys.readouterr().err
