"""Results of the offline `Engine`, assembled from the chunks of a stream."""

import dataclasses

import numpy as np

from sgl_jax.core.engine_messages import FinishReason, TokenLogprobs
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import GRAMMAR_KINDS
from sgl_jax.core.step_plan import Float32Array, Int32Array
from sgl_jax.engine.front.request_stream import Chunk, RequestStream


@dataclasses.dataclass(frozen=True)
class Generation:
    """The output of one prompt (so far, while streaming).

    `logprobs` has one entry per output token, `prompt_logprobs` one per prompt token from
    `logprob_start_len` on; both are empty unless requested. For a session's turn, `rid` is the
    turn's name, and `num_prompt_tokens` includes the history. `weight_versions` has the first
    output token of each version of the weights; `has_old_kv` is True if KV of earlier weights was
    kept (`Engine.update_weights`).
    """

    text: str
    output_ids: list[int]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    cached_tokens: int
    dp_rank: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    rid: str
    weight_versions: tuple[tuple[int, str], ...] = ()
    has_old_kv: bool = False
    hidden: Float32Array | None = None  # [hidden_size], with `return_hidden`
    # [tokens, layers, top_k] at the end, with `return_routed_experts`: the experts of the tokens
    # from `routed_experts_start_len` to the last but one.
    routed_experts: Int32Array | None = None
    # [tokens, hidden_size] at the end, with `return_hidden_states`: of all tokens but the last.
    hidden_states: Float32Array | None = None


class GenerationError(RuntimeError):
    """A valid request ended without a result, for example because a step failed."""


def extended(so_far: Generation | None, chunk: Chunk, stream: RequestStream) -> Generation:
    """Return `so_far` with `chunk` added.

    A request that ends after some output because of its input, such as a grammar that became too
    costly, keeps that output with the finish reason `abort`: other prompts of the call continue.

    Raises:
        InvalidRequestError: a parameter, such as a grammar, cannot be served.
        GenerationError: a step failed, or the request was refused in the engine.
    """
    finish = chunk.finish
    has_output = bool(chunk.token_ids or (so_far and so_far.output_ids))
    if (
        finish is not None
        and finish.status_code is not None
        and not (has_output and finish.status_code < 500)
    ):
        reason = finish.message or "the engine gave up on the request"
        if finish.status_code == 400 and finish.param in GRAMMAR_KINDS:
            raise InvalidRequestError(reason, finish.param)
        raise GenerationError(reason)
    before = so_far or Generation(
        "", [], None, stream.num_prompt_tokens, 0, 0, [], [], stream.client_rid
    )
    return dataclasses.replace(
        before,
        text=before.text + chunk.text,
        output_ids=before.output_ids + chunk.token_ids,
        finish_reason=chunk.finish,
        cached_tokens=stream.cached_tokens,
        hidden=None if stream.hidden is None else np.frombuffer(stream.hidden, "<f4"),
        routed_experts=None if finish is None else stream.routed_experts,
        hidden_states=None if finish is None else stream.hidden_states,
        dp_rank=stream.dp_rank,
        weight_versions=tuple(stream.weight_versions),
        has_old_kv=stream.has_old_kv,
        logprobs=before.logprobs + chunk.logprobs,
        prompt_logprobs=before.prompt_logprobs + chunk.prompt_logprobs,
    )
