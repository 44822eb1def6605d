"""Malformed HTTP from raw sockets does not show in answers, log or memory of the real server."""

from pathlib import Path

import pytest

from tests.hostile.http_fuzz import FLAGS, HttpFuzz
from tests.live.live_server import live_server

NUM_REQUESTS, NUM_LONG = 100, 10_000


def fuzz(folder: Path, num_requests: int, seed: int) -> HttpFuzz:
    with live_server(folder, *FLAGS, is_quickly_compiled=True) as server:
        run = HttpFuzz(server, seed)
        run.run(num_requests)
    print(run.summary())
    assert not run.failures, run.summary()
    return run


@pytest.mark.long
def test_a_hundred_malformed_requests_do_no_harm(tmp_path: Path) -> None:
    run = fuzz(tmp_path, NUM_REQUESTS, seed=2)
    assert run.num_sent == NUM_REQUESTS
    # Some were right after all, and the others were refused in several ways.
    assert {200, 400, 404, 405} <= run.statuses.keys()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_malformed_requests_do_no_harm(tmp_path: Path) -> None:
    fuzz(tmp_path, NUM_LONG, seed=1)
