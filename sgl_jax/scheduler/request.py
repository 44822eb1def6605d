"""The scheduler's record of one request, from arrival to its last output.

While it runs, its tokens and lengths are columns of its rank's `RunningRows`; while it waits,
`tokens` holds them here. A request has no mode: it has tokens, and KV for some of them.
"""

import enum
import zlib
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.errors import ContextLengthError, InvalidRequestError
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import GenerateRequest, Reuse
from sgl_jax.core.shares import holder_of
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.eviction.path_records import PathEnd
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.row_states import can_go_back
from sgl_jax.sessions.store import Session
from sgl_jax.sessions.streaming import StreamingSession

_UNKNOWN = Reuse()


class RequestState(enum.Enum):
    """The state of a request. A retract leads from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """The scheduler's record of one request; only the scheduler owns it."""

    __slots__ = (
        "arrival",
        "arrived_s",
        "cached_tokens",
        "computed_len",
        "dp_rank",
        "expected",
        "images",
        "is_prompt_told",
        "kept_by",
        "kept_len",
        "lease",
        "line",
        "logprob_next",
        "matched_len",
        "matcher",
        "max_len",
        "message",
        "namespace",
        "num_fetches",
        "num_lost",
        "num_retractions",
        "pending_prompt_logprobs",
        "pending_values",
        "priority",
        "prompt_len",
        "rid",
        "session",
        "state",
        "tenant",
        "tokens",
        "value_next",
    )

    def __init__(
        self,
        message: GenerateRequest,
        arrival: int,
        max_len: int,
        *,
        prompt: Int32Array | None = None,
        session: Session | None = None,
        images: tuple[ImageInput, ...] | None = None,
    ) -> None:
        """Create a waiting request; `prompt` and `images`, if given, replace the message's."""
        # `tokens` needs a ninth of the memory of a list of objects, which the garbage collector
        # would also scan.
        self.message = replace(message, input_ids=[], images=())
        self.images = message.images if images is None else images
        self.rid = message.rid
        self.arrival = arrival  # order of arrival, kept over retracts
        self.arrived_s = 0.0  # set by the scheduler, as are times of ticks
        self.tokens: Int32Array = np.array(
            message.input_ids if prompt is None else prompt, np.int32
        )
        self.session = session
        self.namespace = message.namespace if session is None else session.namespace
        self.priority = 0  # larger is more important; set by the scheduler if it uses priorities
        self.tenant = 0  # number of its tenant; set by the scheduler
        # Id of the streaming session that keeps the lease at the end, and the length of the
        # session's history in the prompt: if the turn fails, the session keeps that part.
        self.kept_by: str | None = None
        self.kept_len = 0
        if isinstance(session, StreamingSession):
            self.kept_by = session.session_id
            self.kept_len = session.kept_len()
        self.prompt_len = len(self.tokens)
        self.is_prompt_told = session is None  # then the client sent all of it
        # Matches the output to its grammar, from before the request passes the gate to its end; set
        # and read by the engine, which compiles grammars.
        self.matcher: Any = None
        # Tokens that the grammar forces, and the position of the first.
        self.expected: tuple[int, Int32Array] = (0, np.zeros(0, np.int32))
        self.max_len = max_len  # prompt and output tokens at most
        self.state = RequestState.WAITING
        self.lease: KVLease | None = None
        self.line = -1  # in the waiting queue, while it waits
        self.dp_rank: int | None = message.dp_rank
        self.cached_tokens = 0
        self.matched_len = 0  # tokens of the cached prefix at its last admission
        self.num_retractions = 0
        self.num_fetches = 0  # of its prefix from the host
        # Tokens computed before the last retract, and tokens recomputed over all retracts, less the
        # new tokens gained since.
        self.computed_len = 0
        self.num_lost = 0
        self.begin_reports()

    def begin_reports(self) -> None:
        """Report the prompt's log-probabilities and tokens' values from the first requested on."""
        # Next prompt position to report the log-probability of; prompt_len if there is none.
        start = self.message.logprob_start_len
        self.logprob_next = self.prompt_len if start < 0 else min(start, self.prompt_len)
        self.pending_prompt_logprobs: list[TokenLogprobs] = []
        # Next position to report the values of; `max_len` if none are requested.
        message = self.message
        self.value_next = self.max_len
        if message.token_values:
            self.value_next = min(message.token_values_start, self.prompt_len)
        self.pending_values: dict[str, list[bytes]] = {}

    @property
    def max_kv_len(self) -> int:
        """Return the most tokens with KV: a request ends as its last token is sampled."""
        return self.max_len - 1

    @property
    def num_output_tokens(self) -> int:
        """Return the number of generated tokens read by the host, valid while waiting."""
        return len(self.tokens) - self.prompt_len

    @property
    def has_started(self) -> bool:
        return self.state is RequestState.RUNNING or self.num_retractions > 0

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that end the output; `eos_token_ids` are the model's."""
        sampling = self.message.sampling
        ignores = sampling.ignore_eos and sampling.grammar is None
        return tuple(dict.fromkeys((() if ignores else eos_token_ids) + sampling.stop_token_ids))

    def seed(self, random_seed: int) -> int:
        """Return its seed; without one, a uint32 from its id and the engine's `random_seed`."""
        seed = self.message.sampling.seed
        return zlib.crc32(self.rid.encode(), random_seed & 0xFFFFFFFF) if seed is None else seed

    def pop_prompt_len(self) -> int | None:
        """Return the prompt length of a session's turn, for its first output; None afterwards."""
        if self.is_prompt_told:
            return None
        self.is_prompt_told = True
        return self.prompt_len

    def path_end(self, tokens: Int32Array) -> PathEnd:
        """Return the end of the request's path: all its tokens, of a complete answer."""
        reuse, output = self.message.reuse, tokens[self.prompt_len :]
        calls = reuse.call_token_ids
        is_final = bool(calls) and not np.isin(output, calls).any()
        return PathEnd(
            self.prompt_len,
            self.arrived_s,
            is_final,
            reuse.pause_s,
            self.agent,
            holder_of(self.message.tenant),
            reuse.is_family,
            reuse.keep_s,
            reuse.is_last,
            self.is_of_agent,
        )

    @property
    def is_of_agent(self) -> bool:
        """Return whether anything tells that an agent sent it, so that its next one is expected."""
        return self.message.reuse != _UNKNOWN

    @property
    def agent(self) -> tuple[str, str] | None:
        """Return its conversation's id, which clients choose, in its namespace."""
        return (self.namespace, self.message.reuse.agent) if self.message.reuse.agent else None

    def session_lease(self, memory: RankMemory) -> KVLease | None:
        """Return the lease that its session keeps on a rank, if the request can resume from it."""
        lease = None if self.kept_by is None else memory.sessions.idle_lease(self.kept_by)
        if lease is None:
            return None
        length = min(lease.kv_committed_len, self.resumable_len)
        if self.resumable_len < lease.cache_protected_len or not can_go_back(memory, lease, length):
            # The tree owns more of it than the turn may read, or needed pages have left a window.
            # Match the tree instead.
            return None
        return lease

    @property
    def resumable_len(self) -> int:
        """Return the length of its session's history that it may read from the session's lease."""
        return min(self.kept_len, len(self.matchable()))

    def matchable(self) -> Int32Array:
        """Return the prefix that a cache may serve: without the last token, needed for its logits,
        and any position whose values, or from which a prompt log-probability, must still be
        computed."""
        limit = min(len(self.tokens) - 1, self.value_next)
        if self.logprob_next < self.prompt_len:
            limit = min(limit, max(self.logprob_next - 1, 0))
        return self.tokens[:limit]


def max_request_len(
    message: GenerateRequest, prompt_len: int, sizes: EngineSizes, capacity: int = 0
) -> int:
    """Return the maximum number of prompt and output tokens.

    `prompt_len` includes a session's history. The frontend sets a default length without that
    history, so such a length is reduced here (`is_length_default`). `capacity` is the session's
    limit of tokens; 0 for none. Raises `InvalidRequestError` if the request cannot be served.
    """
    limit = sizes.max_request_tokens
    if capacity:
        limit = min(limit, capacity)
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
    if message.routed_experts_start_len > prompt_len:
        raise InvalidRequestError(
            f"routed_experts_start_len must be in [0, {prompt_len}], the length of the prompt, got "
            f"{message.routed_experts_start_len}",
            "routed_experts_start_len",
        )
    return prompt_len + wanted


class Departed(NamedTuple):
    """The row that the request left, as recorded by a launched step, and the request's prefix."""

    row: int
    epoch: int  # of its lease
    tokens: Int32Array  # known tokens, int32[n]
    namespace: str
    matched_len: int  # tokens of the cached prefix at its admission
