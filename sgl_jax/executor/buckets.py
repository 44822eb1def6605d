"""The few shapes that steps are padded to, so that all programs can be compiled before ready.

A shape is a number of query tokens and the rows that go with it: never more rows than tokens,
since every row has at least one. So a batch of pure decode lands in a shape with as many rows as
tokens, and mixed batches share the shapes above it.
"""

from typing import NamedTuple

from sgl_jax.core.server_args import ServerArgs

# Every shape costs two seconds of compilation on a CPU. The scheduler plans steps that fill a
# shape where it can, so few of them do.
_CPU_TOKENS = (2, 8, 32, 128, 512)
# With drafts: so many rows, all of them drafting; the smallest of the sizes above; and the largest,
# which are for prompts.
_CPU_DRAFTING_ROWS = (1, 4, 16)
# Fewer tokens than this cost an accelerator the same: it waits for the weights.
_ACCELERATOR_MIN_TOKENS = 8
_PROMPT_LOGPROB_TOKENS = 128


class StepLimits(NamedTuple):
    """The most that one rank does in one step."""

    rows: int
    chunk_tokens: int  # of prompts
    prompt_logprob_tokens: int  # of these, with log-probabilities reported
    draft_tokens: int = 0  # of one row

    @property
    def decode_tokens(self) -> int:
        """Query tokens of a full batch of decode rows, all of them drafting."""
        return self.rows * (1 + self.draft_tokens)

    @property
    def tokens(self) -> int:
        """Query tokens in all: decode rows take nothing from the prompts' share."""
        return self.chunk_tokens + self.decode_tokens


class Bucket(NamedTuple):
    """The padded shape of one rank's share of a step."""

    rows: int
    tokens: int


class Buckets(NamedTuple):
    """All shapes of an engine, smallest first: each has a program."""

    all: tuple[Bucket, ...]

    def smallest(self, tokens: int) -> Bucket:
        """The smallest shape for `tokens` query tokens, of any number of rows."""
        return next(bucket for bucket in self.all if bucket.tokens >= tokens)


def step_limits(args: ServerArgs) -> StepLimits:
    """One rank's limits of a step, from resolved arguments."""
    rows, chunk = -(-args.max_running_requests // args.dp_size), args.chunked_prefill_size
    return StepLimits(rows, chunk, min(_PROMPT_LOGPROB_TOKENS, chunk), args.num_draft_tokens)


def choose_buckets(limits: StepLimits, platform: str) -> Buckets:
    """Shapes up to `limits`, which are themselves a shape.

    So are a full batch of decode, drafting or not, and a full chunk alone.
    """
    if platform == "cpu":
        sizes = set(_CPU_TOKENS)
        if limits.draft_tokens:
            drafting = {rows * (1 + limits.draft_tokens) for rows in _CPU_DRAFTING_ROWS}
            sizes = {_CPU_TOKENS[0], *_CPU_TOKENS[-2:]} | drafting
        size = 2 * _CPU_TOKENS[-1]
    else:
        sizes = set()
        size = _ACCELERATOR_MIN_TOKENS
    while size < limits.tokens:
        sizes.add(size)
        size *= 2
    sizes = {size for size in sizes if size < limits.tokens}
    sizes |= {limits.rows, limits.decode_tokens, limits.chunk_tokens, limits.tokens}
    return Buckets(tuple(Bucket(min(size, limits.rows), size) for size in sorted(sizes)))
