"""Frames of the memory view: JSON values for the page, made from snapshots (`reader.py`).

A key frame has the code of every page, any other frame only the codes changed since the frame
before. Both are runs [first page, count, code]. All counts come from the engine; a frame adds rates
and marks, which need two snapshots.

The CPU-memory pools follow the device pools. An arriving page looks like a leased page, a leaving
page like a protected page, in code and state.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.metrics.rank_state import host_block_states, page_states, pool_names, row_states

Snapshot = Mapping[str, Any]
Mark = Mapping[str, Any]
Run = list[int]

_RATE_INTERVAL_S = 1.0
_TEXTS_KEPT = 16_384
# Counters of a rank -> the kind of mark for a change of it on the timeline.
_MARKS = {
    "requests_retracted": "retract",
    "requests_preempted": "preemption",
    "sessions_evicted": "session eviction",
    "evicted_pages": "page eviction",
}
_COMPILES = ("compiles_after_ready", "compiles_in_background")


class ViewFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The page's initial facts: of a running engine, with the samples of the last ten minutes, or
    of a recording of `num_frames` frames, with a sample for each."""

    model: str
    version: str
    dp_size: int
    page_size: int  # tokens
    samples: list[dict[str, Any]]
    shows_text: bool = False
    is_recording: bool = False
    num_frames: int = 0


class FrameBuilder:
    """Makes the frames of successive snapshots of one engine.

    Args:
        decode: converts token ids to text; None: no text is shown.
    """

    def __init__(self, decode: Callable[[list[int]], str] | None = None) -> None:
        self._text: Callable[[bytes], str] | None = None
        if decode is not None:
            # The first tokens of a request or node do not change, so most texts are cached.
            self._text = lru_cache(_TEXTS_KEPT)(
                lambda tokens: decode(np.frombuffer(tokens, np.int32).tolist())
            )
        self._rates = _Rates()
        self._codes: list[list[Int32Array]] = []  # by rank and pool
        self._frame: dict[str, Any] = {}
        self._counts: Counter[tuple[int | None, str]] | None = None
        self._unsampled: list[Mark] = []
        self.number = -1

    def add(self, snapshot: Snapshot, time_s: float) -> dict[str, Any]:
        """Return the frame of the next snapshot, at `time_s` seconds since any origin."""
        before, self._codes = self._codes, _codes_of(snapshot)
        self._rates.update(snapshot, time_s)
        self.number += 1
        ranks = [self._rank(rank) for rank in snapshot["ranks"]]
        self._frame = {
            "number": self.number,
            "step": snapshot["counters"]["steps_planned"],
            "time_s": time_s,
            "num_running": sum(rank["num_running"] for rank in ranks),
            "num_waiting": snapshot["num_waiting"],
            "num_sessions": snapshot["num_sessions"],
            "tokens_per_s": self._rates.of_engine,
            "ranks": ranks,
            "waiting": snapshot["waiting"],
            "num_waiting_left_out": snapshot["num_waiting_left_out"],
            "sessions": snapshot["sessions"],
            "num_sessions_left_out": snapshot["num_sessions_left_out"],
            "marks": self._new_marks(snapshot),
        }
        self._unsampled += self._frame["marks"]
        return self._with_runs(before)

    def key_frame(self) -> dict[str, Any]:
        return self._with_runs([])

    def sample(self) -> dict[str, Any]:
        """Return the last frame's point on the timeline, with the marks since the sample before."""
        frame = self._frame
        names = ("time_s", "step", "num_running", "num_waiting", "tokens_per_s")
        ranks = [{"pages": [pool["pages"] for pool in rank["pools"]]} for rank in frame["ranks"]]
        marks, self._unsampled = added_up(self._unsampled), []
        return {**{name: frame[name] for name in names}, "ranks": ranks, "marks": marks}

    def tree(self, snapshot: Snapshot) -> dict[str, Any]:
        return {
            "step": snapshot["counters"]["steps_planned"],
            "ranks": [
                {**rank, "nodes": [self._with_text(node) for node in rank["nodes"]]}
                for rank in snapshot["tree"]
            ],
        }

    def _rank(self, rank: Snapshot) -> dict[str, Any]:
        names, columns = pool_names(rank), rank["leases"]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        leases = [
            {**self._with_text(lease), "tokens_per_s": self._rates.of_request(lease["rid"])}
            for lease in rows
        ]
        return {
            "dp_rank": rank["dp_rank"],
            "is_closed": rank["defect"] is None,
            "defect": rank["defect"],
            "defect_pages": rank["defect_pages"],
            "num_running": rank["num_running"],
            "num_waiting": rank["num_waiting"],
            "pools": [
                {"name": name, "is_host": False, "pages": page_states(pool)}
                for name, pool in zip(names, rank["pools"], strict=True)
            ]
            + [
                {"name": f"host {name}", "is_host": True, "pages": _host_states(pool)}
                for name, pool in zip(names, rank["host_pools"], strict=False)
            ],
            "rows": row_states(rank),
            "leases": leases,
            "counters": rank["counters"],
        }

    def _with_runs(self, before: Sequence[Sequence[Int32Array]]) -> dict[str, Any]:
        """Return the last frame with the runs that differ from `before`, or all if it is empty."""
        ranks = []
        for dp_rank, rank in enumerate(self._frame["ranks"]):
            pools = []
            for pool, facts in enumerate(rank["pools"]):
                codes = self._codes[dp_rank][pool]
                differs = codes != before[dp_rank][pool] if before else np.ones(len(codes), bool)
                pools.append({**facts, "num_pages": len(codes), "runs": runs(codes, differs)})
            ranks.append({**rank, "pools": pools})
        return {**self._frame, "is_key": not before, "ranks": ranks}

    def _with_text(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry with the text of its `tokens`, if any, instead of them."""
        fields = dict(entry)
        tokens = fields.pop("tokens", None)
        if tokens is not None and self._text is not None:
            fields["text"] = self._text(tokens)
        return fields

    def _new_marks(self, snapshot: Snapshot) -> list[Mark]:
        counts: Counter[tuple[int | None, str]] = Counter()
        for rank in snapshot["ranks"]:
            for name, kind in _MARKS.items():
                counts[rank["dp_rank"], kind] = rank["counters"][name]
        counts[None, "compilation"] = sum(snapshot["counters"].get(name, 0) for name in _COMPILES)
        before, self._counts = self._counts, counts
        return [] if before is None else _listed(counts - before)


def added_up(marks: Iterable[Mark]) -> list[Mark]:
    """Return one mark for each kind and rank, with the sum of their counts."""
    counts: Counter[tuple[int | None, str]] = Counter()
    for mark in marks:
        counts[mark["dp_rank"], mark["kind"]] += mark["count"]
    return _listed(counts)


def _listed(counts: Mapping[tuple[int | None, str], int]) -> list[Mark]:
    return [
        {"dp_rank": dp_rank, "kind": kind, "count": count}
        for (dp_rank, kind), count in counts.items()
    ]


class _Rates:
    """Output tokens per second, of the engine and of each request, over the last second or more."""

    def __init__(self) -> None:
        self.of_engine = 0.0
        self._of_requests: dict[str, float] = {}
        self._at_s: float | None = None
        self._generated = 0
        self._outputs: dict[str, int] = {}

    def of_request(self, rid: str | None) -> float:
        return 0.0 if rid is None else self._of_requests.get(rid, 0.0)

    def update(self, snapshot: Snapshot, time_s: float) -> None:
        seconds = None if self._at_s is None else time_s - self._at_s
        if seconds is not None and seconds < _RATE_INTERVAL_S:
            return
        generated = snapshot["counters"]["generated_tokens"]
        outputs: dict[str, int] = {}
        gained: dict[str, int] = {}
        for rank in snapshot["ranks"]:
            leases = rank["leases"]
            columns = leases["rid"], leases["num_output"], leases["num_retractions"]
            for rid, count, num_retractions in zip(*columns, strict=True):
                if rid is not None:
                    # After a retract, a request returns with its earlier output.
                    unseen = count if num_retractions else 0
                    outputs[rid], gained[rid] = count, count - self._outputs.get(rid, unseen)
        if seconds is not None:
            self.of_engine = (generated - self._generated) / seconds
            self._of_requests = {rid: count / seconds for rid, count in gained.items()}
        self._at_s, self._generated, self._outputs = time_s, generated, outputs


def runs(codes: Int32Array, is_listed: BoolArray) -> list[Run]:
    """Return the listed pages as runs of adjacent equal codes: [first page, count, code]."""
    pages = np.flatnonzero(is_listed)
    if not len(pages):
        return []
    values = codes[pages]
    starts_run = np.ones(len(pages), bool)
    starts_run[1:] = (np.diff(pages) != 1) | (values[1:] != values[:-1])
    firsts = np.flatnonzero(starts_run)
    counts = np.diff(np.append(firsts, len(pages)))
    columns = np.stack([pages[firsts], counts, values[firsts]], axis=1)
    is_collected = gc.isenabled()
    gc.disable()  # otherwise collections caused by many new lists take most of the time
    try:
        found: list[Run] = columns.tolist()
    finally:
        if is_collected:
            gc.enable()
    return found


def _codes_of(snapshot: Snapshot) -> list[list[Int32Array]]:
    return [
        [np.frombuffer(codes, np.int32) for codes in (*rank["codes"], *rank["host_codes"])]
        for rank in snapshot["ranks"]
    ]


def _host_states(pool: Snapshot) -> dict[str, int]:
    """Return pages in CPU memory by the equivalent state of a device page."""
    states = host_block_states(pool)
    arriving, leaving = states.pop("arriving"), states.pop("leaving")
    return {**states, "leased": arriving, "cached_protected": leaving, "session_held": 0}
