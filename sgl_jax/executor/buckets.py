"""The few shapes that steps are padded to, so that all programs can be compiled before ready.

A shape is a number of query tokens and the rows that go with it: never more rows than tokens,
since every row has at least one. So a batch of pure decode lands in a shape with as many rows as
tokens, and mixed batches share the shapes above it. On a CPU, decode rows that all draft have
shapes with fewer rows than tokens, since each row costs a draft layer as much as a token does.
"""

from typing import NamedTuple

from sgl_jax.core.server_args import ServerArgs

# Every shape costs two seconds of compilation on a CPU. The scheduler plans steps that fill a
# shape where it can, so few of them do.
_CPU_TOKENS = (2, 8, 32, 128, 512)
# With drafts also shapes of so many rows, all of them drafting.
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

    def for_any_rows(self) -> tuple[int, ...]:
        """Token sizes of the shapes that hold as many rows as tokens, or the most that exist."""
        most = self.all[-1].rows
        return tuple(own.tokens for own in self.all if own.rows == min(own.tokens, most))

    def smallest(self, tokens: int, rows: int) -> Bucket:
        """The smallest shape for `tokens` query tokens of `rows` rows."""
        return next(own for own in self.all if own.tokens >= tokens and own.rows >= rows)


def step_limits(args: ServerArgs) -> StepLimits:
    """One rank's limits of a step, from resolved arguments."""
    rows, chunk = -(-args.max_running_requests // args.dp_size), args.chunked_prefill_size
    return StepLimits(rows, chunk, min(_PROMPT_LOGPROB_TOKENS, chunk), args.num_draft_tokens)


def choose_buckets(limits: StepLimits, platform: str) -> Buckets:
    """Shapes up to `limits`, which are themselves a shape.

    So are a full batch of decode, drafting or not, and a full chunk alone.
    """
    size = _ACCELERATOR_MIN_TOKENS
    shapes = []
    if platform == "cpu":
        size = 2 * _CPU_TOKENS[-1]
        shapes = [Bucket(own, own) for own in _CPU_TOKENS]
        if limits.draft_tokens:
            each = 1 + limits.draft_tokens
            drafting = [rows for rows in _CPU_DRAFTING_ROWS if rows <= limits.rows]
            shapes += [Bucket(rows, rows * each) for rows in drafting]
    while size < limits.tokens:
        shapes.append(Bucket(size, size))
        size *= 2
    shapes = [shape for shape in shapes if shape.tokens < limits.tokens]
    for most in (limits.rows, limits.decode_tokens, limits.chunk_tokens, limits.tokens):
        shapes.append(Bucket(most, most))
    capped = {Bucket(min(shape.rows, limits.rows), shape.tokens) for shape in shapes}
    return Buckets(tuple(sorted(capped, key=lambda shape: (shape.tokens, shape.rows))))
