"""When paths are expected back: one record for each conversation, which outlives its pages.

A request continues the conversation of the same agent and tenant whose last prompt it extends to at
least half. The pause is the time from the end of the former answer to the arrival of the next
request. The record keeps the geometric mean of the pauses, since most are short and a few are very
long. After a final answer, which a person reads, the pause is expected to be four times as long as
after a tool call. A request sent before the former answer ended, such as another choice of the same
prompt, tells nothing of the pauses.

A client's forecast of a pause replaces the mean. Forecasts are corrected by the mean error of their
tenant's earlier ones that were too short, so they gain nothing from another tenant's paths. Those
that were too long correct nothing: otherwise they would make others of the tenant shorter.

Pauses are counted in quarters of octaves: a *class* of expected return. Classes come from a table
of square roots, so all hosts compute the same ones.
"""

import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from itertools import accumulate, repeat
from math import sqrt
from operator import mul
from typing import NamedTuple, TypeAlias

import numpy as np

from sgl_jax.mem_cache.eviction.ghost_pages import Int64Array
from sgl_jax.mem_cache.tree_node import TreeNode

NUM_RETURN_CLASSES = 64
REPLACED = 0  # the rest of a path after its conversation took another one, or ended
EXCHANGED = NUM_RETURN_CLASSES  # and up: classes that other paths had (`retained_paths.py`)
_SHORTEST = NUM_RETURN_CLASSES - 1  # pauses of a second or less
_PAUSES_S = list(accumulate(repeat(sqrt(sqrt(2.0)), _SHORTEST - 1), mul, initial=1.0))
# The expected pause of each class in seconds; a replaced rest is never expected.
PAUSE_S = np.array(2 * [np.inf, *reversed(_PAUSES_S)])
_FIRST_PAUSE_S = 60.0
_FINAL_CLASSES = 8  # four times as long
_KEPT_PART = 0.7  # weight of the former mean
_ERROR_PART = 0.05  # weight of a forecast's error in the mean of its tenant's
_MAX_RECORDS = 4096
_MAX_TENANTS = 1024  # with forecasts
_TAIL_PAGES = 64  # pages of a path's end that may be recognized as replaced
_NO_PAGES = np.zeros(0, np.int64)


class PathEnd(NamedTuple):
    """The end of a request's answer: `prompt_len` tokens, arrived at `arrived_s`. `is_final` if no
    tool is called; `pause_s` if the client said when the next request comes; `agent` if it sent the
    conversation's id, with its namespace, or with `is_family` the id of a group of conversations.
    Forecasts are compared with the pauses by `tenant`. The client wants the path kept for `keep_s`;
    with `is_last`, the conversation ended. Nothing is recorded unless it `is_expected`."""

    prompt_len: int
    arrived_s: float
    is_final: bool = False
    pause_s: float | None = None
    agent: tuple[str, str] | None = None
    tenant: str = ""
    is_family: bool = False
    keep_s: float = 0.0
    is_last: bool = False
    is_expected: bool = True

    @property
    def holder(self) -> Hashable:
        """Return whose paths its hints order: the tenant's, or one agent's among anonymous ones."""
        return self.tenant or self.agent or ""


class PathReturn(NamedTuple):
    """The class of a path, and its class without hints of the client, for pages that others use,
    too; the hashes of its former path that it lacks, and that path's leaf."""

    return_class: int
    measured_class: int
    replaced: Int64Array
    former: TreeNode | None


def class_of(pause_s: float) -> int:
    """Return the class of the longest pause in the table that is not above `pause_s`."""
    return NUM_RETURN_CLASSES - max(bisect_right(_PAUSES_S, pause_s), 1)


FIRST_CLASS = class_of(_FIRST_PAUSE_S)


_Owner: TypeAlias = tuple[tuple[str, str] | None, str]  # agent, if known, and tenant
_Key: TypeAlias = int | None  # the hash of a prefix; None: the last record of a known agent


class _Record:
    __slots__ = (
        "ended_s",
        "first",
        "forecast",
        "keys",
        "leaf",
        "mean",
        "num_pages",
        "owner",
        "tail",
    )

    mean: float  # in classes
    ended_s: float
    first: int  # hash of the first page
    keys: list[_Key]
    forecast: int | None  # class of the client's forecast
    num_pages: int
    tail: Int64Array  # the last hashes of the path
    leaf: "weakref.ref[TreeNode]"

    def __init__(self, owner: _Owner) -> None:
        self.owner = owner
        self.mean = float(FIRST_CLASS)
        self.num_pages, self.tail = 0, _NO_PAGES


class PathRecords:
    """The records of the conversations that answered last."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, _Record] = OrderedDict()  # by id(), the oldest first
        # An owner's keys find only its records, since many agents begin with the same prompt.
        self._by_owner: dict[_Owner, dict[_Key, _Record]] = {}
        self._errors: OrderedDict[str, float] = OrderedDict()  # in classes, by tenant

    def __len__(self) -> int:
        return len(self._records)

    def clear(self) -> None:
        self._records.clear()
        self._by_owner.clear()
        self._errors.clear()

    def ended(
        self, hashes: Int64Array, num_prompt: int, leaf: TreeNode, end: PathEnd, now_s: float
    ) -> PathReturn:
        """Record the end of an answer at `leaf`, the end of a path with these hashes, of which the
        first `num_prompt` are the prompt's."""
        if not num_prompt:
            return PathReturn(FIRST_CLASS, FIRST_CLASS, _NO_PAGES, None)
        prompt, owner = hashes[:num_prompt].tolist(), (end.agent, end.tenant)
        record = self._find(prompt, owner)
        replaced, former = _NO_PAGES, None
        if record is None:
            record = _Record(owner)
        else:
            if end.arrived_s > record.ended_s:
                pause_class = class_of(end.arrived_s - record.ended_s)
                record.mean = _KEPT_PART * record.mean + (1 - _KEPT_PART) * pause_class
                if record.forecast is not None:
                    self._note_error(end.tenant, min(pause_class - record.forecast, 0))
                replaced = _not_in(record, hashes)
            if len(replaced):
                former = record.leaf()
            self._forget(record)
        record.ended_s, record.leaf = now_s, weakref.ref(leaf)
        record.first, record.num_pages = prompt[0], len(hashes)
        record.tail = hashes[-_TAIL_PAGES:].copy()
        record.keys = [*_keys(prompt)]
        if end.agent is not None and not end.is_family:
            record.keys.append(None)
        measured = return_class = _rounded(record.mean - _FINAL_CLASSES * end.is_final)
        record.forecast = None
        if end.is_last:
            return PathReturn(REPLACED, measured, replaced, former)
        self._remember(record)
        if end.pause_s is not None:
            record.forecast = class_of(end.pause_s)
            return_class = _rounded(record.forecast + self._errors.get(end.tenant, 0.0))
        return PathReturn(return_class, measured, replaced, former)

    def _note_error(self, tenant: str, error: float) -> None:
        mean = self._errors.pop(tenant, 0.0)
        self._errors[tenant] = mean + _ERROR_PART * (error - mean)
        if len(self._errors) > _MAX_TENANTS:
            self._errors.popitem(last=False)

    def _find(self, prompt: list[int], owner: _Owner) -> _Record | None:
        """Return the agent's record if the prompt has its first page, since side requests may have
        its id, too; else the owner's record with the longest key in the prompt."""
        own = self._by_owner.get(owner)
        if own is None:
            return None
        record = own.get(None)
        if record is not None and record.first == prompt[0]:
            return record
        return next((own[page_hash] for page_hash in reversed(prompt) if page_hash in own), None)

    def _remember(self, record: _Record) -> None:
        own = self._by_owner.setdefault(record.owner, {})
        own.update(dict.fromkeys(record.keys, record))
        self._records[id(record)] = record
        if len(self._records) > _MAX_RECORDS:
            self._forget(next(iter(self._records.values())))

    def _forget(self, record: _Record) -> None:
        del self._records[id(record)]
        own = self._by_owner.get(record.owner, {})
        for key in record.keys:
            if own.get(key) is record:
                del own[key]
        if not own:
            self._by_owner.pop(record.owner, None)


def _rounded(expected: float) -> int:
    return min(max(round(expected), REPLACED + 1), _SHORTEST)


def _keys(prompt: list[int]) -> list[int]:
    """Return the hashes 1, 2, 4, ... pages before the end of a prompt, down to its half: its last
    pages may differ in the next prompt, and its beginning may be another conversation's."""
    return [prompt[-(1 << i)] for i in range(max(len(prompt) // 2, 1).bit_length())]


def _not_in(record: _Record, hashes: Int64Array) -> Int64Array:
    """Return the end of the record's path that a path with `hashes` lacks; all hashes of a path
    after its first page that differs, differ."""
    first = record.num_pages - len(record.tail)
    other = hashes[first : record.num_pages]
    is_same = record.tail[: len(other)] == other
    num_same = int(is_same.argmin()) if not is_same.all() else len(other)
    return record.tail[num_same:]
