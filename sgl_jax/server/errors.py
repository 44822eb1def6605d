"""Maps exceptions to HTTP error responses.

Every refusal and failure has the form `{"error": {"message", "type", "param", "code"}}`, or on
Anthropic's routes `{"type": "error", "error": {"type", "message"}}`. Must never show a traceback,
or return the client's data to it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.errors import (
    EngineDeadError,
    EngineStuckError,
    InvalidRequestError,
    QueueFullError,
    ShuttingDownError,
    TenantQueueFullError,
)

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1
# Errors after which a client may retry: the status, and the `code` for programs.
_UNAVAILABLE: Mapping[type[Exception], tuple[int, str]] = {
    EngineDeadError: (503, "engine_dead"),
    EngineStuckError: (503, "engine_stuck"),
    QueueFullError: (503, "queue_full"),
    ShuttingDownError: (503, "shutting_down"),
    TenantQueueFullError: (429, "tenant_queue_full"),
}
# Prefix of Anthropic's routes.
MESSAGES_PATH = "/v1/messages"
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Invalid field -> details with which Anthropic's tool runner retries without the field.
_MESSAGES_DETAILS = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}
# Pydantic includes union branches in the path of an error; they are hidden from clients.
_UNION_BRANCH = re.compile(r"^(str|int|float|bool|constrained-.*|list\[.*|dict\[.*|[A-Z]\w*)$")


class ErrorBody(msgspec.Struct, frozen=True):
    """The reason; `param` is the invalid field, `code` a name for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The envelope of every 4xx and 5xx answer, and of an error event within a stream."""

    error: ErrorBody


class MessagesErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason, with a type of Anthropic's API; `details` are for programs."""

    type: str
    message: str
    details: Mapping[str, Any] | None = None


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The envelope on Anthropic's routes."""

    error: MessagesErrorBody


class ApiError(HTTPException):
    """An answer other than 200, with all fields of the envelope."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if status_code in (429, 503) and headers is None:
            headers = {"retry-after": str(RETRY_AFTER_S)}
        super().__init__(status_code, message, headers)
        self.param = param
        self.code = code


def to_api_error(error: Exception) -> ApiError:
    """Return the answer for `error`. An unknown exception is a defect of the server, a 500."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            return _from_validation(error.errors())
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
    for kind, (status, code) in _UNAVAILABLE.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, "the server failed on this request; see its log")


def abort_error(
    finish: FinishReason, names: Mapping[str, str], for_client: Callable[[str], str]
) -> ApiError | None:
    """Return the error of an abort with an HTTP status, or None for an abort without a status.

    `names` maps engine fields to the client's; `for_client` converts the engine's message.
    """
    if finish.type != "abort" or finish.status_code is None:
        return None
    code = {400: "invalid_value", 503: "queue_full", 504: "timeout"}.get(finish.status_code)
    error = InvalidRequestError(
        for_client(finish.message or "the request was aborted"), finish.param
    )
    _rename(error, names)
    return ApiError(finish.status_code, str(error), param=error.param, code=finish.code or code)


def refuse_abort(finish: FinishReason | None) -> None:
    """Raise `ApiError` 503 for an abort, in APIs without such a finish reason."""
    if finish is not None and finish.type == "abort":
        raise ApiError(503, finish.message or "the request was aborted", code="aborted")


def error_body(error: ApiError) -> ErrorBody:
    other = "invalid_request_error" if error.status_code < 500 else "server_error"
    kind = "rate_limit_error" if error.status_code == 429 else other
    return ErrorBody(str(error.detail), kind, error.param, error.code)


def envelope(error: ApiError) -> bytes:
    return msgspec.json.encode(ErrorResponse(error_body(error)))


def messages_error(error: ApiError) -> MessagesError:
    """Convert an error for Anthropic's clients. The message names the invalid field."""
    status, message = error.status_code, str(error.detail)
    other = "invalid_request_error" if status < 500 else "api_error"
    kind, details = _MESSAGES_KINDS.get(status, other), _MESSAGES_DETAILS.get(error.param or "")
    return MessagesError(MessagesErrorBody(kind, message, details))


def is_of_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_response(error: ApiError, path: str) -> Response:
    body = msgspec.json.encode(messages_error(error)) if is_of_messages(path) else envelope(error)
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` send all errors in the envelope."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = to_api_error(error)
        path = request.url.path
        if answer.status_code == 405:
            # Each method is a separate route, and a plain 405 names only the first.
            routes = [each for each in app.routes if isinstance(each, APIRoute)]
            allowed = [m for route in routes if route.path == path for m in route.methods or ()]
            answer.headers = {"allow": ", ".join(allowed)} if allowed else answer.headers
        if answer.status_code == 500:
            logger.error("%s %r failed", request.method, path, exc_info=error)
        return error_response(answer, path)

    kinds = (HTTPException, RequestValidationError, InvalidRequestError)
    for kind in (*kinds, *_UNAVAILABLE, Exception):
        app.add_exception_handler(kind, handle)


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors raised inside the context to the client's names."""
    try:
        yield
    except InvalidRequestError as error:
        _rename(error, names)
        raise


def _rename(error: InvalidRequestError, names: Mapping[str, str]) -> None:
    ours = error.param
    if ours is not None and ours in names:
        error.param = names[ours]
        error.args = (str(error).replace(ours, error.param.rpartition(".")[2]),)


def _from_validation(errors: Sequence[Any]) -> ApiError:
    """Return a sentence about the deepest error in pydantic's list. In a union, the branch with the
    value's type has the useful error, and a list that is too long was not looked at further."""
    worst = max(errors, key=_usefulness)
    path = field_path(worst["loc"])
    cause = worst.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):  # raised by a check of the object at `path`
        names = (path, cause.param)
        cause.param = ".".join(filter(None, names)) or None
        return to_api_error(cause)
    reason = str(worst["msg"]).removeprefix("Value error, ")
    if worst["type"] == "extra_forbidden":
        reason = "this field is unknown or not supported"
    if worst["loc"] == ("body",):
        reason = f"the body must be a JSON object with content type application/json: {reason}"
    return ApiError(400, f"{path}: {reason}" if path else reason, param=path, code="invalid_value")


def _usefulness(error: Any) -> tuple[bool, int, bool]:
    kind = str(error["type"])
    return kind == "too_long", len(error["loc"]), not kind.endswith("_type")


def field_path(location: Sequence[str | int]) -> str | None:
    """Return "messages[0].content" for ("body", "messages", 0, "content"), None for the body."""
    path = ""
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _UNION_BRANCH.match(step):
            path += f".{step}" if path else step
    return path or None
