"""What `/health` answers at each point of a server's life.

    starting   503   the engine loads and compiles
    ready      200
    paused     200   requests are taken, and wait until generation is continued
    stuck      503   the engine's process is silent: stopped, or swapped out
    draining   503   the server finishes what runs, and ends
    dead       503   the engine has ended; the server ends, too

The code of the error says the same to programs that read errors.
"""

from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_jax.engine.health import EngineHealth
from sgl_jax.server.errors import ApiError, ErrorBody, error_body, error_response, to_api_error

_JSON = "application/json"
_STATUS_OF_CODE = {
    "starting": "starting",
    "engine_stuck": "stuck",
    "shutting_down": "draining",
    "engine_dead": "dead",
}


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`since`: when a stuck engine fell silent, ISO 8601 in UTC."""

    status: str
    since: str | None = None
    error: ErrorBody | None = None


def health_answer(
    check: Callable[[], None], health: EngineHealth, *, is_paused: bool = False
) -> Response:
    """200 if `check` passes; else what it raises, in words and with since when."""
    try:
        check()
    except Exception as raised:
        error = to_api_error(raised)
        if error.code not in _STATUS_OF_CODE:
            raise
        since = health.stuck_since
        body = Health(
            _STATUS_OF_CODE[error.code],
            None if since is None else since.isoformat(timespec="seconds"),
            error_body(error),
        )
        headers = dict(error.headers or {})
        return Response(msgspec.json.encode(body), error.status_code, headers, _JSON)
    status = "paused" if is_paused else "ready"
    return Response(msgspec.json.encode(Health(status)), media_type=_JSON)


class Gate:
    """The application as uvicorn sees it: refuses everything until `open` says what to serve.

    So a client is told that the server is starting, rather than waiting for an answer.
    """

    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """From now on requests are `app`'s."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            await health_answer(self._refuse, self._health)(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(_starting(), scope["path"])(scope, receive, send)

    def _refuse(self) -> None:
        self._health.check()
        raise _starting()


def _starting() -> ApiError:
    return ApiError(503, "the server is starting: the engine loads and compiles", code="starting")
