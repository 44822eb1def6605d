"""Checks client requests, and converts them to messages for the engine.

The limits here follow from the model and the engine's memory. Limits of names and numbers are in
`core/request_limits.py`.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.core.errors import ContextLengthError, InvalidRequestError
from sgl_jax.core.image_input import ImageInput, ImageSettings
from sgl_jax.core.messages import GenerateRequest, SessionTurn
from sgl_jax.core.request_limits import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    check_between,
    check_namespace,
    check_rid,
    check_session_id,
)
from sgl_jax.core.sampling_params import (
    LOGPROBS_MODES,
    MAX_LOGPROB_IDS,
    MAX_TOP_LOGPROBS,
    LogprobsMode,
    SamplingParams,
)
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.front.image_checks import check_placed, without_images
from sgl_jax.text.tokenizer import Tokenizer

# Practical upper bound on the factor by which a tokenizer's normalizer shortens a text (composes
# characters, merges spaces).
_MAX_NORMALIZER_SHRINK = 4
# English has 4 to 5 characters per token on average, indented code up to 8.
_MOST_CHARS_PER_TOKEN = 16
_MOST_HIDDEN_NUMBERS = 1 << 28  # of a prompt: a message has at most 2 GiB
_SHORT_PROMPT_CHARS = 65_536  # prompts up to this length may exceed that average


class EngineFacts(NamedTuple):
    """Facts of an `EngineInfo`, used to refuse requests that can never be served."""

    vocab_size: int
    max_context_len: int  # tokens of one request, prompt and output together
    max_request_tokens: int  # `max_context_len`, limited to a rank's KV memory
    dp_size: int
    max_running_requests: int  # over all ranks
    page_size: int
    num_layers: int
    experts_per_token: int  # 0 in a dense model
    hidden_size: int
    # Of images, see `EngineSizes`; 0: none are served.
    image_slots: int = 0
    max_images: int = 0
    max_image_tokens: int = 0
    image_token_side: int = 1

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "EngineFacts":
        return cls(*(int(info[name]) for name in cls._fields))

    @property
    def value_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a token's values, see `token_values.py`."""
        experts = (self.num_layers, self.experts_per_token)
        return {"routed_experts": experts, "hidden_states": (self.hidden_size,)}


class RequestChecks:
    """Checks against the limits of one engine. Thread-safe.

    With `strict_max_tokens` of `args`, an output limit that does not fit is refused instead of
    lowered. Requests without a mode of log-probabilities have that of `args`; "auto": the usual
    mode of the request's API.
    """

    def __init__(self, tokenizer: Tokenizer, facts: EngineFacts, args: ServerArgs) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._args = args

    @property
    def max_prompt_chars(self) -> int:
        """Return the maximum number of characters of a prompt. Longer prompts are not encoded.

        A longer prompt would have too many tokens. The longest tokens are runs of spaces or dashes,
        which no real text consists of, so a long prompt may have at most `_MOST_CHARS_PER_TOKEN`
        characters per token on average.
        """
        max_tokens = self._facts.max_request_tokens
        longest = max_tokens * self._tokenizer.longest_token_chars * _MAX_NORMALIZER_SHRINK
        return min(longest, _SHORT_PROMPT_CHARS + max_tokens * _MOST_CHARS_PER_TOKEN)

    def check_text(self, text: str) -> None:
        """Check a prompt before it is encoded.

        Raises `InvalidRequestError` if it is empty or too long, or the model has no tokenizer.
        """
        if not text:
            raise InvalidRequestError("the prompt is empty", "text")
        self.check_length(len(text))

    def check_length(self, num_chars: int) -> None:
        """Check a prompt's length in characters. Raises `InvalidRequestError` if it is too long."""
        self._tokenizer.check_can_encode()
        most = self.max_prompt_chars
        if num_chars > most:
            text = f"the {num_chars} characters of the prompt (at most {most} are taken)"
            raise ContextLengthError(text, self._facts.max_request_tokens, "text")

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raise `ContextLengthError` if a prompt leaves no room for an output."""
        most = self._facts.max_request_tokens
        if num_tokens >= most:
            raise ContextLengthError(
                f"{num_tokens} prompt tokens and the output", most, "input_ids"
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt. Raises `InvalidRequestError` if `check_text` fails."""
        self.check_text(text)
        return self._tokenizer.encode(text)

    def expand_images(self, text: str, settings: ImageSettings) -> str:
        """Return `text` with what the model's processor writes for each placeholder of an image."""
        return settings.expanded(text, self._tokenizer.text_of)

    def prepare(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        rid: str | None = None,
        default_max_new_tokens: int | None = None,
        token_ids_logprob: Sequence[int] = (),
        logprobs_mode: str | None = None,
        usual_logprobs_mode: str = "raw",
        session: SessionTurn | None = None,
        priority: int | None = None,
        **options: Any,
    ) -> GenerateRequest:
        """Build the message of a request after all checks that need neither engine state nor the
        grammar.

        Args:
            prompt_ids: token ids of the prompt; for a session's turn, without the history.
            sampling: sampling parameters as the client set them.
            rid: the client's name of the request; None: a new name.
            default_max_new_tokens: used if `sampling` sets no limit; None: the rest of the context.
                If the context has less room, this default is lowered, and without
                `--strict-max-tokens` also the client's limit. The engine does so for a session's
                turn, since only it has the history.
            token_ids_logprob: tokens to report wherever log-probabilities are reported.
            logprobs_mode: the distribution of log-probabilities; None: as `--logprobs-mode` says.
            usual_logprobs_mode: the mode of the request's API, for `--logprobs-mode auto`.
            session: set if the request is a session's turn.
            priority: None is 0.
            options: other fields of `GenerateRequest`.

        Raises:
            InvalidRequestError: names the invalid field and its allowed values.
        """
        self._check_prompt(prompt_ids, options.get("images", ()))
        checked = self._checked_sampling(sampling, len(prompt_ids), default_max_new_tokens)
        is_prompt_only = checked.max_new_tokens == 0
        if is_prompt_only:
            checked = msgspec.structs.replace(checked, max_new_tokens=1)
        rid = uuid.uuid4().hex if rid is None else rid
        check_rid(rid)
        request = GenerateRequest(
            rid=rid,
            input_ids=prompt_ids,
            sampling=checked,
            token_ids_logprob=list(token_ids_logprob),
            logprobs_mode=self._checked_mode(logprobs_mode, usual_logprobs_mode),
            session=None if session is None else self._checked_turn(session, rid),
            is_length_default=sampling.max_new_tokens is None or not self._args.strict_max_tokens,
            is_prompt_only=is_prompt_only,
            priority=priority or 0,
            **options,
        )
        self._check_options(request)
        return request

    def _checked_mode(self, given: str | None, usual: str) -> LogprobsMode:
        served = self._args.logprobs_mode
        mode = given or (usual if served == "auto" else served)
        for known in LOGPROBS_MODES:
            if mode == known:
                return known
        known_modes = ", ".join(LOGPROBS_MODES)
        raise InvalidRequestError(
            f"logprobs_mode must be one of {known_modes}, got {mode!r}", "logprobs_mode"
        )

    def _check_options(self, request: GenerateRequest) -> None:
        """Check all fields except prompt, sampling and session against the engine's limits."""
        check_between("top_logprobs_num", request.top_logprobs_num, 0, MAX_TOP_LOGPROBS)
        ids = request.token_ids_logprob
        if len(ids) > MAX_LOGPROB_IDS:
            raise InvalidRequestError(
                f"token_ids_logprob takes at most {MAX_LOGPROB_IDS} ids, got {len(ids)}",
                "token_ids_logprob",
            )
        for token in ids:
            check_between("token_ids_logprob", token, 0, self._facts.vocab_size - 1)
        if request.scores_output and request.session is not None:
            raise InvalidRequestError("a score is no turn of a session", "session_params")
        if request.return_hidden and not request.is_prompt_only:
            raise InvalidRequestError("return_hidden needs max_new_tokens 0", "return_hidden")
        # Positions include a turn's history, and only the engine has its length.
        is_turn = request.session is not None
        longest = self._facts.max_request_tokens if is_turn else len(request.input_ids)
        check_between("logprob_start_len", request.logprob_start_len, -1, longest)
        self._check_token_values(request, longest)
        if request.dp_rank is not None:
            check_between("dp_rank", request.dp_rank, 0, self._facts.dp_size - 1)
        check_namespace(request.namespace)
        check_between("priority", request.priority, MIN_PRIORITY, MAX_PRIORITY)

    def _check_token_values(self, request: GenerateRequest, longest: int) -> None:
        """Check the requested values of tokens, of a prompt of at most `longest` tokens."""
        needs, facts = "it needs a server with --enable-return", self._facts
        if request.return_routed_experts and not self._args.enable_return_routed_experts:
            has_experts = facts.experts_per_token > 0
            reason = f"{needs}-routed-experts" if has_experts else "the model has no experts"
            raise InvalidRequestError(f"return_routed_experts: {reason}", "return_routed_experts")
        check_between("routed_experts_start_len", request.routed_experts_start_len, 0, longest)
        if request.return_hidden_states:
            most = _MOST_HIDDEN_NUMBERS // facts.hidden_size
            if not self._args.enable_return_hidden_states:
                reason = f"{needs}-hidden-states"
            elif longest <= most:
                return
            else:
                reason = f"it takes a prompt of at most {most} tokens, not of up to {longest}"
            raise InvalidRequestError(f"return_hidden_states: {reason}", "return_hidden_states")

    def _checked_sampling(
        self, sampling: SamplingParams, num_prompt_tokens: int, default_max_new_tokens: int | None
    ) -> SamplingParams:
        room = self._facts.max_request_tokens - num_prompt_tokens
        if sampling.max_new_tokens is None:
            limit = room if default_max_new_tokens is None else min(default_max_new_tokens, room)
            limit = max(limit, min(sampling.min_new_tokens, room))
            sampling = msgspec.structs.replace(sampling, max_new_tokens=limit)
        sampling = sampling.checked(self._facts.vocab_size)
        assert sampling.max_new_tokens is not None
        if sampling.max_new_tokens <= room:
            return sampling
        name = "max_new_tokens" if self._args.strict_max_tokens else "min_new_tokens"
        asked = getattr(sampling, name)
        if asked > room:
            raise ContextLengthError(
                f"the prompt ({num_prompt_tokens} tokens) and {name} ({asked})",
                self._facts.max_request_tokens,
                name,
            )
        return msgspec.structs.replace(sampling, max_new_tokens=room)

    def _checked_turn(self, turn: SessionTurn, rid: str) -> SessionTurn:
        check_session_id(turn.id, "session_params.id")
        if turn.rid is not None:
            check_rid(turn.rid, "session_params.rid")
        most = self._facts.max_request_tokens
        check_between("session_params.offset", turn.offset, -most, most)
        return msgspec.structs.replace(turn, name=rid, bos_token_id=self._tokenizer.bos_token_id)

    def _check_prompt(self, prompt_ids: list[int], images: Sequence[ImageInput]) -> None:
        if not prompt_ids:
            raise InvalidRequestError("the prompt is empty", "input_ids")
        self.check_num_tokens(len(prompt_ids))
        texts = prompt_ids
        if images:
            check_placed(images, prompt_ids, self._facts)
            texts = without_images(prompt_ids, images)
        for token in (min(texts, default=0), max(texts, default=0)):
            if not 0 <= token < self._facts.vocab_size:
                raise InvalidRequestError(
                    f"the prompt holds token id {token}, outside the vocabulary "
                    f"[0, {self._facts.vocab_size})",
                    "input_ids",
                )


def scored_prompt(
    prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt of a request that scores `output_ids`, and its arguments of `prepare`.

    The last token is scored in place of the request's only output token, so that an output that
    fills the context can be scored.
    """
    if not prompt_ids or not output_ids:
        name = "output_ids" if prompt_ids else "input_ids"
        raise InvalidRequestError("a score needs a token before the output, and an output", name)
    return [*prompt_ids, *output_ids[:-1]], {
        "return_logprob": True,
        "scores_output": True,
        "logprob_start_len": len(prompt_ids),
        "token_ids_logprob": output_ids[-1:],
        "usual_logprobs_mode": "scaled",
    }


def output_scores(
    prompt_logprobs: Sequence[TokenLogprobs], logprobs: Sequence[TokenLogprobs]
) -> list[float]:
    """Return the scores that a request of `scored_prompt` reports."""
    scores = [each.logprob for each in prompt_logprobs if each.logprob is not None]
    return [*scores, *logprobs[0].id_logprobs]
