"""The few shapes to which steps are padded, so that all programs can be compiled at start-up.

A shape is a number of query tokens and a number of rows. It never has more rows than tokens, since
every row has at least one token. A pure decode batch uses a shape with as many rows as tokens, and
mixed batches share the larger shapes. On a CPU, decode rows with drafts have shapes with fewer rows
than tokens, since a row costs a draft layer as much as a token.
"""

from typing import NamedTuple

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.shares import shared_chunk_tokens
from sgl_jax.kernels.row_blocks import block_rows_of

# Every shape costs two seconds of compilation on a CPU. Few shapes suffice, because the scheduler
# plans steps that fill a shape where it can.
_CPU_TOKENS = (2, 8, 32, 128, 512)
# Rows of further shapes with drafts; all rows draft.
_CPU_DRAFTING_ROWS = (1, 4, 16)
# Fewer tokens cost an accelerator the same: it is bound by reading weights.
_ACCELERATOR_MIN_TOKENS = 8
_PROMPT_LOGPROB_TOKENS = 128


class Bucket(NamedTuple):
    """The padded shape of one rank's share of a step."""

    rows: int
    tokens: int


class Buckets(NamedTuple):
    """The limits of one rank in one step, and the shapes up to them, with one program each."""

    rows: int
    chunk_tokens: int  # prompt tokens
    draft_tokens: int  # per row
    all: tuple[Bucket, ...]  # smallest first

    @property
    def decode_tokens(self) -> int:
        """Return the query tokens of a full batch of decode rows that all draft."""
        return self.rows * (1 + self.draft_tokens)

    @property
    def tokens(self) -> int:
        """Return the total query tokens: decode rows do not reduce the prompts' share."""
        return self.chunk_tokens + self.decode_tokens

    @property
    def prompt_logprob_tokens(self) -> int:
        """Return the maximum prompt tokens with log-probabilities reported."""
        return min(_PROMPT_LOGPROB_TOKENS, self.chunk_tokens)

    def for_any_rows(self) -> tuple[int, ...]:
        """Return the token sizes of shapes with as many rows as tokens, or the maximum rows."""
        return tuple(own.tokens for own in self.all if own.rows >= min(own.tokens, self.rows))

    @property
    def decode(self) -> tuple[Bucket, ...]:
        """Return the shapes of steps of decode rows without drafts."""
        return tuple(own for own in self.all if own.rows == own.tokens)

    @property
    def first(self) -> tuple[Bucket, ...]:
        """Return the shapes that serve every step: that of a full decode batch, and the largest."""
        decode = self.smallest(self.decode_tokens, self.rows)
        return tuple(dict.fromkeys((decode, self.all[-1])))

    def by_saving(self) -> list[Bucket]:
        """Return the other shapes. Each is the one that reduces the tokens of its steps to the
        smallest part, if it is added to `first` and the shapes before it."""
        added, rest = list(self.first), [shape for shape in self.all if shape not in self.first]
        while rest:
            ready = self._replace(all=tuple(shape for shape in self.all if shape in added))
            best = min(rest, key=lambda own: own.tokens / ready.smallest(*reversed(own)).tokens)
            added.append(best)
            rest.remove(best)
        return added[len(self.first) :]

    def smallest(self, tokens: int, rows: int) -> Bucket:
        return next(own for own in self.all if own.tokens >= tokens and own.rows >= rows)


def choose_buckets(args: ServerArgs, platform: str) -> Buckets:
    """Return the shapes for resolved arguments. There are exact shapes for all limits, for a full
    decode batch (with and without drafts), and for a full chunk; where tenants share the engine,
    also for an eighth of a chunk with a full decode batch."""
    limits = Buckets(
        rows=-(-args.max_running_requests // args.dp_size),
        chunk_tokens=args.chunked_prefill_size,
        draft_tokens=args.num_draft_tokens,
        all=(),
    )
    most_rows, size = limits.rows, _ACCELERATOR_MIN_TOKENS
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
    exact = [limits.rows, limits.decode_tokens, limits.chunk_tokens, limits.tokens]
    if args.fair_share == "tokens":
        exact.append(limits.decode_tokens + shared_chunk_tokens(limits.chunk_tokens))
    for most in exact:
        shapes.append(Bucket(most, most))
    if args.enable_deterministic_inference:
        # Whole blocks of rows, which are the least that a layer computes.
        least = block_rows_of(args.attention_backend)
        most_rows = max(limits.rows, least)
        shapes = [Bucket(*(max(size, least) for size in shape)) for shape in shapes]
    capped = {Bucket(min(shape.rows, most_rows), shape.tokens) for shape in shapes}
    in_order = sorted(capped, key=lambda shape: (shape.tokens, shape.rows))
    return limits._replace(all=tuple(in_order))
