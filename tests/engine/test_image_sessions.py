"""Sessions whose histories have images, also of models that see an image's tokens as a whole.

Each turn is compared with the golden chats (`test_image_golden.py`), or with a request that has
the whole conversation.
"""

from pathlib import Path
from typing import Any

import pytest

from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation, GenerationError
from tests.engine.test_image_golden import Chats, counters, make_engine

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"page_size": 1, "test_retract": True, "test_retract_interval": 3},
    {"page_size": 16, "max_total_tokens": 1280},
    {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "max_total_tokens": 160},
    {"tp_size": 2, "dp_size": 2},
)


def say(
    engine: Engine, ids: list[int], images: list[Any], turn: dict[str, Any] | None = None
) -> Generation:
    options: dict[str, Any] = {} if turn is None else {"session_params": turn}
    (answer,) = engine.generate([ids], GREEDY, image_data=images, return_logprob=True, **options)
    return answer


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"test_retract": True, "test_retract_interval": 3}),
        *[
            pytest.param(family, settings, marks=pytest.mark.long)
            for family in ("gemma3", "gemma4_moe", "gemma4", "qwen3_vl")
            for settings in SETTINGS
        ],
    ],
    ids=str,
)
def test_turns_after_images_are_those_of_whole_conversations(
    family: str, settings: dict[str, Any]
) -> None:
    chats = Chats(family)
    prompt, images = chats.prompt("single"), chats.images("second")
    new = chats.prompt("second")[len(prompt) + len(chats.answer("single")) :]
    with make_engine(chats, **settings) as engine:
        session = engine.open_session(streaming=True)
        chats.check("single", say(engine, prompt, images[:1], {"id": session}))
        fork = engine.fork_session(session, "fork")
        for each in (session, fork):
            chats.check("second", say(engine, new, images[1:], {"id": each}))
        engine.rollback_session(fork, 1)
        chats.check("second", say(engine, new, images[1:], {"id": fork}))
        engine.rollback_session(fork, 0)
        chats.check("single", say(engine, prompt, images[:1], {"id": fork}))
        for each in (session, fork):
            engine.close_session(each)
        check_offsets(engine, chats)


def check_offsets(engine: Engine, chats: Chats) -> None:
    """Continue a turn after an image, in the middle of it, which is refused, and before it."""
    prompt, images = chats.prompt("single"), chats.images("single")
    start = prompt.index(240)
    end = start + chats.num_tokens("single") - len(prompt) + 1
    session = engine.open_session(streaming=False)
    first = say(engine, prompt, images, {"id": session})
    chats.check("single", first)
    turn = {"id": session, "rid": first.rid}
    with pytest.raises(GenerationError, match="of an image of the session's history"):
        say(engine, [5, 6], [], turn | {"offset": end - 1})
    for offset, kept in ((end, prompt[: start + 1]), (start, prompt[:start])):
        given = images if offset == end else []
        expected = say(engine, [*kept, 5, 6], given)
        assert say(engine, [5, 6], [], turn | {"offset": offset}).output_ids == expected.output_ids
    engine.close_session(session)


@pytest.mark.long
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_restored_session_computes_its_images_again(
    family: str, tmp_path: Path, *, streaming: bool
) -> None:
    chats = Chats(family)
    prompt, images = chats.prompt("single"), chats.images("second")
    new = chats.prompt("second")[len(prompt) + len(chats.answer("single")) :]
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "restore_cache": str(tmp_path / "cache"),
    }
    with make_engine(chats, **settings) as engine:
        session = engine.open_session(streaming=streaming)
        first = say(engine, prompt, images[:1], {"id": session})
        chats.check("single", first)
    with make_engine(chats, **settings) as engine:
        engine.flush_cache()  # what was loaded from the store, too
        turn = {"id": session} if streaming else {"id": session, "rid": first.rid}
        chats.check("second", say(engine, new, images[1:], turn))
        assert counters(engine)[0] > 0
