"""What callers of the offline `Engine` hand in, in the many forms they may, made one."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import SessionTurn
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.request_limits import check_session_id

Prompt = str | Sequence[int]
Sampling = SamplingParams | Mapping[str, Any] | None


def as_new_id(given: str | None) -> str:
    """`given`, or a new id. Raises `InvalidRequestError` if it cannot name a session."""
    name = uuid.uuid4().hex if given is None else given
    check_session_id(name)
    return name


def as_turn(given: SessionTurn | Mapping[str, Any] | None, num_prompts: int) -> SessionTurn | None:
    """The turn that a request is, if any; it has one prompt. Raises `InvalidRequestError`."""
    if given is None or isinstance(given, SessionTurn):
        turn = given
    else:
        try:
            turn = msgspec.convert(dict(given), SessionTurn)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(str(error), "session_params") from error
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
    """Prompts and their sampling parameters, as many. Raises `InvalidRequestError`."""
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


def as_sampling(sampling: Sampling) -> SamplingParams:
    """As a struct. Raises `InvalidRequestError`."""
    if isinstance(sampling, SamplingParams):
        return sampling
    try:
        return msgspec.convert(dict(sampling or {}), SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), "sampling_params") from error
