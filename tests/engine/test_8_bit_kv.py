"""The demonstration model with a KV cache of 8 bits: right answers, after retracts too."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import calibrate_kv_scales
from benchmarks.demo_model.tasks import held_out_questions, is_right
from sgl_jax.engine.offline import Engine

DEMO = Path(__file__).parents[2] / "models" / "demo"
QUESTIONS = held_out_questions(12, seed=3, tasks=("recall", "sum", "sort", "reverse"))
SETTINGS = {
    "device": "cpu",
    "kv_cache_dtype": "fp8_e4m3",
    "context_length": 512,
    "chunked_prefill_size": 32,
    "max_running_requests": 2,
    "max_total_tokens": 2048,
    "check_memory": "busy",
    "memory_error_action": "crash",
    "warmup": "none",
}
CALIBRATE = ("--model-path", str(DEMO), "--device", "cpu", "--chunked-prefill-size", "32")


@pytest.fixture(scope="module")
def scales(tmp_path_factory):
    """A file of scales, from a few questions of a split that is not asked here."""
    path = str(tmp_path_factory.mktemp("scales") / "scales.json")
    words = ["--num-prompts", "3", "--context-length", "256", "--output-len", "4"]
    assert calibrate_kv_scales.main([*CALIBRATE, *words, "--output", path]) == 0
    return path


@pytest.fixture(scope="module")
def answer():
    """settings -> the answers to all questions, and the engine's counters."""

    def ask(**settings):
        with Engine(str(DEMO), **(SETTINGS | settings)) as engine:
            prompts = [engine.tokenizer.apply_chat_template(q.messages) for q in QUESTIONS]
            wanted = {"temperature": 0, "max_new_tokens": 24}
            answers = engine.generate(input_ids=prompts, sampling_params=wanted)
            counters = engine.server_info()["counters"]
        return answers, counters

    return ask


@pytest.fixture(scope="module")
def calm(answer, scales):
    """The answers with scales, of one chip, without retracts."""
    return answer(kv_cache_scales=scales)[0]


def assert_right(answers):
    num_right = sum(is_right(q, a.text) for q, a in zip(QUESTIONS, answers, strict=True))
    assert num_right >= len(QUESTIONS) - 1


def tokens(answers):
    return [answer.output_ids for answer in answers]


def test_scales_are_found_for_each_layer_and_head(scales):
    content = json.loads(Path(scales).read_text())
    for kind in "kv":
        array = np.array(content[kind])
        assert array.shape == (4, 2)
        assert (np.log2(array) % 1 == 0).all()
        assert (array != 1.0).all()  # as it would be without


@pytest.mark.long
def test_questions_are_answered_right(calm):
    assert_right(calm)


@pytest.mark.long
def test_questions_are_answered_right_without_scales(answer):
    assert_right(answer()[0])


def test_a_retracted_request_goes_on_with_the_same_tokens(answer, calm, scales):
    """What it computes again it reads from the cache again, as it did the first time."""
    answers, counters = answer(kv_cache_scales=scales, test_retract=True)
    assert counters["requests_force_retracted"] > 0
    assert tokens(answers) == tokens(calm)


@pytest.mark.long
def test_two_chips_give_the_tokens_of_one(answer, calm, scales):
    answers, _ = answer(kv_cache_scales=scales, tp_size=2)
    assert tokens(answers) == tokens(calm)


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [("Hello\n\nThe code of Anna is 471.\n", 0, "2 prompts"), ("\n", 2, "no prompts in")],
)
def test_prompts_of_ones_own_are_lines_of_a_file(
    text, expected, words, tmp_path, monkeypatch, capsys
):
    absmax = np.ones((4, 2), np.float32)
    monkeypatch.setattr(calibrate_kv_scales, "kv_absmax", lambda *_: (absmax, absmax))
    prompts, output = tmp_path / "prompts.txt", tmp_path / "scales.json"
    prompts.write_text(text)
    arguments = [*CALIBRATE, "--output", str(output), "--prompts", str(prompts)]
    assert calibrate_kv_scales.main(arguments) == expected
    assert output.exists() == (expected == 0)
    assert words in "".join(capsys.readouterr())


def test_a_model_without_heads_in_its_cache_has_no_scales(tmp_path, capsys):
    model = Path(__file__).parents[1] / "golden" / "deepseek_v3"
    arguments = ["--model-path", str(model), "--output", str(tmp_path / "scales.json")]
    assert calibrate_kv_scales.main(arguments) == 2
    assert "are of heads, and latents have none" in capsys.readouterr().err
