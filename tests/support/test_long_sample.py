"""The sample of long tests: repeatable, within its time, and without a test that is never drawn."""

import json
import re

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
