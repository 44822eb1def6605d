"""The sample of long tests: repeatable, within its time, and without a test that is never drawn."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import long_sample
from tests.support.long_sample import SECONDS, draw, function_of

SECONDS_OF = {"tests/a.py::test_fast": 10.0, "tests/a.py::test_slow": 480.0}
IDS = [*(f"tests/a.py::test_fast[{n}]" for n in range(200)), "tests/a.py::test_slow[0]"]


def test_a_seed_draws_the_same_tests_again() -> None:
    assert draw(IDS, SECONDS_OF, 7, 600) == draw(reversed(IDS), SECONDS_OF, 7, 600)
    assert draw(IDS, SECONDS_OF, 7, 600) != draw(IDS, SECONDS_OF, 8, 600)


def test_a_sample_fits_its_time_but_for_its_first_test() -> None:
    for seed in range(500):
        sample = draw(IDS, SECONDS_OF, seed, 100)
        rest = sum(SECONDS_OF[function_of(test_id)] for test_id in sample[1:])
        assert rest + SECONDS_OF[function_of(sample[0])] <= 100 or len(sample) == 1


def test_slow_tests_are_drawn_less_often_and_are_drawn() -> None:
    ids = ["tests/a.py::test_fast[0]", "tests/a.py::test_slow[0]"]
    first = [draw(ids, SECONDS_OF, seed, 1)[0] for seed in range(2000)]
    share = first.count("tests/a.py::test_slow[0]") / len(first)
    assert 0.15 < share < 0.25  # a weight of 1/4 beside one of 1


def test_tests_without_a_recorded_time_are_not_drawn() -> None:
    assert (
        draw([*IDS, "tests/b.py::test_new[1]"], SECONDS_OF, 3, 10_000).count(
            "tests/b.py::test_new[1]"
        )
        == 0
    )
    assert len(draw(IDS, SECONDS_OF, 3, 10_000)) == len(IDS)


def test_recorded_times_are_of_functions() -> None:
    recorded = json.loads(SECONDS.read_text())
    assert recorded
    assert all(re.fullmatch(r"tests/[\w/]+\.py::\w+", name) for name in recorded)


@pytest.mark.parametrize("with_default", [False, True])
def test_default_tests_follow_the_sample_only_if_asked_for(
    with_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_sample, "_known_seconds", lambda: SECONDS_OF)
    left_out: list[str] = []
    hook = SimpleNamespace(
        pytest_deselected=lambda items: left_out.extend(item.nodeid for item in items)
    )
    option = SimpleNamespace(long_sample=1.0, long_seed=3, with_default=with_default)
    config: Any = SimpleNamespace(
        option=option,
        hook=hook,
        getoption=lambda name: vars(option)[name.strip("-").replace("-", "_")],
    )
    default = ["tests/a.py::test_one", "tests/a.py::test_two"] * with_default
    items: Any = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _, is_long=is_long: is_long)
        for is_long, names in ((False, default[:1]), (True, IDS), (False, default[1:]))
        for name in names
    ]
    long_sample.pytest_collection_modifyitems(config, items)
    taken = [item.nodeid for item in items]
    sample = taken[: len(taken) - len(default)]
    assert taken[len(sample) :] == default
    assert 0 < len(sample) < len(IDS)
    assert sorted(sample + left_out) == sorted(IDS)
