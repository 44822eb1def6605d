"""The demonstration model with a KV cache of 8 bits: right answers, whatever happens meanwhile."""

import json
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.bench.calibrate_kv_scales import main as calibrate
from sgl_jax.bench.demo_tasks import held_out_questions, is_right
from sgl_jax.engine.offline import Engine

DEMO = Path(__file__).parents[2] / "models" / "demo"
QUESTIONS = held_out_questions(18, seed=3)
SETTINGS = {
    "device": "cpu",
    "kv_cache_dtype": "fp8_e4m3",
    "context_length": 1536,
    "chunked_prefill_size": 128,
    "max_running_requests": 4,
    "max_total_tokens": 8192,
    "check_memory": "busy",
    "memory_error_action": "crash",
    "skip_warmup": True,
}


@pytest.fixture(scope="module")
def scales(tmp_path_factory):
    """A file of scales, from a few questions of the split that is not asked here."""
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    words = ["--model-path", str(DEMO), "--device", "cpu", "--output", str(path)]
    assert calibrate([*words, "--num-prompts", "6"]) == 0
    return str(path)


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """settings -> the answers to all questions, and the engine's counters."""
    cache = str(tmp_path_factory.mktemp("compiled"))

    def ask(**settings):
        with Engine(str(DEMO), compilation_cache_dir=cache, **(SETTINGS | settings)) as engine:
            prompts = [engine.tokenizer.apply_chat_template(q.messages) for q in QUESTIONS]
            wanted = {"temperature": 0, "max_new_tokens": 24}
            answers = engine.generate(input_ids=prompts, sampling_params=wanted)
            counters = engine.server_info()["counters"]
        return answers, counters

    return ask


@pytest.fixture(scope="module")
def calm(answer, scales):
    """The answers with scales, of one chip that retracts nobody."""
    return answer(kv_cache_scales=scales)[0]


def num_right(answers):
    return sum(is_right(q, a.text) for q, a in zip(QUESTIONS, answers, strict=True))


def test_scales_fit_each_layer_and_head_of_the_demonstration_model(scales):
    content = json.loads(Path(scales).read_text())
    for kind in "kv":
        array = np.array(content[kind])
        assert array.shape == (4, 2)
        assert (np.log2(array) % 1 == 0).all()
        assert len(set(array.flat)) > 1


def test_questions_are_answered_with_scales_and_without(answer, calm):
    assert num_right(calm) >= len(QUESTIONS) - 1
    assert num_right(answer()[0]) >= len(QUESTIONS) - 1


def test_a_retracted_request_goes_on_with_the_same_tokens(answer, calm, scales):
    answers, counters = answer(kv_cache_scales=scales, test_retract=True, page_size=1)
    assert counters["requests_force_retracted"] > 0
    assert [a.output_ids for a in answers] == [a.output_ids for a in calm]


def test_two_chips_give_the_tokens_of_one(answer, calm, scales):
    answers, _ = answer(kv_cache_scales=scales, tp_size=2)
    assert [a.output_ids for a in answers] == [a.output_ids for a in calm]


def test_scales_of_another_model_are_refused(scales, tmp_path):
    content = json.loads(Path(scales).read_text())
    content["model"]["head_dim"] = 128
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="are for model"):
        Engine(str(DEMO), **SETTINGS, kv_cache_scales=str(other))


def test_a_model_is_calibrated_on_prompts_of_ones_own(tmp_path, capsys):
    prompts, output = tmp_path / "prompts.txt", tmp_path / "scales.json"
    prompts.write_text("The code of Anna is 471.\n\nHello\n")
    words = ["--model-path", str(DEMO), "--device", "cpu", "--output", str(output)]
    assert calibrate([*words, "--prompts", str(prompts)]) == 0
    assert "2 prompts" in capsys.readouterr().out
    assert output.exists()
    prompts.write_text("\n")
    assert calibrate([*words, "--prompts", str(prompts)]) == 2
    assert "no prompts" in capsys.readouterr().err
