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
# With drafts: so many rows, all of them drafting; and the sizes around them.
_CPU_DRAFTING_ROWS = (1, 4, 16)
_CPU_CHUNK_TOKENS = 512
_ACCELERATOR_CHUNK_TOKENS = 2048
_CPU_RUNNING_REQUESTS = 32
_ACCELERATOR_RUNNING_REQUESTS = 256
# Fewer tokens than this cost an accelerator the same: it waits for the weights.
_ACCELERATOR_MIN_TOKENS = 8
_PROMPT_LOGPROB_TOKENS = 128


class StepLimits(NamedTuple):
    """The most that one rank does in one step."""

    rows: int
    tokens: int
    prompt_logprob_tokens: int
    draft_tokens: int = 0  # of one row


class Bucket(NamedTuple):
    """The padded shape of one rank's share of a step."""

    rows: int
    tokens: int
    prompt_logprobs: bool = False


class Buckets(NamedTuple):
    """All shapes of an engine, smallest first, and the one that scores prompts."""

    plain: tuple[Bucket, ...]
    prompt_logprobs: Bucket

    @property
    def all(self) -> tuple[Bucket, ...]:
        """Every shape there is a program for."""
        return (*self.plain, self.prompt_logprobs)

    def smallest(self, tokens: int) -> Bucket:
        """The smallest plain shape for `tokens` query tokens, whatever rows they belong to."""
        return next(bucket for bucket in self.plain if bucket.tokens >= tokens)


def step_limits(args: ServerArgs, platform: str) -> StepLimits:
    """What one rank may do in a step: the arguments, or the platform's default where they say 0."""
    on_cpu = platform == "cpu"
    requests = args.max_running_requests or (
        _CPU_RUNNING_REQUESTS if on_cpu else _ACCELERATOR_RUNNING_REQUESTS
    )
    chunk = args.chunked_prefill_size or (
        _CPU_CHUNK_TOKENS if on_cpu else _ACCELERATOR_CHUNK_TOKENS
    )
    rows = -(-requests // args.dp_size)
    tokens = max(chunk, rows)
    drafts = args.num_draft_tokens
    # Drafts come on top: they take nothing from what prompts may have.
    scored = min(_PROMPT_LOGPROB_TOKENS, tokens)
    return StepLimits(rows, tokens + rows * drafts, scored, drafts)


def choose_buckets(limits: StepLimits, platform: str) -> Buckets:
    """Shapes up to `limits`, which are themselves a shape, as is a full batch of decode."""
    queries_per_row = 1 + limits.draft_tokens
    if platform == "cpu":
        sizes = set(_CPU_TOKENS)
        if limits.draft_tokens:
            drafting = {rows * queries_per_row for rows in _CPU_DRAFTING_ROWS}
            sizes = {_CPU_TOKENS[0], _CPU_TOKENS[-1]} | drafting
        size = 2 * _CPU_TOKENS[-1]
    else:
        sizes = set()
        size = _ACCELERATOR_MIN_TOKENS
    while size < limits.tokens:
        sizes.add(size)
        size *= 2
    sizes = {size for size in sizes if size < limits.tokens}
    sizes |= {limits.rows, limits.rows * queries_per_row, limits.tokens}
    plain = tuple(Bucket(min(size, limits.rows), size) for size in sorted(sizes))
    # Running requests go on decoding beside the prompt that is being scored.
    scored_tokens = limits.prompt_logprob_tokens + limits.rows
    return Buckets(plain, Bucket(limits.rows, scored_tokens, prompt_logprobs=True))
