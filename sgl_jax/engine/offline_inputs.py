"""Checks the inputs of the offline `Engine`, and converts their forms to one form."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import OpenSession, SessionTurn
from sgl_jax.core.request_limits import (
    MAX_CHOICES,
    check_namespace,
    check_session_id,
    for_each,
    one_namespace,
)
from sgl_jax.core.sampling_params import RANDOM_SEED, SamplingParams, choice_seed
from sgl_jax.engine.front.request_checks import scored_prompt

T = TypeVar("T")
Prompt = str | Sequence[int]
Sampling = SamplingParams | Mapping[str, Any] | None
Batch = tuple[list[Prompt], list[Sampling], list[Mapping[str, Any]]]


def as_new_id(given: str | None) -> str:
    """Return `given`, or a new id if None. Raises `InvalidRequestError` if it is invalid."""
    name = uuid.uuid4().hex if given is None else given
    check_session_id(name)
    return name


def check_opening(opening: OpenSession) -> None:
    """Raise InvalidRequestError if the namespace, `capacity_of_str_len` or `timeout` is invalid."""
    check_namespace(opening.namespace)
    capacity, timeout = opening.capacity_of_str_len, opening.timeout_s
    if capacity < 0 or (timeout is not None and not timeout > 0):
        raise InvalidRequestError(
            f"capacity_of_str_len must be at least 0 and timeout above 0, got {capacity} "
            f"and {timeout}",
            "timeout" if capacity >= 0 else "capacity_of_str_len",
        )


def as_options(options: Mapping[str, Any], num_prompts: int) -> list[dict[str, Any]]:
    """Convert options of `Engine.generate` to arguments of `RequestChecks.prepare` for each prompt.

    Raises `InvalidRequestError`.
    """
    shared = dict(options)
    images = _as_images(shared.pop("image_data", None), num_prompts)
    shared["session"] = _as_turn(shared.pop("session_params", None), num_prompts)
    kinds = {"extra_key": str, "cache_salt": str, "priority": int, "routed_experts_start_len": int}
    columns = [
        _as_each(name, shared.pop(name, None), kind, num_prompts) for name, kind in kinds.items()
    ]
    return [
        {
            **shared,
            "namespace": one_namespace(extra_key, cache_salt),
            "priority": priority,
            "routed_experts_start_len": start or 0,
            "image_data": own,
        }
        for own, (extra_key, cache_salt, priority, start) in zip(
            images, zip(*columns, strict=True), strict=True
        )
    ]


def _as_images(given: Any, num_prompts: int) -> list[list[Any]]:
    """Return the images of each prompt: one, a list for a single prompt, or a list for each."""
    if given is None:
        return [[]] * num_prompts
    if not isinstance(given, list | tuple):
        given = [given]
    if num_prompts == 1 and not any(isinstance(each, list | tuple) for each in given):
        return [list(given)]
    if len(given) != num_prompts:
        raise InvalidRequestError(
            f"{len(given)} lists of images for {num_prompts} prompts", "image_data"
        )
    return [
        list(each) if isinstance(each, list | tuple) else [] if each is None else [each]
        for each in given
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
    options: Mapping[str, Any],
) -> Batch:
    """Return prompts, sampling parameters and options of `Engine.generate`, equally many: one of
    each per sample. Raises `InvalidRequestError`."""
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
        sampling_params = [sampling_params] * len(batch)
    if len(sampling_params) != len(batch):
        raise InvalidRequestError(
            f"{len(sampling_params)} sampling_params for {len(batch)} prompts", "sampling_params"
        )
    return _as_samples(batch, sampling_params, as_options(options, len(batch)))


def _as_samples(
    batch: Sequence[Prompt], params: Sequence[Sampling], options: Sequence[Mapping[str, Any]]
) -> Batch:
    """Repeat each prompt as often as `n` in the mapping of its sampling parameters says, each time
    with another seed. Raises `InvalidRequestError`."""
    prompts, samplings, owns = list[Prompt](), list[Sampling](), list[Mapping[str, Any]]()
    for prompt, sampling, own in zip(batch, params, options, strict=True):
        given = dict(sampling) if isinstance(sampling, Mapping) else {}
        count, seed = given.pop("n", 1), given.get("seed", RANDOM_SEED)
        is_allowed = isinstance(count, int) and 1 <= count <= MAX_CHOICES
        if not is_allowed or (own["session"] is not None and count > 1):
            text = f"n must be 1 to {MAX_CHOICES}, and 1 for a session's turn, got {count!r}"
            raise InvalidRequestError(text, "n")
        is_random = seed is None or seed == RANDOM_SEED
        for choice in range(count):
            one = given if is_random else given | {"seed": choice_seed(seed, choice)}
            samplings.append(one if isinstance(sampling, Mapping) else sampling)
        prompts += [prompt] * count
        owns += [own] * count
    return prompts, samplings, owns


def as_scored(
    prompt_ids: Sequence[Sequence[int]],
    output_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    options: Mapping[str, Any],
) -> Batch:
    """Return prompts, sampling parameters and options of `Engine.score`, one of each per output.
    Raises `InvalidRequestError`."""
    prompts, owns = list[Prompt](), list[Mapping[str, Any]]()
    shared = as_options(options, len(prompt_ids))
    for prompt, output, own in zip(prompt_ids, output_ids, shared, strict=True):
        ids, scored = scored_prompt(prompt, output)
        prompts.append(ids)
        owns.append(own | scored)
    return prompts, [msgspec.structs.replace(sampling, max_new_tokens=1)] * len(prompts), owns


def as_struct(given: Any, kind: type[T], param: str) -> T:
    """Convert a struct or a mapping of its fields to a struct. Raises `InvalidRequestError`."""
    if isinstance(given, kind):
        return given
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), param) from error
