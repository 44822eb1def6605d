"""How long a request may become: what it asks for, held against what one request can hold."""

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.errors import ContextLengthError, InvalidRequestError
from sgl_jax.core.messages import GenerateRequest


def max_request_len(
    message: GenerateRequest, prompt_len: int, sizes: EngineSizes, capacity: int = 0
) -> int:
    """Prompt and output tokens at most. Raises `InvalidRequestError` if it cannot be served.

    `prompt_len` counts the history of a session, which the front did not know when it put in a
    length that its client had not asked for: that gives way (`is_length_default`). `capacity` is
    how many tokens that session may hold; 0 for no limit of its own.
    """
    limit = min(sizes.max_request_tokens, capacity or sizes.max_request_tokens)
    if prompt_len == 0:
        raise InvalidRequestError("the prompt is empty", "input_ids")
    if message.dp_rank is not None and not 0 <= message.dp_rank < sizes.dp_size:
        raise InvalidRequestError(
            f"dp_rank must be in [0, {sizes.dp_size}), got {message.dp_rank}", "dp_rank"
        )
    wanted, least = message.sampling.max_new_tokens, 1
    if wanted is None or message.is_length_default:
        least = max(message.sampling.min_new_tokens, 1)
        wanted = min(wanted or limit, max(limit - prompt_len, least))
    if prompt_len + wanted > limit:
        raise ContextLengthError(
            f"{prompt_len} prompt tokens and {wanted} to generate",
            limit,
            "max_new_tokens" if prompt_len < limit else "input_ids",
            is_session=limit < sizes.max_request_tokens,
        )
    if message.logprob_start_len > prompt_len:
        raise InvalidRequestError(
            f"logprob_start_len must be in [-1, {prompt_len}], the length of the prompt, got "
            f"{message.logprob_start_len}",
            "logprob_start_len",
        )
    return prompt_len + wanted
