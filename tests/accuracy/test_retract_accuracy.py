"""Retracting requests does not change what they are answered, however the server is run.

Each variant serves the same load twice, without retract and with requests retracted every few
steps, and both times must answer as the reference does: the plainest server there is. By default
one variant serves a part of it with retracts. Variants of the same shapes find their programs in
the user's compilation cache, where servers keep them.
"""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.accuracy import workload
from tests.accuracy.near_ties import greedy
from tests.accuracy.served_models import DENSE, ServedModel
from tests.accuracy.variants import SOME, Variant, variants
from tests.accuracy.workload import Outcome
from tests.live.live_server import LiveServer, live_server

MIN_SHARE_EQUAL = 0.999
MAX_ACCURACY_CHANGE = 0.01

CASES = [
    pytest.param(model, variant, id=f"{model.name}-{variant.name}") for model, variant in variants()
]


def test_retracted_requests_are_answered_as_by_the_reference(
    reference: Outcome, tmp_path: Path
) -> None:
    check_retracts(tmp_path, DENSE, SOME[0], reference)


@pytest.mark.long
@pytest.mark.parametrize(("model", "variant"), CASES)
def test_answers_are_the_same_with_and_without_retract(
    model: ServedModel,
    variant: Variant,
    reference_of: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    reference = reference_of(model)
    with live_server(tmp_path, *variant.flags, model=model.path) as server:
        calm = workload.run(server.url)
        assert calm.num_right >= model.min_accuracy * workload.NUM_QUESTIONS
        assert_same(server, calm, reference)
        assert_sound(server)
        assert server.get("/get_server_info")["counters"]["requests_force_retracted"] == 0
    check_retracts(tmp_path, model, variant, calm, reference)


def check_retracts(folder: Path, model: ServedModel, variant: Variant, *wanted: Outcome) -> None:
    """A server that retracts requests answers as `wanted`."""
    flags = (*variant.flags, *variant.retract_flags)
    with live_server(folder, *flags, model=model.path) as server:
        retracted = workload.run(server.url, len(wanted[0].replies))
        for each in wanted:
            assert_same(server, retracted, each)
        assert_sound(server)
        counters = server.get("/get_server_info")["counters"]
        assert counters["requests_force_retracted"] > workload.NUM_GENERATIONS, counters
        drafts = variant.speculation != "none"
        assert (counters["accepted_draft_tokens"] > 0) == drafts, counters
        assert (counters["evicted_pages"] > 0) == variant.radix, counters


def assert_same(server: LiveServer, outcome: Outcome, wanted: Outcome) -> None:
    """As many right answers, and the same tokens but for near ties."""
    asked = len(wanted.replies)
    print(f"{outcome.num_right} of {asked} right, {wanted.num_right} wanted")
    assert abs(outcome.num_right - wanted.num_right) <= max(1, MAX_ACCURACY_CHANGE * asked)
    differing = workload.num_differences(server.url, wanted, outcome)
    tokens = workload.num_output_tokens()
    print(f"{differing} of {tokens} tokens differ")
    assert differing <= (1 - MIN_SHARE_EQUAL) * tokens


def assert_sound(server: LiveServer) -> None:
    """Alive and at rest: all memory accounted for, all of it free after a flush, all compiled."""
    server.assert_nothing_leaked()
    server.assert_flush_frees_everything()
    # These servers do not warm up. The check of health gives a token 20 s, and on a busy machine
    # the program of a lone short request may take longer to compile.
    lone = {"input_ids": [1], "sampling_params": greedy(1)}
    httpx.post(f"{server.url}/generate", json=lone, timeout=240).raise_for_status()
    assert server.get("/health_generate") == {"status": "ready"}
    assert server.get("/get_server_info")["counters"]["compiles_after_ready"] == 0
