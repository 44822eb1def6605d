"""Names each HTTP request in its answer, log lines and trace, and logs a line for each."""

import logging
import re
import time
import uuid
from contextlib import nullcontext
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_jax.core.log_lines import request_id

if TYPE_CHECKING:
    from sgl_jax.engine.front.request_spans import RequestTracer  # its libraries may be missing

logger = logging.getLogger(__name__)
HEADER = "x-request-id"
_VALID = re.compile(r"[!-~]{1,128}")


class RequestIdMiddleware:
    """Takes the id given by the client or its proxy (1 to 128 printable ASCII characters without
    spaces), or generates one, and returns it in the same header.

    With `logs_access`, logs method, path, status and seconds of each request after its answer. With
    a `tracer`, continues the trace of the client or proxy.
    """

    def __init__(self, app: ASGIApp, *, logs_access: bool, tracer: "RequestTracer | None") -> None:
        self._app = app
        self._logs_access = logs_access
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        name = given if _VALID.fullmatch(given) else uuid.uuid4().hex
        status, started = 0, time.perf_counter()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        token = request_id.set(name)
        try:
            with nullcontext() if self._tracer is None else self._tracer.continued(headers):
                await self._app(scope, receive, send_named)
        finally:
            if self._logs_access:
                seconds = time.perf_counter() - started
                logger.info("%s %s %d %.3f s", scope["method"], scope["path"], status, seconds)
            request_id.reset(token)
