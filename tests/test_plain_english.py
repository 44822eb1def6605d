"""The dialect in each room's prose stays under a ceiling that changes may lower and never raise."""

import pytest

from tests.plain_english import (
    GOAL,
    Text,
    ceilings,
    comments,
    count,
    docstrings,
    hits,
    messages,
    names,
    rooms,
)

SLACK = 0.3  # a room this much below its ceiling needs `python -m tests.plain_english --write`


@pytest.mark.parametrize("room", rooms())
def test_room_is_under_its_ceiling(room: str) -> None:
    counted, ceiling = count(rooms()[room]).per_thousand, ceilings().get(room, GOAL)
    assert counted <= ceiling, f"python -m tests.plain_english {room!r} lists the sentences to mend"


@pytest.mark.parametrize("room", ceilings())
def test_ceiling_is_lowered_with_each_improvement(room: str) -> None:
    counted = count(rooms()[room]).per_thousand
    assert ceilings()[room] <= counted + SLACK, "python -m tests.plain_english --write"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Return what is left.", ["what"]),
        ("Whether it fits.", ["opening"]),
        ("Free it. Of the rest, keep\nthose that fit.", ["that of", "opening"]),
        ("The client is told, and asked again.", ["verb", "verb"]),
        ("A size known at compile time, so that the answer fits.", []),
        ("Reads `what` and \"tell\"; as before, whether or not it was 'let'.", []),
    ],
)
def test_dialect_is_found(tmp_path, text: str, kinds: list[str]) -> None:
    assert [hit.kind for hit in hits(tmp_path, Text(1, text))] == kinds


def test_prose_is_docstrings_and_blocks_of_comments() -> None:
    source = '"""One."""\nx = "two"  # three\n# four\n# five\ny = 1\n'
    assert list(docstrings(source)) == [(1, "One.")]
    assert list(comments(source)) == [(2, "three"), (3, "four\nfive")]


def test_names_are_words() -> None:
    source = "class AskedKVHeads:\n    def _tell_it(self): ...\n"
    assert list(names(source)) == [(1, "asked kv heads"), (2, "tell it")]


def test_messages_are_errors_help_and_settings() -> None:
    source = 'raise E(f"no {x}") from e\nadd("--x", help="one")\na: int = setting(1, "two")\n'
    assert sorted(messages(source)) == [(1, "no _"), (2, "one"), (3, "two")]
