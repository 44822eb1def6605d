"""Sampling parameters of a request and their ranges.

The request bodies of all HTTP APIs and `SamplingParams.checked` use the same ranges (`RANGES`). The
device computes in float32: values too close to a limit for float32 are replaced by the limit in
`checked`.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import GRAMMAR_KINDS, MAX_GRAMMAR_CHARS, Grammar
from sgl_jax.core.request_limits import INT32

# These limits are array sizes in the compiled step: entries per request on the device.
MAX_STOP_TOKEN_IDS = 16  # per request, in addition to the model's end tokens
MAX_LOGIT_BIAS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_IDS = 64
# The distributions that log-probabilities can be of: the model's; after penalties, bias, grammar
# and temperature; and after top-k, top-p and min-p, too, renormalised.
LogprobsMode = Literal["raw", "scaled", "processed"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("raw", "scaled", "processed")
MAX_STOP_STRINGS = 16

# Below this, logits divided by the temperature may overflow float32, and only the most likely token
# can be sampled: sampling is greedy.
MIN_TEMPERATURE = 1e-6
# The most likely of n tokens has a probability of at least 1 / n. So with up to ten million tokens,
# every smaller top_p keeps the same set. In float32, 1e-46 would be 0.
MIN_TOP_P = 1e-7


class Range(NamedTuple):
    """The values from `low` to `high`, both included unless `is_low_open`."""

    low: float
    high: float
    is_low_open: bool = False

    def holds(self, value: float) -> bool:
        """Return True if `value` is a finite number in the range."""
        above = value > self.low if self.is_low_open else value >= self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.is_low_open else '['}{self.low}, {self.high}]"


_INT64 = 2**63
RANDOM_SEED = -1  # in a request: draw a seed, as other engines do
# Of Threefry, for the seeds of choices.
_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "max_new_tokens": Range(0, INT32 - 1),
        "min_new_tokens": Range(0, INT32 - 1),
        "temperature": Range(0.0, 1e4),
        "top_k": Range(-1, INT32 - 1),
        "top_p": Range(0.0, 1.0, is_low_open=True),
        "min_p": Range(0.0, 1.0),
        # Divides positive logits and multiplies negative logits, before the temperature.
        "repetition_penalty": Range(1e-4, 1e4),
        "frequency_penalty": Range(-2.0, 2.0),
        "presence_penalty": Range(-2.0, 2.0),
        "logit_bias": Range(-100.0, 100.0),
        "seed": Range(-_INT64, _INT64 - 1),
    }
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request; defaults leave the model's distribution unchanged.

    Args:
        max_new_tokens: maximum tokens to generate; None: as many as the context allows; 0: only
            compute (and perhaps score) the prompt.
        min_new_tokens: stop tokens cannot be sampled before this many tokens are generated.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; -1 and 0 keep all.
        top_p: keep the smallest set of tokens with a total probability of at least top_p.
        min_p: drop tokens less likely than min_p times the most likely token.
        repetition_penalty: above 1 discourages tokens of the prompt and the output (CTRL paper,
            arXiv 1909.05858).
        frequency_penalty: subtracted once per earlier occurrence in the output.
        presence_penalty: subtracted once if the token occurred in the output.
        logit_bias: token id -> value added to its logit.
        seed: the same request with the same seed gets the same output, independent of the batch;
            None and -1 draw a seed.
        stop: strings that end the output.
        stop_token_ids: token ids that end the output, in addition to the model's end tokens.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        no_stop_trim: keep the stop string or stop token in the text.
        skip_special_tokens: omit special tokens from the text.
        json_schema, regex, ebnf, structural_tag: grammar that constrains the output, at most one of
            them (`core/grammar.py`). The output ends where the grammar does, with the model's
            end-of-sequence token, also with `ignore_eos`.
        reasoning: marks of the reasoning that may precede the constrained text
            (`Grammar.reasoning`).
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
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    reasoning: tuple[str, str] | None = None

    @property
    def grammar(self) -> Grammar | None:
        for kind in GRAMMAR_KINDS:
            text = getattr(self, kind)
            if text is not None:
                return Grammar(kind, text, self.reasoning)
        return None

    def checked(self, vocab_size: int) -> "SamplingParams":
        """Check all ranges and return the parameters in the engine's form.

        In that form, a temperature below `MIN_TEMPERATURE` is 0 (greedy), `top_p` is at least
        `MIN_TOP_P`, and a random seed is None. `stop_token_ids` outside the vocabulary are dropped:
        they are never generated.

        Raises:
            InvalidRequestError: names the first field outside its range.
        """
        self._check_logit_bias(vocab_size)
        self._check_grammar()
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            for each in value.values() if isinstance(value, dict) else (value,):
                if each is not None and not allowed.holds(each):
                    raise InvalidRequestError(f"{name} must be in {allowed}, got {each}", name)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens "
                f"({self.max_new_tokens})",
                "min_new_tokens",
            )
        return msgspec.structs.replace(
            self,
            temperature=self.temperature if self.temperature >= MIN_TEMPERATURE else 0.0,
            top_p=max(self.top_p, MIN_TOP_P),
            seed=None if self.seed == RANDOM_SEED else self.seed,
            stop_token_ids=self._checked_stops(vocab_size),
        )

    def _checked_stops(self, vocab_size: int) -> tuple[int, ...]:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop"
            )
        if any(not s for s in self.stop):
            raise InvalidRequestError("a stop string must not be empty", "stop")
        ids = tuple(dict.fromkeys(t for t in self.stop_token_ids if 0 <= t < vocab_size))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {len(ids)}", "stop_token_ids"
            )
        return ids

    def _check_grammar(self) -> None:
        given = [kind for kind in GRAMMAR_KINDS if getattr(self, kind) is not None]
        if not given:
            return
        if len(given) > 1:
            raise InvalidRequestError(
                f"an output is held to one grammar, got {' and '.join(given)}", given[1]
            )
        size = len(getattr(self, given[0]))
        if not 0 < size <= MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{given[0]} must have 1 to {MAX_GRAMMAR_CHARS} characters, got {size}", given[0]
            )
        if self.min_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens cannot be combined with {given[0]}, which decides the end",
                "min_new_tokens",
            )

    def _check_logit_bias(self, vocab_size: int) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"at most {MAX_LOGIT_BIAS} entries in logit_bias, got {len(bias)}", "logit_bias"
            )
        for token in bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"logit_bias holds {token}, outside the vocabulary [0, {vocab_size})",
                    "logit_bias",
                )


def choice_seed(seed: int, choice: int) -> int:
    """Return the int64 seed of choice number `choice` of a request with this int64 seed.

    The first choice has the request's seed. Any other choice has the two words of
    `jax.random.fold_in` of the key (high word, low word) and the number, so different seeds have no
    choices in common.
    """
    if choice == 0:
        return seed
    high, low = _threefry2x32((seed >> 32) & _MASK, seed & _MASK, choice)
    value = high << 32 | low
    return value - (1 << 64) if value >> 63 else value


def _threefry2x32(high: int, low: int, count: int) -> tuple[int, int]:
    """Return the block (0, count) under the key (high, low), all uint32. Threefry with 20 rounds:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    keys = (high, low, high ^ low ^ 0x1BD11BDA)
    x, y = keys[0], (count + keys[1]) & _MASK
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = (x + y) & _MASK
            y = ((y << distance | y >> (32 - distance)) & _MASK) ^ x
        x = (x + keys[(group + 1) % 3]) & _MASK
        y = (y + keys[(group + 2) % 3] + group + 1) & _MASK
    return x, y
