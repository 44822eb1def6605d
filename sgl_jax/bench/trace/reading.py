"""Read recorded traffic: the requests' arrivals, lengths and shared prefixes.

The format comes from the traces published with Mooncake (FAST'25): one JSON object per line, with
`timestamp` (ms since the start), `input_length` and `output_length` (tokens), and `hash_ids`, one
id for each block of 512 tokens of the prompt; the last block may be partial. Equal ids mean equal
prompts up to and including that block. Tokens are not recorded; they are derived from the ids.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sgl_jax.core.messages import Reuse
from sgl_jax.core.step_plan import Int32Array

BLOCK_TOKENS = 512
# Derived tokens are in [0, VOCAB_SIZE), within the vocabulary of every served model.
VOCAB_SIZE = 32_000
_MAX_BLOCK_ID = 2**53  # block id * BLOCK_TOKENS fits in 64 bits
_NO_BLOCK = -1


class TraceError(ValueError):
    """The file is not recorded traffic; the message names the line."""


class TracedRequest(msgspec.Struct, frozen=True):
    """One recorded request; lengths are in tokens."""

    arrival_ms: Annotated[int, Meta(ge=0)] = msgspec.field(name="timestamp")
    input_len: Annotated[int, Meta(ge=1)] = msgspec.field(name="input_length")
    output_len: Annotated[int, Meta(ge=1)] = msgspec.field(name="output_length")
    # One id per block of 512 tokens of the prompt; the last block may be partial.
    block_ids: tuple[Annotated[int, Meta(ge=0, lt=_MAX_BLOCK_ID)], ...] = msgspec.field(
        name="hash_ids"
    )
    # Recorded agents only: id of the conversation, why the answer ended ("tool_use", "end_turn", or
    # "" if unknown), and the seconds from the end of the conversation's last answer.
    agent: str | None = None
    stop: str = ""
    think_s: Annotated[float, Meta(ge=0)] = 0.0


def read_trace(path: Path, num_requests: int | None = None) -> list[TracedRequest]:
    """Return the first `num_requests` of a file (None: all), in order of arrival.

    Raises:
        TraceError: a line is invalid or contradicts an earlier line, or the file has no request.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        requests = _parse(path.name, file, num_requests)
    if not requests:
        raise TraceError(f"{path.name} has no requests")
    return requests


def _parse(name: str, lines: Iterable[str], num_requests: int | None) -> list[TracedRequest]:
    requests: list[TracedRequest] = []
    preceding: dict[int, int] = {}  # block id -> id of the block before it
    for number, line in enumerate(lines, start=1):
        if num_requests is not None and len(requests) >= num_requests:
            break
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=TracedRequest)
            num_blocks = -(-request.input_len // BLOCK_TOKENS)
            if len(request.block_ids) != num_blocks:
                raise TraceError(
                    f"input_length {request.input_len} makes {num_blocks} blocks of {BLOCK_TOKENS} "
                    f"tokens, hash_ids has {len(request.block_ids)}"
                )
            if requests and request.arrival_ms < requests[-1].arrival_ms:
                raise TraceError(
                    f"timestamp {request.arrival_ms} is before {requests[-1].arrival_ms}, the "
                    "timestamp of the previous request"
                )
            _check_prefixes(request.block_ids, preceding)
        except (TraceError, msgspec.DecodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
        requests.append(request)
    return requests


def _check_prefixes(block_ids: Sequence[int], preceding: dict[int, int]) -> None:
    """Raise TraceError if an id has a different predecessor than before: ids name prefixes."""
    before = _NO_BLOCK
    for block_id in block_ids:
        known = preceding.setdefault(block_id, before)
        if known != before:
            raise TraceError(
                f"block {block_id} stands {_behind(before)} here and {_behind(known)} earlier, "
                "though equal ids mean equal prefixes"
            )
        before = block_id


def _behind(block_id: int) -> str:
    return "first" if block_id == _NO_BLOCK else f"behind block {block_id}"


def block_tokens(block_ids: Sequence[int]) -> Int32Array:
    """Return the tokens of whole blocks, int32[512 * len(block_ids)]; they depend only on the ids.
    Each is a hash of block id and position, by the finalizer of MurmurHash3 (Appleby, 2011)."""
    first = np.array(block_ids, np.uint64) * np.uint64(BLOCK_TOKENS)
    positions = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    mixed: NDArray[np.uint64] = np.add.outer(first, positions).ravel()
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(multiplier)
    mixed ^= mixed >> np.uint64(33)
    return (mixed % np.uint64(VOCAB_SIZE)).astype(np.int32)


def reuse_of(request: TracedRequest) -> Reuse:
    """Return what the client's headers and the answer tell of the agent's next request. The id that
    a tool call would have is of no answer, so that an answer without a call is final."""
    is_final = request.stop == "end_turn"
    return Reuse(agent=request.agent or "", call_token_ids=(VOCAB_SIZE,) if is_final else ())


def prompt_tokens(request: TracedRequest) -> Int32Array:
    """Return the prompt's tokens, int32[input_len], derived from its block ids."""
    return block_tokens(request.block_ids)[: request.input_len]
