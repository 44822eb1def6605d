"""Draft layers through the whole engine: sessions, grammars, retracts, host memory, a store.

Each engine with drafts answers the same requests, one kind after the other, as one without.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sgl_jax.engine.offline import Engine
from sgl_jax.replay.__main__ import main as replay
from tests.models.eagle3_reference import HEAD_CONFIG, head_weights, write_checkpoint
from tests.models.golden_server import GOLDEN
from tests.models.latent_draft_reference import write_drafting_checkpoint
from tests.support.covering import covering

MODELS = Path(__file__).parents[2] / "models"
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "context_length": 256,
    "max_running_requests": 4,
    "max_total_tokens": 1024,
    "chunked_prefill_size": 32,
    "page_size": 4,
    "warmup": "none",
    "check_memory": "busy",
}
DRAFTS = {"speculative_num_draft_tokens": 3}
MTP = DRAFTS | {"speculative_algorithm": "MTP"}
EAGLE3 = DRAFTS | {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": str(MODELS / "demo_eagle3"),
}
SCHEMA = json.dumps(
    {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
)
QUESTIONS = [
    "Sort 5 3 9 1.",
    "The code of Mira is 471. What is the code of Mira?",
    "Reverse 4 7 2.",
    "What is 17 + 25?",
]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
RANDOM = {"temperature": 0.8, "seed": 5, "max_new_tokens": 24, "ignore_eos": True}
BY_SCHEMA = {"temperature": 0.0, "max_new_tokens": 24, "json_schema": SCHEMA}


class Drafting(NamedTuple):
    """A model with a draft layer."""

    model: Path
    settings: dict[str, Any]
    is_trained: bool = True


def mtp(_: Path) -> Drafting:
    return Drafting(MODELS / "demo_hybrid", MTP)


def eagle3(_: Path) -> Drafting:
    return Drafting(MODELS / "demo", EAGLE3)


def latents(folder: Path) -> Drafting:
    """DeepSeek V3's layer, which nobody trained: its drafts are seldom right."""
    return Drafting(write_drafting_checkpoint(folder), MTP, is_trained=False)


def windows(folder: Path) -> Drafting:
    """An EAGLE-3 head of random weights for a model whose layers have windows by turns."""
    read = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = HEAD_CONFIG | {"vocab_size": 250, "eagle_config": read}
    head = write_checkpoint(folder, config, head_weights())
    settings = EAGLE3 | {"speculative_draft_model_path": str(head)}
    return Drafting(GOLDEN / "gpt_oss", settings, is_trained=False)


MODELS_THAT_DRAFT = {make.__name__: make for make in (mtp, eagle3, latents, windows)}
SETTINGS_OF: tuple[dict[str, dict[str, Any]], ...] = (
    {
        "a tree": {},
        "no tree": {"disable_radix_cache": True, "chunked_prefill_size": 8},
        "a store": {
            "enable_hierarchical_cache": True,
            "hicache_fetch_policy": "always",
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "max_total_tokens": 320,
            "max_running_requests": 2,
        },
    },
    {"one rank": {}, "two ranks": {"dp_size": 2}},
    {"one chip": {}, "two chips": {"tp_size": 2}},
    {f"pages of {size}": {"page_size": size} for size in (1, 4, 16)},
    {"overlap": {}, "no overlap": {"disable_overlap_schedule": True}},
    {"calm": {}, "retracts": {"test_retract": True, "test_retract_interval": 3}},
)


def cases() -> list[Any]:
    """Return models and settings of which every two occur together, a model's in sequence."""
    found = []
    for model, *names in sorted(covering((MODELS_THAT_DRAFT, *SETTINGS_OF), 2)):
        settings: dict[str, Any] = {}
        for own, name in zip(SETTINGS_OF, names, strict=True):
            settings |= own[name]
        id_ = ", ".join((model, *names))
        found.append(pytest.param(MODELS_THAT_DRAFT[model], settings, id=id_))
    return found


@pytest.fixture(scope="module")
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    made: Drafting = request.param(tmp_path_factory.mktemp("drafting"))
    return made


def prompts_for(engine: Engine) -> list[list[int]]:
    """The questions; ids of some length where the model has no words."""
    if not engine.tokenizer.can_encode:
        rng = np.random.default_rng(4)
        return [rng.integers(0, 90, num).tolist() for num in (19, 40, 23, 31)]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [engine.tokenizer.apply_chat_template(chat) for chat in chats]


def answers(engine: Engine) -> list[list[int]]:
    """Questions at once, by different rules; then a conversation with a roll back and a fork."""
    prompts = prompts_for(engine)
    last = BY_SCHEMA if engine.tokenizer.can_encode else GREEDY
    rules = [GREEDY, GREEDY, RANDOM, last]
    given = engine.generate(input_ids=prompts, sampling_params=rules, progress=False)

    def turn(session: str, ids: list[int]) -> list[int]:
        (answer,) = engine.generate(
            input_ids=[ids], sampling_params=GREEDY, session_params={"id": session}
        )
        return answer.output_ids

    session = engine.open_session(streaming=True)
    said = [turn(session, ids) for ids in (prompts[1], prompts[0], prompts[3])]
    engine.rollback_session(session, 1)
    said.append(turn(session, prompts[2]))
    fork = engine.fork_session(session, "the fork")
    said.append(turn(fork, prompts[3]))
    for each in (session, fork):
        engine.close_session(each)
    return [*(answer.output_ids for answer in given), *said]


@pytest.fixture(scope="module")
def expected(drafting: Drafting) -> Iterator[list[list[int]]]:
    with Engine(**SETTINGS, model_path=str(drafting.model)) as engine:
        yield answers(engine)


@pytest.mark.long
@pytest.mark.parametrize(("drafting", "more"), cases(), indirect=["drafting"])
def test_a_draft_layer_changes_no_answer(
    drafting: Drafting, more: dict[str, Any], expected: list[list[int]], tmp_path: Path
) -> None:
    recording = str(tmp_path / "run.events")
    settings = SETTINGS | {"model_path": str(drafting.model)} | drafting.settings | more
    if "hicache_storage_backend" in settings:
        settings["hicache_storage_dir"] = str(tmp_path / "store")
    with Engine(**settings, record_events=recording) as engine:
        assert answers(engine) == expected
        assert engine.flush_cache()
        assert answers(engine) == expected
        counters = engine.server_info()["counters"]
    least = 0.4 if drafting.is_trained else 0.0
    assert counters["accepted_draft_tokens"] > least * counters["drafted_tokens"]
    assert (counters["requests_force_retracted"] > 0) == ("test_retract" in more)
    assert replay([recording]) == 0
