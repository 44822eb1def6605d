"""X-Request-ID: taken, made, returned and logged."""

import logging

import pytest

from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio
LOGGER = "sgl_jax.server.guards.request_ids"


async def test_a_given_id_is_returned(rig: Rig) -> None:
    answer = await rig.http.get("/health", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("given", [None, "", "with space", "x" * 129, "\xe9"])
async def test_without_a_valid_one_each_answer_has_an_id_of_its_own(
    rig: Rig, given: str | None
) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    answers = [await rig.http.get("/health", headers=headers) for _ in range(2)]  # type: ignore[arg-type]
    first, second = (answer.headers["x-request-id"] for answer in answers)
    assert first != second
    assert given not in (first, second)


@pytest.mark.parametrize("path", ["/nope", "/generate", "/v1/models/nope"])
async def test_refusals_have_it_too(rig: Rig, path: str) -> None:
    answer = await rig.http.get(path, headers={"x-request-id": "abc-2"})
    assert answer.status_code >= 400
    assert answer.headers["x-request-id"] == "abc-2"


async def test_a_stream_has_it(rig: Rig) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    answer = await rig.http.post("/v1/completions", json=body, headers={"x-request-id": "abc-3"})
    assert answer.headers["x-request-id"] == "abc-3"
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_line_is_logged_for_each_request(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        await rig.http.get("/nope?key=secret")
    (line,) = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert line.startswith("GET /nope 404 ")
    assert "secret" not in line


async def test_metrics_answer_to_head(rig: Rig) -> None:
    answer = await rig.http.head("/metrics")
    assert (answer.status_code, answer.text) == (200, "")
