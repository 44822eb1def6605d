"""Answers about images are those of transformers, however the work is cut up.

Golden data: tests/golden/vision, made by scripts/make_vision_golden.py.
"""

from typing import Any

import numpy as np
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation, GenerationError
from tests.models.golden_server import GOLDEN, TOLERANCE

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "gemma4_moe")
IMAGE_TOKEN = 240
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks": {"test_retract": True, "test_retract_interval": 3},
    "whole prompts": {"chunked_prefill_size": 256, "page_size": 16},
    "large pages": {"page_size": 128, "max_total_tokens": 1024},
    "pages of a token": {"page_size": 1, "test_retract": True, "test_retract_interval": 2},
    "two chips": {"tp_size": 2},
    "two ranks": {"dp_size": 2},
    "shared hidden states": {"tp_size": 2, "hidden_sharding": "tensor"},
    "several steps": {"num_decode_steps": "4"},
    "drafts": {"speculative_algorithm": "NGRAM"},
    "host memory": {"enable_hierarchical_cache": True, "hicache_ratio": 2.0},
    "no overlap": {"disable_overlap_schedule": True},
    # Of the 41 tokens of all images in one chat, 45 rows fit with DeepStack.
    "small table": {"image_cache_size": 45 * 4 * 32 * 3 / 1e9},
}
OF_EACH_FAMILY = ("chunks", "two chips", "two ranks")
IN_ALL_WAYS = ("qwen3_vl", "gemma3", "gemma4_moe")
IN_SHORT_RUNS = (("qwen3_vl", "chunks"), ("gemma3", "chunks"))


class Chats:
    """The golden chats of a family."""

    def __init__(self, family: str) -> None:
        self.folder = GOLDEN / "vision" / family
        self._stored = np.load(self.folder / "golden.npz")

    def prompt(self, chat: str) -> list[int]:
        """Return a prompt with one placeholder for each image."""
        tokens: list[int] = self._stored[f"{chat}_prompt"].tolist()
        is_first = [
            token != IMAGE_TOKEN or before != IMAGE_TOKEN
            for token, before in zip(tokens, [0, *tokens], strict=False)
        ]
        return [token for token, keeps in zip(tokens, is_first, strict=True) if keeps]

    def images(self, chat: str) -> list[Any]:
        return [self._stored[f"pixels_{number}"] for number in self._stored[f"{chat}_images"]]

    def num_tokens(self, chat: str) -> int:
        return len(self._stored[f"{chat}_prompt"])

    def answer(self, chat: str) -> list[int]:
        greedy: list[int] = self._stored[f"{chat}_greedy"].tolist()
        return greedy

    def check(self, chat: str, result: Generation) -> None:
        greedy = self._stored[f"{chat}_greedy"]
        assert result.output_ids == greedy.tolist(), chat
        assert result.num_prompt_tokens == self.num_tokens(chat)
        logits = self._stored[f"{chat}_logits"].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = logits[np.arange(len(greedy)), greedy]
        found = [each.logprob for each in result.logprobs]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def make_engine(chats: Chats, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "warmup": "none",
        "enable_multimodal": True,
        "check_memory": "busy",
        "page_size": 4,
        "context_length": 160,
        "max_total_tokens": 640,
        "max_running_requests": 4,
        "chunked_prefill_size": 16,
        "image_cache_size": 0.0002,
    }
    return Engine(str(chats.folder), **defaults | settings)


def ask(engine: Engine, chats: Chats, names: list[str]) -> None:
    results = engine.generate(
        [chats.prompt(name) for name in names],
        {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
        image_data=[chats.images(name) for name in names],
        return_logprob=True,
    )
    for name, result in zip(names, results, strict=True):
        chats.check(name, result)


def counters(engine: Engine) -> tuple[int, int]:
    """Return the images computed and found so far, on all ranks."""
    found = engine.server_info()["counters"]
    return found["image_encodings"], found["image_cache_hits"]


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *IN_SHORT_RUNS,
        *(
            pytest.param(family, variant, marks=pytest.mark.long)
            for family in FAMILIES
            for variant in (VARIANTS if family in IN_ALL_WAYS else OF_EACH_FAMILY)
            if (family, variant) not in IN_SHORT_RUNS
        ),
    ],
)
def test_chats_with_images_are_those_of_transformers(family: str, variant: str) -> None:
    chats = Chats(family)
    with make_engine(chats, **VARIANTS[variant]) as engine:
        ask(engine, chats, ["single"])
        assert counters(engine)[0] == 1
        ask(engine, chats, ["second"])
        if variant != "small table":  # the tower runs only for the new image
            assert counters(engine)[0] <= 2 * engine.info["dp_size"]
        ask(engine, chats, ["several", "second", "single"])
        before = counters(engine)
        engine.flush_cache()
        ask(engine, chats, ["several"])
        assert counters(engine)[0] > before[0]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.long)])
def test_a_turn_continues_a_history_with_an_image(family: str, *, streaming: bool) -> None:
    """Also after its memory was evicted: the session has the pixels."""
    chats = Chats(family)
    history = chats.prompt("single") + chats.answer("single")
    new = chats.prompt("second")[len(history) :]
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    with make_engine(chats) as engine:
        for flushes in (False, True):
            session = engine.open_session(streaming=streaming)
            first = engine.generate(
                [chats.prompt("single")],
                sampling,
                image_data=chats.images("single"),
                session_params={"id": session},
                return_logprob=True,
            )[0]
            chats.check("single", first)
            if flushes:
                assert engine.flush_cache()
            before = counters(engine)[0]
            turn = {"id": session} if streaming else {"id": session, "rid": first.rid}
            second = engine.generate(
                [new],
                sampling,
                image_data=chats.images("second")[1:],
                session_params=turn,
                return_logprob=True,
            )[0]
            chats.check("second", second)
            assert counters(engine)[0] - before == (2 if flushes else 1)
            engine.close_session(session)
            engine.flush_cache()


def test_images_that_cannot_be_served_are_refused() -> None:
    chats = Chats("qwen3_vl")
    image = chats.images("single")[0]
    prompt = chats.prompt("single")
    with make_engine(chats, max_images_per_request=1) as engine:
        for given, named in (
            ([image, image], "placeholders"),
            ([image.astype(np.float32)], "uint8"),
        ):
            with pytest.raises(InvalidRequestError, match=named):
                engine.generate([prompt], image_data=given)
        with pytest.raises(InvalidRequestError, match="max-images-per-request"):
            engine.generate([prompt + prompt], image_data=[image, image])
        with pytest.raises(GenerationError, match="logprob_start_len"):
            engine.generate([prompt], image_data=image, return_logprob=True, logprob_start_len=2)
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            engine.generate([[1, 2**30]])
    with (
        make_engine(chats, enable_multimodal=False) as engine,
        pytest.raises(InvalidRequestError, match="enable_multimodal"),
    ):
        engine.generate([prompt], image_data=image)
