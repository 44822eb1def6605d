"""Converts the input forms accepted by the offline `Engine` to one form."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import SessionTurn
from sgl_jax.core.request_limits import check_session_id, for_each, one_namespace
from sgl_jax.core.sampling_params import SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]
Sampling = SamplingParams | Mapping[str, Any] | None


def as_new_id(given: str | None) -> str:
    """Return `given`, or a new id if None. Raises `InvalidRequestError` if it is invalid."""
    name = uuid.uuid4().hex if given is None else given
    check_session_id(name)
    return name


def as_options(options: Mapping[str, Any], num_prompts: int) -> list[dict[str, Any]]:
    """Convert options of `Engine.generate` to arguments of `RequestChecks.prepare` for each prompt.

    Raises `InvalidRequestError`.
    """
    shared = dict(options)
    shared["session"] = _as_turn(shared.pop("session_params", None), num_prompts)
    extra_keys = _as_each("extra_key", shared.pop("extra_key", None), str, num_prompts)
    cache_salts = _as_each("cache_salt", shared.pop("cache_salt", None), str, num_prompts)
    priorities = _as_each("priority", shared.pop("priority", None), int, num_prompts)
    return [
        {**shared, "namespace": one_namespace(extra_key, cache_salt), "priority": priority}
        for extra_key, cache_salt, priority in zip(extra_keys, cache_salts, priorities, strict=True)
    ]


def _as_each(name: str, given: Any, kind: type[T], num_prompts: int) -> list[T | None]:
    each = for_each(name, given, num_prompts)
    for value in each:
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise InvalidRequestError(
                f"{name} must be {kind.__name__} or a list of them, got {value!r}", name
            )
    return each


def _as_turn(given: SessionTurn | Mapping[str, Any] | None, num_prompts: int) -> SessionTurn | None:
    turn = None if given is None else as_struct(given, SessionTurn, "session_params")
    if turn is not None and num_prompts != 1:
        raise InvalidRequestError(
            f"a session takes one prompt at a time, got {num_prompts}", "session_params"
        )
    return turn


def as_batch(
    prompts: str | Sequence[Prompt] | None,
    sampling_params: Sampling | Sequence[Sampling],
    input_ids: Sequence[Sequence[int]] | None,
) -> tuple[list[Prompt], list[Sampling]]:
    """Return prompts and sampling parameters, equally many. Raises `InvalidRequestError`."""
    if (prompts is None) == (input_ids is None):
        raise InvalidRequestError("give either prompts or input_ids", "prompts")
    batch: list[Prompt] = (
        [prompts] if isinstance(prompts, str) else list(prompts or input_ids or ())
    )
    if any(isinstance(prompt, int) for prompt in batch):
        raise InvalidRequestError(
            "a prompt is a string or a list of token ids; give a list of prompts: [[1, 2, 3]]",
            "prompts" if prompts is not None else "input_ids",
        )
    if isinstance(sampling_params, SamplingParams | Mapping) or sampling_params is None:
        return batch, [sampling_params] * len(batch)
    if len(sampling_params) != len(batch):
        raise InvalidRequestError(
            f"{len(sampling_params)} sampling_params for {len(batch)} prompts", "sampling_params"
        )
    return batch, list(sampling_params)


def as_struct(given: Any, kind: type[T], param: str) -> T:
    """Convert a struct or a mapping of its fields to a struct. Raises `InvalidRequestError`."""
    if isinstance(given, kind):
        return given
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), param) from error
