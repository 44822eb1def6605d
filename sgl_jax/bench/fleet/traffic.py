"""Recorded traffic, multiplied: copies of the recorded users, each with different prefixes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from sgl_jax.bench.trace.reading import TracedRequest

# Copies start evenly within this time, so that bursts of the record do not all coincide.
_SPREAD_S = 60.0
# A block in this share of the recorded requests, and in this many, belongs to the service (its
# system prompt), not to a user.
_SHARED_SHARE, _MIN_SHARED = 0.1, 20


class FleetRequest(NamedTuple):
    """One request of a fleet's traffic."""

    number: int  # in order of arrival
    arrival_s: float
    traced: TracedRequest
    conversation: int  # the first user block, else the last block


class Traffic:
    """`copies` of a record, merged in order of arrival.

    Blocks in a tenth of the recorded requests are common to all copies; all other blocks differ
    between copies.

    Args:
        trace: at least one request, in order of arrival.
        copies: number of copies.
        speedup: factor by which arrivals are faster than recorded.

    `arrivals_s`, `input_lens` and `output_lens` (tokens) have an entry for each request.
    """

    def __init__(self, trace: Sequence[TracedRequest], copies: int, speedup: float = 1.0) -> None:
        self._trace = trace
        uses = Counter(block for request in trace for block in request.block_ids)
        # Small indices replace the record's ids, so that the ids of all copies fit in 64 bits.
        self._index_of = {id: index for index, id in enumerate(uses)}
        least = max(_SHARED_SHARE * len(trace), _MIN_SHARED)
        self._shared = {self._index_of[id] for id, num in uses.items() if num >= least}
        recorded_s = np.array([request.arrival_ms for request in trace]) * 1e-3
        starts_s = np.arange(copies) * (_SPREAD_S / copies)
        arrivals_s = np.add.outer(starts_s, (recorded_s - recorded_s[0]) / speedup).ravel()
        order = np.argsort(arrivals_s, kind="stable")
        self.arrivals_s = arrivals_s[order]
        self._copies, self._indices = np.divmod(order, len(trace))
        self.input_lens = np.array([request.input_len for request in trace])[self._indices]
        self.output_lens = np.array([request.output_len for request in trace])[self._indices]

    def __len__(self) -> int:
        return len(self.arrivals_s)

    def __iter__(self) -> Iterator[FleetRequest]:
        return map(self.request, range(len(self)))

    def request(self, number: int) -> FleetRequest:
        """Return request `number` with the block ids of its copy."""
        recorded = self._trace[self._indices[number]]
        shift = int(self._copies[number]) * len(self._index_of)
        indices = map(self._index_of.__getitem__, recorded.block_ids)
        shared = self._shared
        block_ids = tuple(index if index in shared else index + shift for index in indices)
        traced = msgspec.structs.replace(recorded, block_ids=block_ids)
        own = next((id for id in block_ids if id not in shared), block_ids[-1])
        return FleetRequest(number, float(self.arrivals_s[number]), traced, own)
