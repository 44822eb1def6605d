"""Limits on what clients may name and number, checked before the engine sees it.

Each check raises `InvalidRequestError` that names the field and what is allowed.
"""

from sgl_jax.core.errors import InvalidRequestError

MAX_RID_CHARS = 256
MAX_SESSION_ID_CHARS = 256


def check_rid(rid: str, param: str = "rid") -> None:
    """It can name a request."""
    _check_length("rid", rid, MAX_RID_CHARS, param)


def check_session_id(session_id: str, param: str = "session_id") -> None:
    """It can name a session."""
    _check_length("a session's id", session_id, MAX_SESSION_ID_CHARS, param)


def check_between(name: str, value: int, low: int, high: int) -> None:
    """It is in [low, high]."""
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", name)


def _check_length(what: str, name: str, most: int, param: str) -> None:
    if not 1 <= len(name) <= most:
        raise InvalidRequestError(
            f"{what} must have 1 to {most} characters, got {len(name)}", param
        )
