"""How one request wants its tokens chosen and when it wants to stop."""

import math

import msgspec

from sgl_jax.core.errors import InvalidRequestError

# Limits are part of the compiled step: the device keeps this many slots per request.
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request; defaults leave the model's distribution untouched.

    Args:
        max_new_tokens: tokens to generate at most; None means as many as the context allows.
        min_new_tokens: until this many were generated, stop tokens cannot be sampled.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        repetition_penalty: above 1 discourages tokens of the prompt and the output (CTRL paper,
            arXiv 1909.05858).
        frequency_penalty: subtracted once per earlier occurrence in the output, in [-2, 2].
        presence_penalty: subtracted once if the token occurred in the output, in [-2, 2].
        logit_bias: token id -> added to its logit, each in [-100, 100].
        seed: same request and seed, same answer, whatever else is in the batch; None draws one.
        stop: strings that end the output.
        stop_token_ids: token ids that end the output, beside the model's own.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        no_stop_trim: keep the stop string or stop token in the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError`, naming the field, if any value is outside its range."""
        _check_range("temperature", self.temperature, 0.0, 1e4)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 1e4, open_low=True)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.top_k not in (-1, 0) and not 1 <= self.top_k < 2**31:
            raise InvalidRequestError(
                f"top_k must be -1 (all) or in [1, 2**31), got {self.top_k}", "top_k"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidRequestError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens}", "max_new_tokens"
            )
        if self.min_new_tokens < 0:
            raise InvalidRequestError(
                f"min_new_tokens must not be negative, got {self.min_new_tokens}", "min_new_tokens"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens "
                f"({self.max_new_tokens})",
                "min_new_tokens",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequestError(f"seed must fit in 64 bits, got {self.seed}", "seed")
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop"
            )
        if any(not s for s in self.stop):
            raise InvalidRequestError("a stop string must not be empty", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS // 2:
            raise InvalidRequestError(
                f"at most {MAX_STOP_TOKEN_IDS // 2} stop_token_ids, got {len(self.stop_token_ids)}",
                "stop_token_ids",
            )
        _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def _validate_logit_bias(self, vocab_size: int) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"at most {MAX_LOGIT_BIAS} entries in logit_bias, got {len(bias)}", "logit_bias"
            )
        _check_token_ids("logit_bias", tuple(bias), vocab_size)
        for value in bias.values():
            _check_range("logit_bias", value, -100.0, 100.0)


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    inside = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", name)


def _check_token_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{name} holds {token}, outside the vocabulary [0, {vocab_size})", name
            )
