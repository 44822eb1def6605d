"""What SGLang tells of an answer beside its text: `meta_info`."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import RequestStream

NativeLogprob = tuple[float | None, int, str | None]  # log-probability, token id, text


class MetaInfo(Struct, frozen=True):
    """What is to be known of an answer beside its text. `e2e_latency` in seconds, at the end."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: dict[str, int | str | None] | None
    dp_rank: int
    e2e_latency: float | UnsetType = UNSET
    output_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    input_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET


def describe(
    stream: RequestStream, num_tokens: int, finish: FinishReason | None, **logprobs: Any
) -> MetaInfo:
    """Of `stream`, after `num_tokens` output tokens; `logprobs` are fields of `MetaInfo`."""
    return MetaInfo(
        id=stream.client_rid,
        prompt_tokens=stream.num_prompt_tokens,
        completion_tokens=num_tokens,
        cached_tokens=stream.cached_tokens,
        finish_reason=None if finish is None else _finish(finish, num_tokens),
        dp_rank=stream.dp_rank,
        e2e_latency=UNSET if finish is None else stream.e2e_latency_s,
        **logprobs,
    )


def _finish(finish: FinishReason, num_tokens: int) -> dict[str, int | str | None]:
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": num_tokens}
    return {"type": "abort", "message": finish.message}
