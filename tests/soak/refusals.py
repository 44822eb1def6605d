"""What a server under faults may answer instead of an answer: a 503 that says what was wrong."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from tests.accuracy.workload import TIMEOUT_S

# Of a server that lives. `engine_dead` and `shutting_down` are not among them.
CODES = frozenset({"queue_full", "engine_stuck", "text_worker", "text_timeout"})
_MAX_TRIES = 600
_RETRY_S = 0.1


class RefusedError(Exception):
    """The server said that it cannot serve this now; the message is the `code` of its error."""


def check_refusal(error: Mapping[str, Any]) -> None:
    """Raise `RefusedError` for an error object that may be, AssertionError for any other."""
    assert error["message"], error
    assert error["code"] in CODES, error
    raise RefusedError(error["code"])


def described(error: BaseException) -> str:
    """The error in words, with what caused it: those of httpx often say nothing themselves."""
    text = f"{type(error).__name__}: {error}"
    return text if error.__cause__ is None else f"{text} ({error.__cause__!r})"


async def _raise_if_refused(answer: httpx.Response) -> None:
    if answer.status_code == 503:
        await answer.aread()
        check_refusal(answer.json()["error"])


def strict_client(url: str) -> httpx.AsyncClient:
    """A client whose requests raise `RefusedError` for a 503."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=None),
        event_hooks={"response": [_raise_if_refused]},
    )


class _PatientTransport(httpx.AsyncHTTPTransport):
    """Sends again what was refused for now."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(_MAX_TRIES):
            answer = await super().handle_async_request(request)
            if answer.status_code != 503:
                return answer
            await answer.aclose()
            await asyncio.sleep(_RETRY_S)
        raise httpx.ReadTimeout("refused again and again", request=request)


def patient_client(url: str) -> httpx.AsyncClient:
    """A client that finds out what is right, however long that takes."""
    transport = _PatientTransport(limits=httpx.Limits(max_connections=None))
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, transport=transport)
