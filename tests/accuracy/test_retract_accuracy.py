"""Retracting requests does not change what they are answered, however the server is run.

Each variant serves the same load twice, without retract and with requests retracted every few
steps, and both times must answer as the reference does: the plainest server there is. Variants of
the same shapes find their programs in the user's compilation cache, where servers keep them.
"""

from pathlib import Path

import pytest

from tests.accuracy import workload
from tests.accuracy.variants import ALL, SOME, Variant
from tests.accuracy.workload import Outcome
from tests.live.live_server import LiveServer, live_server

MIN_SHARE_EQUAL = 0.999
MAX_ACCURACY_CHANGE = 0.01
MIN_ACCURACY = 0.95

VARIANTS = [
    pytest.param(variant, id=variant.name, marks=() if variant in SOME else pytest.mark.long)
    for variant in ALL
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_the_same_with_and_without_retract(
    variant: Variant, reference: Outcome, tmp_path: Path
) -> None:
    with live_server(tmp_path, *variant.flags) as server:
        calm = workload.run(server.url)
        assert_same(server, calm, reference)
        assert_sound(server)
        assert server.get("/get_server_info")["counters"]["requests_force_retracted"] == 0
    with live_server(tmp_path, *variant.flags, *variant.retract_flags) as server:
        retracted = workload.run(server.url)
        assert_same(server, retracted, calm)
        assert_same(server, retracted, reference)
        assert_sound(server)
        counters = server.get("/get_server_info")["counters"]
        assert counters["requests_force_retracted"] > workload.NUM_GENERATIONS, counters
        assert (counters["accepted_draft_tokens"] > 0) == variant.speculation, counters
        assert (counters["evicted_pages"] > 0) == variant.radix, counters


def assert_same(server: LiveServer, outcome: Outcome, wanted: Outcome) -> None:
    """As many right answers, and the same tokens but for near ties."""
    asked = workload.NUM_QUESTIONS
    print(f"{outcome.num_right} of {asked} right, {wanted.num_right} wanted")
    assert outcome.num_right >= MIN_ACCURACY * asked
    assert abs(outcome.num_right - wanted.num_right) <= MAX_ACCURACY_CHANGE * asked
    differing = workload.num_differences(server.url, wanted, outcome)
    tokens = workload.num_output_tokens()
    print(f"{differing} of {tokens} tokens differ")
    assert differing <= (1 - MIN_SHARE_EQUAL) * tokens


def assert_sound(server: LiveServer) -> None:
    """Alive and at rest: all memory accounted for, all of it free after a flush, all compiled."""
    server.assert_nothing_leaked()
    server.assert_flush_frees_everything()
    assert server.get("/health_generate") == {"status": "ready"}
    assert server.get("/get_server_info")["counters"]["compiles_after_ready"] == 0
