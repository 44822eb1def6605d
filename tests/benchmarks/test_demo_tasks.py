"""The demonstration tasks, their evaluation, and the committed model's folder."""

import asyncio
import json
import random
import re
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from safetensors import safe_open
from transformers import AutoTokenizer

from benchmarks.demo_model import evaluate, tasks
from benchmarks.demo_model.dialogues import TOOL_MIX, write_dialogue
from benchmarks.demo_model.model_folder import CHAT_TEMPLATE, plain_messages
from benchmarks.demo_model.tasks import (
    TASKS,
    TOOL_TASKS,
    UNKNOWN_ANSWER,
    Question,
    held_out_questions,
)
from benchmarks.demo_model.tool import GET_WEATHER, message_text

MODEL = Path(__file__).parents[2] / "models" / "demo"


def questions_of(task: str, count: int = 60) -> list[Question]:
    return held_out_questions(count, seed=7, tasks=(task,))


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def told(question: Question) -> str:
    """Everything the user said before the question itself."""
    users = [m["content"] for m in question.messages if m["role"] == "user"]
    return "\n".join(users[:-1]).lower()


def ask_of(text: str) -> str:
    """A question without the small variations people make."""
    return text.rstrip("?.").lower()


def test_questions_are_the_same_for_the_same_seed_and_differ_for_another() -> None:
    assert held_out_questions(30, seed=1) == held_out_questions(30, seed=1)
    assert held_out_questions(30, seed=1) != held_out_questions(30, seed=2)


def test_every_task_gets_its_share_of_the_questions() -> None:
    tasks = [question.task for question in held_out_questions(5 * len(TASKS))]
    assert all(tasks.count(task) == 5 for task in TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_roles_alternate_and_the_user_speaks_last(task: str) -> None:
    for question in questions_of(task, 20):
        roles = [m["role"] for m in question.messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


def test_sums_are_right_and_held_out() -> None:
    for question in questions_of("sum"):
        a, b = numbers_in(question.messages[-1]["content"])
        assert question.answer == f"{a} + {b} = {a + b}."
        assert tasks.split_of(f"sum {min(a, b)} {max(a, b)}") == "test"


@pytest.mark.parametrize("task", ["sort", "reverse"])
def test_lists_are_ordered_right_and_held_out(task: str) -> None:
    for question in questions_of(task):
        digits = re.findall(r"\d", question.messages[-1]["content"])
        expected = sorted(digits) if task == "sort" else digits[::-1]
        assert question.answer == " ".join(expected) + "."
        assert tasks.split_of(f"{task} {''.join(digits)}") == "test"


@pytest.mark.parametrize("task", ["recall", "recall_long"])
def test_a_recalled_value_was_told_before(task: str) -> None:
    for question in questions_of(task, 30):
        value = question.answer.rstrip(".").split()[-1]
        assert value.lower() in told(question)


def test_long_recall_lies_about_a_thousand_tokens_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for question in questions_of("recall_long", 10):
        first_answer = [m["role"] for m in question.messages].index("assistant")
        since = list(question.messages[first_answer:])
        num_tokens = len(tokenizer.apply_chat_template(since)["input_ids"])
        assert 950 <= num_tokens <= 1200


def test_what_is_unknown_was_never_told() -> None:
    for seed in range(30):
        writer = tasks.DialogueWriter(random.Random(seed), "test")
        writer.tell(num_facts=8)
        known = {ask_of(writer.recall([key]).user) for key in writer.facts for _ in range(40)}
        unknown = [writer.unknown() for _ in range(40)]
        assert not known & {ask_of(turn.user) for turn in unknown}
        assert {turn.assistant for turn in unknown} == {UNKNOWN_ANSWER}


@pytest.mark.parametrize("task", TOOL_TASKS)
def test_a_lookup_is_asked_with_the_tool_and_answered_by_its_result(task: str) -> None:
    for question in questions_of(task, 30):
        assert question.tools == (GET_WEATHER,)
        asked = next(m for m in reversed(question.messages) if m["role"] == "user")["content"]
        if task == "call":
            call = json.loads(re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", question.answer)[1])
            assert call["name"] == "get_weather"
            assert re.search(rf"\b{call['arguments']['city']}\b", asked)
            continue
        weather, degrees, city = re.fullmatch(
            r"It is (\w+) and (-?\d+) degrees in (\w+)\.", question.answer
        ).groups()
        assert question.messages[-1]["role"] == "tool"
        assert weather in question.messages[-1]["content"]
        assert degrees in question.messages[-1]["content"]
        assert city in asked


def test_the_template_writes_what_the_model_was_trained_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.chat_template.strip() == CHAT_TEMPLATE.strip()
    for seed in range(20):
        for mix, tools in (({}, ()), ({"mix": TOOL_MIX}, (GET_WEATHER,))):
            messages = write_dialogue(random.Random(seed), "train", 300, **mix)  # type: ignore[arg-type]
            plain = "".join(
                f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n"
                for each in plain_messages(messages, tools)
            )
            given = json.loads(json.dumps(messages))
            for call in (call for each in given for call in each.get("tool_calls") or ()):
                function = call["function"]
                function["arguments"] = json.loads(function["arguments"])
            told = tokenizer.apply_chat_template(given, tools=list(tools) or None, tokenize=False)
            assert told == plain


def test_splits_share_no_item() -> None:
    """The sums of training dialogues are never those of the test questions."""
    trained = set()
    for seed in range(200):
        for message in write_dialogue(random.Random(seed), "train", 200):
            trained |= set(re.findall(r"\d+ \+ \d+ = \d+", message_text(message)))
    asked = {question.answer.rstrip(".") for question in questions_of("sum", 300)}
    assert trained
    assert not trained & asked


def test_a_dialogue_stops_near_its_token_budget() -> None:
    for seed in range(20):
        messages = write_dialogue(random.Random(seed), "valid", 300)
        num_tokens = sum(tasks.estimate_tokens(m["content"]) for m in messages)
        assert 300 <= num_tokens < 420


def test_only_white_space_and_the_full_stop_are_forgiven() -> None:
    question = Question("recall", (), "red.")
    assert tasks.is_right(question, " red\n")
    assert not tasks.is_right(question, "Red.")
    assert not tasks.is_right(question, "red. red.")


def test_thresholds_hold_for_each_task_and_overall() -> None:
    scores = [evaluate.TaskScore("sum", 96, 100), evaluate.TaskScore("sort", 94, 100)]
    assert evaluate.passes(scores, 0.95, 0.90)
    assert not evaluate.passes(scores, 0.96, 0.90)
    assert not evaluate.passes(scores, 0.95, 0.95)
    assert "overall" in evaluate.format_table(scores)


def test_the_evaluation_asks_greedily_and_within_its_bound(capsys: pytest.CaptureFixture) -> None:
    answers = {json.dumps(q.messages): q.answer for q in held_out_questions(40, seed=3)}
    running, most_running = 0, 0

    async def serve(request: httpx.Request) -> httpx.Response:
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        await asyncio.sleep(0.001)
        running -= 1
        body = json.loads(request.content)
        assert body["temperature"] == 0
        reply = answers[json.dumps(body["messages"])]
        message = {"role": "assistant", "content": reply if "+" not in reply else "wrong"}
        return httpx.Response(200, json={"choices": [{"index": 0, "message": message}]})

    async def ask() -> list[str]:
        transport = httpx.AsyncClient(transport=httpx.MockTransport(serve))
        async with AsyncOpenAI(
            base_url="http://server/v1",
            api_key="none",
            http_client=transport,  # type: ignore[arg-type]
        ) as client:
            return await evaluate.ask_all(client, "demo", held_out_questions(40, seed=3), 4)

    scores = evaluate.score(held_out_questions(40, seed=3), asyncio.run(ask()))
    assert most_running == 4
    assert {s.task: s.accuracy for s in scores} == {t: float(t != "sum") for t in TASKS}


def test_the_model_folder_is_a_small_qwen3_in_bf16() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] in (64, 128)
    assert (MODEL / "model.safetensors").stat().st_size <= 8_000_000
    hidden, dim = config["hidden_size"], config["head_dim"]
    q_size, kv_size = (config[f"num_{k}_heads"] * dim for k in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": [q_size, hidden],
        "self_attn.k_proj": [kv_size, hidden],
        "self_attn.v_proj": [kv_size, hidden],
        "self_attn.o_proj": [hidden, q_size],
        "self_attn.q_norm": [dim],
        "self_attn.k_norm": [dim],
        "mlp.gate_proj": [config["intermediate_size"], hidden],
        "mlp.up_proj": [config["intermediate_size"], hidden],
        "mlp.down_proj": [hidden, config["intermediate_size"]],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    expected = {
        f"model.layers.{i}.{part}.weight": shape
        for i in range(config["num_hidden_layers"])
        for part, shape in shapes.items()
    }
    expected["model.embed_tokens.weight"] = [config["vocab_size"], hidden]
    expected["model.norm.weight"] = [hidden]
    with safe_open(MODEL / "model.safetensors", "numpy") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in slices.items()} == expected
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}


def test_the_tokenizer_encodes_any_text_and_every_digit_alone() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "héllo 漢字 🙂 \x00 1234\n\n  x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("1234567")) == 7
    assert max(tokenizer.get_vocab().values()) < 1024


def test_the_chat_template_marks_roles_with_special_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": "Hi!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads((MODEL / "config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == config["eos_token_id"]
