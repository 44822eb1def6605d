"""Why a waiting request waits: the reason of one, and the number of requests by reason."""

from typing import Literal, NamedTuple

WaitKind = Literal[
    "step", "rows", "pages", "prefix", "rank", "order", "tenant", "program", "paused"
]


class WaitReason(NamedTuple):
    """What a waiting request waits for, as of the last planned step.

    `kind` is
    "step": it fits, but the step's prompt tokens are given out, or memory was just retracted for
    others: it is tried again in the next;
    "rows", "pages": no rank that it may run on has a row, or none has enough pages, of which
    `pages_short` says by rank how many are lacking;
    "prefix": what request `behind` is computing, which it will read;
    "rank": room on rank `dp_rank`, which has more of its prefix than those that have room;
    "order": request `behind`, for which the rank is held since it was passed over too often;
    "tenant": so many requests of its tenant run as may;
    "program": the programs of steps with a grammar, which are being compiled;
    "paused": the end of a pause, or fewer requests to run, which forced retracts (a test's setting)
    ask for.
    """

    kind: WaitKind
    pages_short: dict[int, int] = {}  # noqa: RUF012 (never written to)
    behind: str | None = None
    dp_rank: int | None = None
