"""Limits on names and numbers in requests, checked before a request reaches the engine.

Each check raises `InvalidRequestError` with the field and its allowed values. The ranges of
sampling parameters are in `sampling_params.py`.
"""

from typing import Any

from sgl_jax.core.errors import InvalidRequestError

MAX_RID_CHARS = 256
MAX_NAMESPACE_CHARS = 256
MAX_SESSION_ID_CHARS = 256
MAX_PATH_CHARS = 1024
MAX_USER_CHARS = 256
MAX_OWNER_CHARS = 4096  # prefix that separates the sessions of different callers
INT32 = 2**31  # bound of counts and offsets, exclusive
MIN_PRIORITY, MAX_PRIORITY = -INT32, INT32 - 1
MAX_CHOICES = 128  # outputs per prompt
MAX_REQUESTS_PER_CALL = 1024  # engine requests per HTTP request: prompts times choices


def check_rid(rid: str, param: str = "rid") -> None:
    _check_length("rid", rid, MAX_RID_CHARS, param)


def check_session_id(session_id: str, param: str = "session_id") -> None:
    most = MAX_SESSION_ID_CHARS + MAX_OWNER_CHARS
    _check_length("a session's id", session_id, most, param)


def one_namespace(extra_key: str | None, cache_salt: str | None) -> str:
    """Return the namespace from either field, or "" if neither is set. Raises `InvalidRequestError`
    if both are set and differ."""
    if extra_key and cache_salt and extra_key != cache_salt:
        raise InvalidRequestError(
            "extra_key and cache_salt both name the namespace of cached prefixes: send one of them",
            "extra_key",
        )
    return extra_key or cache_salt or ""


def for_each(name: str, given: Any, num_prompts: int) -> list[Any]:
    """Return the value of field `name` for each prompt, from a list or one value for all. Raises
    `InvalidRequestError` if the list does not have `num_prompts` entries."""
    each = list(given) if isinstance(given, list | tuple) else [given] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequestError(f"{name} has {len(each)} entries for {num_prompts} prompts", name)
    return each


def check_num_requests(num_prompts: int, num_choices: int, param: str) -> None:
    """Raise InvalidRequestError if one HTTP request makes too many engine requests, or none."""
    if not 1 <= num_prompts * num_choices <= MAX_REQUESTS_PER_CALL:
        raise InvalidRequestError(
            f"prompts times n must be 1 to {MAX_REQUESTS_PER_CALL}, "
            f"got {num_prompts} x {num_choices}",
            param,
        )


def check_namespace(namespace: str) -> None:
    if len(namespace) > MAX_NAMESPACE_CHARS:
        raise InvalidRequestError(
            f"a namespace (cache_salt, extra_key) must have at most {MAX_NAMESPACE_CHARS} "
            f"characters, got {len(namespace)}",
            "namespace",
        )
    if any("\ud800" <= char <= "\udfff" for char in namespace):
        raise InvalidRequestError(
            "a namespace (cache_salt, extra_key) must be valid Unicode, without lone surrogates",
            "namespace",
        )


def check_between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", name)


def _check_length(noun: str, name: str, most: int, param: str) -> None:
    if not 1 <= len(name) <= most:
        raise InvalidRequestError(
            f"{noun} must have 1 to {most} characters, got {len(name)}", param
        )
